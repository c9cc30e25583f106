# SPDX-License-Identifier: BSD-3-Clause
"""A possible cause of an event, and the context in which causes are looked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..record import Event, Record

# What too high a learning rate leads to, before anything is infinite ...
GROWING = ("norm_growth", "norm_spike", "norm_drift", "loss_spike", "update_ratio")
# ... and afterwards.
_UNSTABLE = (*GROWING, "nonfinite", "loss_scale", "activations")


@dataclass
class Finding:
    """A possible cause of an event, with its evidence.

    Attributes:
        area: "data", "rate" (learning rate, warm-up, clipping), "amp", "model" or "system".
        cause: a word for it, such as "nonfinite_batch".
        text: a sentence with the numbers.
        step, rank: where it was seen.
        sample_ids: the samples of the batch, as given to the monitor.
        parameters: the names of the parameters concerned.
    """

    area: str
    cause: str
    text: str
    step: int
    rank: int = 0
    sample_ids: list[Any] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        parts = [f"step {self.step}, rank {self.rank}: {self.text}"]
        if self.sample_ids:
            more = ", ..." if len(self.sample_ids) > 16 else ""
            parts.append(f"samples {', '.join(map(str, self.sample_ids[:16]))}{more}")
        if self.parameters:
            parts.append(f"parameters {', '.join(self.parameters[:5])}")
        return "; ".join(parts)


@dataclass
class EventContext:
    """An event and what was recorded before it.

    Attributes:
        event: the event to explain.
        records: by rank, the records of the steps up to the event.
        starts: by rank, the first record of the run.
        events: the events up to this one, in the order of the steps.
    """

    event: Event
    records: dict[int, list[Record]]
    starts: dict[int, Record]
    events: list[Event]

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, in the order of the steps."""
        return [e for e in self.events if e.kind in kinds]

    @property
    def own(self) -> list[Record]:
        """The records of the event's rank, or of the first rank if that one has none."""
        known = self.records
        return known.get(self.event.rank) or (next(iter(known.values())) if known else [])

    def is_unstable(self) -> bool:
        """Return whether the event shows a diverging training, not a full memory or a slow process."""
        return self.event.kind in (*_UNSTABLE, "clip_share")

    def sample_ids(self, step: int, rank: int) -> list[Any]:
        """Return the samples of a step's batch on a rank, empty if they were not recorded."""
        return next((r.sample_ids for r in self.records.get(rank, []) if r.step == step), [])
