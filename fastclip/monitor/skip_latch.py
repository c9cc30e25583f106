# SPDX-License-Identifier: BSD-3-Clause
"""Steps that are to be left out, decided where the numbers are."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from ..policies import SpikeSkip

# The host learns of these one step late, when the update has long been made.
DECIDED_ON_THE_DEVICE = ("nonfinite", "norm_spike", "loss_spike")
# Why the gate may close, in the order of their numbers.
REASONS = ("nonfinite", "loss_spike", "norm_spike", "loss_scale")


class Spikes:
    """The rule of SpikeSkip for one number a step; on the CPU, where each call of torch counts, in Python."""

    def __init__(self, rule: SpikeSkip | None = None) -> None:
        self.rule = rule if rule is not None else SpikeSkip()
        self.window: deque[float] = deque(maxlen=self.rule.window)

    def is_spike(self, value: Tensor, closed: Tensor) -> Tensor:
        """[], bool. What comes while the gate is closed, or is not finite, is not remembered."""
        number = torch.where(closed, math.nan, value.double()).reshape(1)  # the rule passes NaN over
        return self.rule.limit(number, number).isnan().any()

    def is_spike_on_host(self, number: float, is_open: bool) -> bool:
        """As is_spike()."""
        if not is_open or not math.isfinite(number):
            return False
        before, count = self.window, len(self.window)
        bound = math.inf
        if count + 1 >= self.rule.minimum and count > 1:
            mean = math.fsum(before) / count
            variance = math.fsum((x - mean) ** 2 for x in before) / (count - 1)
            bound = mean + self.rule.sigma * math.sqrt(variance)
        self.window.append(number)
        return number > bound

    def state_dict(self) -> dict:
        return {"window": list(self.window), "rule": self.rule.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.rule.load_state_dict(state["rule"])
        self.window = deque(state["window"], maxlen=self.rule.window)


class Gate:
    """Holds the update back when loss or gradients are not finite, when one of them spikes, or when the loss
    scale collapses, and from then on, until the host has seen the record of that step and opens it again.

    Spikes are those of :class:`fastclip.policies.SpikeSkip`. Of a step that is held only because the gate is
    closed nothing enters their windows: it starts from the same parameters as the one that closed the gate.

    Args:
        kinds: of REASONS. Gradients that are not finite are left to the loss scaler, where there is one.
        overflows: how many in a row are a "loss_scale"; so is any with a scale below 1.

    Attributes:
        decisions: how many there were; the number of the last one.
    """

    def __init__(self, kinds: frozenset[str], overflows: int = 8) -> None:
        self.kinds, self._overflows = kinds, overflows
        self.norm_rule = Spikes() if "norm_spike" in kinds else None
        self.loss_rule = Spikes() if "loss_spike" in kinds else None
        self.decisions = 0
        # [], int64: the number of the decision that closed the gate; 0: it is open.
        self._closed_by: Tensor | None = None
        self._streak: Tensor | None = None  # [], int64: overflows in a row
        self._closed_on_host = self._streak_on_host = 0  # the same where nothing is on a device

    def decide(
        self,
        loss: Tensor | None,
        total_norm: Tensor,
        told: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Whether this step is to be left out, [], bool, and which of REASONS has closed the gate in this
        step, counted from 1, else 0, [], int64; on the device of `total_norm`. Nothing waits.

        Args:
            loss: []; None without.
            total_norm: []; -Inf if it is not known.
            told: [], bool: whether `loss` is a loss, where only the device knows.
            scale: of the loss, []; None without a scaler.
        """
        self.decisions += 1
        decide = self._decide_on_host if total_norm.device.type == "cpu" else self._decide_on_device
        return decide(loss, total_norm, told, scale)

    def _decide_on_device(
        self, loss: Tensor | None, total_norm: Tensor, told: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        device = total_norm.device
        if self._closed_by is None or self._closed_by.device != device:
            self._closed_by = torch.zeros((), dtype=torch.int64, device=device)
        closed = self._closed_by > 0
        reason = torch.zeros_like(self._closed_by)
        # From the last reason to the first, which is what is told of several.
        for number, found in self._findings(loss, total_norm, told, scale, closed):
            reason.masked_fill_(found & ~closed, number)
        self._closed_by.masked_fill_(reason > 0, self.decisions)
        return self._closed_by > 0, reason

    def _decide_on_host(
        self, loss: Tensor | None, total_norm: Tensor, told: Tensor | None, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same in Python: on the CPU each small call of torch costs more than the arithmetic."""
        norm, reason = float(total_norm), 0
        open_now = self._closed_on_host == 0
        overflow = not math.isfinite(norm) and norm != -math.inf
        if "loss_scale" in self.kinds and scale is not None:
            self._streak_on_host = self._streak_on_host + 1 if overflow else 0
            if overflow and (self._streak_on_host % self._overflows == 0 or float(scale) < 1):
                reason = 4
        if self.norm_rule is not None and self.norm_rule.is_spike_on_host(norm, open_now):
            reason = 3
        if loss is not None:
            number = float(loss)
            if self.loss_rule is not None and self.loss_rule.is_spike_on_host(number, open_now):
                reason = 2
            is_told = told is None or bool(told)
            if "nonfinite" in self.kinds and is_told and not math.isfinite(number):
                reason = 1
        if "nonfinite" in self.kinds and scale is None and overflow:
            reason = 1
        if open_now and reason:
            self._closed_on_host = self.decisions
        return torch.tensor(self._closed_on_host > 0), torch.tensor(reason if open_now else 0)

    def _findings(
        self,
        loss: Tensor | None,
        total_norm: Tensor,
        told: Tensor | None,
        scale: Tensor | None,
        closed: Tensor,
    ) -> Iterator[tuple[int, Tensor]]:
        device = total_norm.device
        overflow = ~total_norm.isfinite() & (total_norm != -math.inf)
        if "loss_scale" in self.kinds and scale is not None:
            yield 4, self._collapses(overflow, scale.to(device, non_blocking=True).reshape(()))
        if self.norm_rule is not None:
            yield 3, self.norm_rule.is_spike(total_norm, closed)
        if loss is not None:
            loss = loss.detach().to(device, non_blocking=True).reshape(())
            if self.loss_rule is not None:
                yield 2, self.loss_rule.is_spike(loss, closed)
            if "nonfinite" in self.kinds:
                yield 1, ~loss.isfinite() if told is None else told & ~loss.isfinite()
        if "nonfinite" in self.kinds and scale is None:
            yield 1, overflow

    def _collapses(self, overflow: Tensor, scale: Tensor) -> Tensor:
        if self._streak is None or self._streak.device != overflow.device:
            self._streak = torch.zeros((), dtype=torch.int64, device=overflow.device)
        self._streak.add_(1).mul_(overflow)
        return overflow & ((self._streak % self._overflows == 0) | (scale < 1))

    def open(self, decision: int) -> None:
        """Let the next updates through, unless a decision after this one has closed the gate again."""
        if self._closed_on_host <= decision:
            self._closed_on_host = 0
        if self._closed_by is not None:
            self._closed_by.masked_fill_(self._closed_by <= decision, 0)

    def state_dict(self) -> dict:
        rules = {"norm": self.norm_rule, "loss": self.loss_rule}
        return {name: rule.state_dict() for name, rule in rules.items() if rule is not None}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError if it is of a gate with other rules."""
        rules = {"norm": self.norm_rule, "loss": self.loss_rule}
        mine = {name: rule for name, rule in rules.items() if rule is not None}
        if set(state) != set(mine):
            raise ValueError(f"expected the state of a gate with {sorted(mine)}, but got {sorted(state)}")
        for name, rule in mine.items():
            rule.load_state_dict(state[name])
