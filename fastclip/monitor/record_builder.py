# SPDX-License-Identifier: BSD-3-Clause
"""From the numbers of a step that have arrived on the host to its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .measure.activations import activations_of, token_ids_of
from .measure.batches import batch_of
from .measure.gradients import fields_of
from .open_step import OpenStep
from .rank_sync import ranks_of
from .record import Record


class RecordMaker:
    """Makes records one after the other, and counts what only their order tells.

    Args:
        rank: of this process.
        sizes: of the embeddings.
        name_of: the name of a parameter.
    """

    def __init__(self, rank: int, sizes: dict[str, int], name_of: Callable[[Tensor], str]) -> None:
        self.rank, self._sizes, self._name_of = rank, sizes, name_of
        self.skipped_steps = 0
        self.overflows = 0

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "overflows": self.overflows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skipped_steps, self.overflows = state["skipped_steps"], state["overflows"]

    def make(self, step: OpenStep, values: dict[str, Any]) -> Record:
        record = Record(
            step=step.number,
            time=step.time,
            rank=self.rank,
            step_time=step.step_time,
            losses={k.removeprefix("losses/"): v for k, v in values.items() if k.startswith("losses/")},
            loss=values.get("loss"),
            micro_batches=max(1, step.loss_count, step.batches.count),
            lr=step.lr or [v for k, v in values.items() if k.startswith("lr/")],
            max_norm=values.get("max_norm"),
            loss_scale=values.get("loss_scale"),
            param_norm=values.get("param_norm"),
            held=bool(values.get("held", False)),
            memory=step.memory,
            error=step.error,
        )
        if step.gradients is not None:
            for name, value in fields_of(values, step.gradients, self._name_of).items():
                setattr(record, name, value)
        left_out = values.get("left_out")
        record.applied = None if left_out is None else not left_out
        self._count(record)
        self._add_samples(record, step, values)
        record.update_ratio = _below(values, "update_ratio/")
        record.activations = activations_of(values)
        record.token_ids = token_ids_of(values, self._sizes)
        if "ranks" in values:
            record.ranks = ranks_of(values["ranks"])
        return record

    def _count(self, record: Record) -> None:
        left_out = record.applied is False
        self.skipped_steps += left_out
        found = record.nan_count + record.inf_count > 0 or (
            record.total_norm is not None and not record.has_finite_norm
        )
        self.overflows += left_out and found and record.loss_scale is not None
        record.skipped_steps, record.overflows = self.skipped_steps, self.overflows

    @staticmethod
    def _add_samples(record: Record, step: OpenStep, values: dict[str, Any]) -> None:
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
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
