# SPDX-License-Identifier: BSD-3-Clause
"""Steps that are to be left out, decided where the numbers are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..policies import SpikeSkip

# The host learns of these one step late, when the update has long been made.
DECIDED_ON_THE_DEVICE = ("nonfinite", "norm_spike", "loss_spike")


class Gate:
    """Holds the update back when the loss is not finite or the loss or the norm spikes, and from then on,
    until the host has seen the record of that step and opens it again.

    Spikes are those of :class:`fastclip.policies.SpikeSkip`. Of a step that is held only because the gate is
    closed nothing enters their windows: it starts from the same parameters as the one that closed the gate.

    Args:
        kinds: of DECIDED_ON_THE_DEVICE.

    Attributes:
        decisions: how many there were; the number of the last one.
    """

    def __init__(self, kinds: frozenset[str]) -> None:
        self.kinds = kinds
        self.norm_rule = SpikeSkip() if "norm_spike" in kinds else None
        self.loss_rule = SpikeSkip() if "loss_spike" in kinds else None
        self.decisions = 0
        # [], int64: the number of the decision that closed the gate; 0: it is open.
        self._closed_by: Tensor | None = None

    def decide(self, loss: Tensor | None, total_norm: Tensor, told: Tensor | None = None) -> Tensor:
        """[], bool on the device of `total_norm` []: whether this step is to be left out. Nothing waits.

        Args:
            loss: []; None without.
            total_norm: []; one that is not finite is not known, or left to who looks for NaN and Inf.
            told: [], bool: whether `loss` is a loss, where only the device knows.
        """
        device = total_norm.device
        if self._closed_by is None or self._closed_by.device != device:
            self._closed_by = torch.zeros((), dtype=torch.int64, device=device)
        self.decisions += 1
        closed = self._closed_by > 0
        found = torch.zeros_like(closed)
        if loss is not None:
            loss = loss.detach().to(device, non_blocking=True).reshape(())
            if "nonfinite" in self.kinds:
                found |= ~loss.isfinite() if told is None else told & ~loss.isfinite()
            if self.loss_rule is not None:
                found |= self._spikes(self.loss_rule, loss, closed)
        if self.norm_rule is not None:
            found |= self._spikes(self.norm_rule, total_norm, closed)
        self._closed_by.masked_fill_(found & ~closed, self.decisions)
        return self._closed_by > 0

    @staticmethod
    def _spikes(rule: SpikeSkip, value: Tensor, closed: Tensor) -> Tensor:
        number = torch.where(closed, math.nan, value.double()).reshape(1)  # the rule passes NaN over
        return rule.limit(number, number).isnan().any()

    def open(self, decision: int) -> None:
        """Let the next updates through, unless a decision after this one has closed the gate again."""
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
