# SPDX-License-Identifier: BSD-3-Clause
"""Which steps are skipped, decided where the numbers are, before the host has seen them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .spike_rule import SpikeRule

# The host learns of these one step late, when the update has long been made.
DECIDED_ON_THE_DEVICE = ("nonfinite", "norm_spike", "loss_spike")
# Why the latch may close; their numbers count from 1.
REASONS = ("nonfinite", "loss_spike", "norm_spike", "loss_scale")


class SkipLatch:
    """Skips updates from a bad step on, until the host has seen the record of that step and releases it.

    A step is bad if loss or gradients are not finite, if one of them spikes, or if the loss scale collapses.
    Spikes are those of :class:`fastclip.policies.SpikeSkip`. A step that is skipped only because the latch is
    closed does not enter their windows: it starts from the same parameters as the step that closed it.

    Args:
        kinds: those of REASONS that close the latch. Gradients that are not finite are left to the loss
            scaler, where there is one.
        overflows: how many in a row are a "loss_scale"; so is any with a scale below 1.

    Attributes:
        decisions: how many were made, which is the number of the last one.
    """

    def __init__(self, kinds: frozenset[str], overflows: int = 8) -> None:
        self.kinds, self._overflows = kinds, overflows
        self.norm_rule = SpikeRule() if "norm_spike" in kinds else None
        self.loss_rule = SpikeRule() if "loss_spike" in kinds else None
        self.decisions = 0
        self._device: torch.device | None = None  # None: the host decides
        # Python numbers where the host decides, else tensors, [], int64.
        self._closed_by: Any = 0  # the decision that closed the latch; 0: it is open
        self._streak: Any = 0  # overflows in a row

    def decide(
        self,
        loss: Tensor | None,
        total_norm: Tensor,
        loss_is_given: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Decide whether this step is skipped, without waiting for a device.

        Args:
            loss: []; None without.
            total_norm: []; -Inf if it is not known. Its device is the one that decides.
            loss_is_given: [], bool: whether `loss` is a loss, where only the device knows.
            scale: the factor of the loss, []; None without a scaler.

        Returns:
            Whether it is skipped, [], bool, and the number of the reason why this step closed the latch, else
            0, [], int64.
        """
        self.decisions += 1
        device = self.device_for(total_norm)
        if device != self._device:
            self.move_to(device)
        decide = self._decide_on_host if device is None else self._decide_on_device
        return decide(loss, total_norm, loss_is_given, scale)

    @staticmethod
    def device_for(total_norm: Tensor) -> torch.device | None:
        """Return the device that decides; None for the host, where calls of torch cost too much."""
        return None if total_norm.device.type == "cpu" else total_norm.device

    def _decide_on_host(
        self, loss: Tensor | None, total_norm: Tensor, loss_is_given: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        norm, is_open, reason = float(total_norm), self._closed_by == 0, 0
        scale_read: float | None = None
        if scale is not None:  # read only after an overflow: it may lie on a GPU
            scale_read = math.inf if math.isfinite(norm) else float(scale)
        for number, found in self._findings(
            None if loss is None else float(loss),
            norm,
            loss_is_given is None or bool(loss_is_given),
            scale_read,
            is_open,
        ):
            if found and is_open:
                reason = number
        if reason:
            self._closed_by = self.decisions
        return torch.tensor(self._closed_by > 0), torch.tensor(reason)

    def _decide_on_device(
        self, loss: Tensor | None, total_norm: Tensor, loss_is_given: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        device, is_open = total_norm.device, self._closed_by == 0
        reason = torch.zeros_like(self._closed_by)
        for number, found in self._findings(
            None if loss is None else loss.detach().to(device, non_blocking=True).reshape(()),
            total_norm,
            True if loss_is_given is None else loss_is_given,
            None if scale is None else scale.to(device, non_blocking=True).reshape(()),
            is_open,
        ):
            reason.masked_fill_(found & is_open, number)
        self._closed_by.masked_fill_(reason > 0, self.decisions)
        return self._closed_by > 0, reason

    def _findings(
        self, loss: Any, norm: Any, loss_is_given: Any, scale: Any, is_open: Any
    ) -> Iterator[tuple[int, Any]]:
        """Yield the numbers of reasons and whether they apply, the most important one last.

        This is the rule for the host and for a device: the arguments are Python numbers, or tensors, [].
        """
        overflow = (norm != norm) | (norm == math.inf)
        if "loss_scale" in self.kinds and scale is not None:
            self._streak = (self._streak + 1) * overflow
            yield 4, overflow & ((self._streak % self._overflows == 0) | (scale < 1))
        if self.norm_rule is not None:
            yield 3, self.norm_rule.is_spike(norm, is_open)
        if loss is not None:
            if self.loss_rule is not None:
                yield 2, self.loss_rule.is_spike(loss, is_open)
            if "nonfinite" in self.kinds:
                yield 1, loss_is_given & ((loss != loss) | (abs(loss) == math.inf))
        if "nonfinite" in self.kinds and scale is None:
            yield 1, overflow

    def release(self, decision: int) -> None:
        """Let the next updates through, unless a decision after this one has closed the latch again."""
        if isinstance(self._closed_by, Tensor):
            self._closed_by.masked_fill_(self._closed_by <= decision, 0)
        elif self._closed_by <= decision:
            self._closed_by = 0

    def move_to(self, device: torch.device | None) -> None:
        """Decide on `device`, or on the host for None, with the same state. Waits for the device before."""
        self._device = device
        for rule in self._rules().values():
            rule.move_to(device)
        closed_by, streak = int(self._closed_by), int(self._streak)
        if device is None:
            self._closed_by, self._streak = closed_by, streak
        else:
            self._closed_by = torch.full((), closed_by, dtype=torch.int64, device=device)
            self._streak = torch.full((), streak, dtype=torch.int64, device=device)

    def _rules(self) -> dict[str, SpikeRule]:
        rules = {"norm": self.norm_rule, "loss": self.loss_rule}
        return {name: rule for name, rule in rules.items() if rule is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return Python numbers alone, the same whichever device decided. Waits for that device."""
        states = {name: rule.state_dict() for name, rule in self._rules().items()}
        return states | {"overflow_streak": int(self._streak)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another latch was, which may have decided on another device.

        Raises:
            ValueError: it had other rules.
        """
        mine, given = self._rules(), set(state) - {"overflow_streak"}
        if given != set(mine):
            raise ValueError(
                f"expected the state of a skip latch with rules for {sorted(mine)}, but got {sorted(given)}"
            )
        self.move_to(None)
        for name, rule in mine.items():
            rule.load_state_dict(state[name])
        self._streak = state.get("overflow_streak", 0)
