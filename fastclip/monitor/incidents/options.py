# SPDX-License-Identifier: BSD-3-Clause
"""The options of incidents: which steps are saved, where, and how many are retained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..skip_latch import REASONS
from .store import IncidentStore


@dataclass(frozen=True)
class Incidents:
    """Where and when a step that goes wrong is saved, with the state from before it.

    Such a step is skipped on all ranks, so that the state can be saved before any update. Buffers that its
    forward changed, such as running means, are restored if the loss or a gradient was not finite.

    Args:
        directory: where incidents go, each in a directory of its own.
        kinds: which events are incidents. "nonfinite": NaN or Inf in the loss, or in a gradient without a
            loss scaler; "norm_spike" and "loss_spike": above mean + 6 std of the last 128 steps;
            "loss_scale": `overflows` in a row, or a scale below 1.
        overflows: how many overflows in a row are an incident. The scaler handles a single one, which is only
            recorded.
        batches: for how many steps the batches are retained, by reference.
        max_incidents, max_bytes: see :class:`fastclip.monitor.incidents.store.IncidentStore`.
        snapshot_every: steps between copies of the whole state in host memory, so that the steps which led to
            an incident can be replayed; the batches since the copy are retained too. 0: no copies.
    """

    directory: str
    kinds: Sequence[str] = REASONS
    overflows: int = 8
    batches: int = 4
    max_incidents: int = 10
    max_bytes: int = 20 * 2**30
    snapshot_every: int = 0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in REASONS]:
            raise ValueError(f"expected kinds of incidents among {REASONS}, but got {unknown}")
        for name in ("overflows", "batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} to be at least 1, but got {getattr(self, name)}")
        if self.snapshot_every < 0:
            raise ValueError(f"expected snapshot_every to be at least 0, but got {self.snapshot_every}")

    def store(self) -> IncidentStore:
        """Open the store of these options.

        Raises:
            OSError: the directory cannot be made or written.
            ValueError: max_incidents or max_bytes is too small.
        """
        return IncidentStore(self.directory, self.max_incidents, self.max_bytes)
