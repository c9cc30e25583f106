# SPDX-License-Identifier: BSD-3-Clause
"""The main comparison held against its bars, and that of two embeddings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import fastclip
from fastclip.bench import parity, rows
from fastclip.bench.rows import limit_of, no_memory
from fastclip.bench.timing import Bandwidth, alternate
from fastclip.bench.workloads import SMOKE, WORKLOADS, Gradients, Workload

from . import bars
from .bars import Verdict


@dataclass
class Row(rows.Row):
    """One line of a table, with its bars."""

    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def case(self) -> tuple[str, str, bool]:
        return self.workload, self.dtype, self.clipped

    def summary(self) -> dict[str, object]:
        """For the JSON file."""
        return {**super().summary(), "bars": {verdict.text: verdict.reached for verdict in self.verdicts}}


def measure(workload: Workload, dtype: str, bandwidth: Bandwidth) -> list[Row]:
    """The unclipped and the clipped row of one workload and dtype."""
    made = [Row(workload.name, dtype, clipped) for clipped in (False, True)]
    if note := no_memory(workload.nbytes(dtype)):
        for row in made:
            row.note = note
        return made
    rows.measure(made, Gradients.of(workload, dtype), bandwidth)
    for row in made:
        if not SMOKE and row.ratio is not None:
            row.verdicts = bars.judge_ratio(row.case, row.ratio, row.share_of_limit)
    return made


def compare_embeddings(dtype: str) -> list[Row]:
    """fastclip on a dense embedding gradient (first) and on one with 99 % zero rows (second)."""
    dense, sparse = WORKLOADS["dense_embedding"], WORKLOADS["mostly_zero_embedding"]
    made = [Row(sparse.name, dtype, clipped) for clipped in (False, True)]
    if note := no_memory(2 * dense.nbytes(dtype)):
        for row in made:
            row.note = note
        return made
    pair = [Gradients.of(workload, dtype) for workload in (dense, sparse)]
    norms = [parity.exact_norm(gradients.saved) for gradients in pair]
    for row in made:
        limits = [limit_of(norm, row.clipped) for norm in norms]
        try:
            for gradients, max_norm, norm in zip(pair, limits, norms, strict=True):
                parity.check(gradients, fastclip.clip_grad_norm_, max_norm, norm)
        except parity.ParityError as error:
            row.note, row.failed = f"PARITY FAILED: {error}", True
            continue
        dense_call, sparse_call = (
            functools.partial(fastclip.clip_grad_norm_, gradients.parameters, max_norm)
            for gradients, max_norm in zip(pair, limits, strict=True)
        )
        restore = functools.partial(_restore_all, pair if row.clipped else [])
        row.times = alternate(dense_call, sparse_call, restore)
        if not SMOKE:
            row.verdicts = [bars.judge_zero_rows(row.times[1].median_ms / row.times[0].median_ms)]
    return made


def _restore_all(pair: list[Gradients]) -> None:
    for gradients in pair:
        gradients.restore()
