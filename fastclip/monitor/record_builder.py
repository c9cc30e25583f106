# SPDX-License-Identifier: BSD-3-Clause
"""Building the record of a step from its numbers on the host."""

from __future__ import annotations

from typing import Any

from .measure.activations import activations_of, token_ids_of
from .measure.batches import batch_of
from .measure.gradients import fields_of
from .parameter_names import ParameterNames
from .rank_sync import ranks_of
from .record import Record
from .step_in_progress import StepInProgress


class RecordBuilder:
    """Builds one record after the other, and counts skipped steps and overflows.

    Args:
        rank: the number of this process.
        sizes: how many rows each embedding has, by name.
        names: the names of the parameters.
    """

    def __init__(self, rank: int, sizes: dict[str, int], names: ParameterNames) -> None:
        self.rank, self._sizes, self._names = rank, sizes, names
        self.skipped_steps = 0
        self.overflows = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped_steps, self.overflows = state["skipped_steps"], state["overflows"]

    def build(self, step: StepInProgress, values: dict[str, Any]) -> Record:
        """Return the record of a step; `values` are its numbers by name, as Python numbers and lists."""
        record = Record(
            step=step.number,
            time=step.time,
            rank=self.rank,
            step_time=step.step_time,
            losses=_below(values, "losses/"),
            loss=values.get("loss"),
            micro_batches=max(1, step.loss_count, step.batches.count),
            lr=step.lr or list(_below(values, "lr/").values()),
            max_norm=values.get("max_norm"),
            loss_scale=values.get("loss_scale"),
            param_norm=values.get("param_norm"),
            held=bool(values.get("skipped_by_latch", False)),
            memory=step.memory,
            error=step.error,
        )
        if step.gradients is not None:
            for name, value in fields_of(values, step.gradients, self._names).items():
                setattr(record, name, value)
        skipped = values.get("skipped")
        record.applied = None if skipped is None else not skipped
        self._count(record)
        self._add_samples(record, step, values)
        record.update_ratio = _below(values, "update_ratio/")
        record.activations = activations_of(values)
        record.token_ids = token_ids_of(values, self._sizes)
        if "ranks" in values:
            record.ranks = ranks_of(values["ranks"])
        return record

    def _count(self, record: Record) -> None:
        skipped = record.applied is False
        self.skipped_steps += skipped
        found = record.nan_count + record.inf_count > 0 or (
            record.total_norm is not None and not record.has_finite_norm
        )
        self.overflows += skipped and found and record.loss_scale is not None
        record.skipped_steps, record.overflows = self.skipped_steps, self.overflows

    @staticmethod
    def _add_samples(record: Record, step: StepInProgress, values: dict[str, Any]) -> None:
        batches = step.batches
        record.batch = batch_of(values, batches.shapes)
        record.sample_ids = batches.sample_ids + [
            int(number) for ids in _below(values, "sample_ids/").values() for number in ids
        ]
        if step.step_time:
            if batches.samples:
                record.samples_per_second = batches.samples / step.step_time
            if batches.tokens:
                record.tokens_per_second = batches.tokens / step.step_time


def _below(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values whose names begin with the prefix, by the rest of their names."""
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
