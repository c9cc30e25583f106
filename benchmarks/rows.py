# SPDX-License-Identifier: BSD-3-Clause
"""The main comparison, torch's clip_grad_norm_ against fastclip's, and that of two embeddings."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

import fastclip

from . import bars, parity
from .bars import Verdict
from .machine import available_memory
from .timing import CALLS_IN_CACHE, Bandwidth, Times, alternate, last_level_cache
from .workloads import SMOKE, WORKLOADS, Gradients, Workload

# Gradients, their copy, and what a comparison in float64 needs for a moment.
_MEMORY_BESIDE_GRADIENTS = 1 << 30


@dataclass
class Row:
    """One line of a table. Without `ratio` nothing was measured and `note` says why.

    Attributes:
        bytes_moved: what has to move at least: N bytes of gradients read; when clipped, read again and
            written too.
        limit_ms: the time of moving them at the bandwidths of this row, for rows that no cache holds.
        times: of the two calls.
    """

    workload: str
    dtype: str
    clipped: bool
    note: str = ""
    failed: bool = False
    times: tuple[Times, Times] | None = None
    norm_errors: tuple[float, float] | None = None  # torch, fastclip
    bytes_moved: int = 0
    limit_ms: float | None = None
    read_bandwidth: float | None = None
    update_bandwidth: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def case(self) -> tuple[str, str, bool]:
        return self.workload, self.dtype, self.clipped

    @property
    def ratio(self) -> float | None:
        """The first time over the second."""
        return self.times[0].median_ms / self.times[1].median_ms if self.times else None

    @property
    def bandwidth(self) -> float | None:
        return self.bytes_moved / (self.times[1].median_ms * 1e-3) if self.times else None

    @property
    def ceiling(self) -> float | None:
        """The largest ratio that moving each byte only once (clipped: as counted) can reach in this run."""
        return self.times[0].median_ms / self.limit_ms if self.times and self.limit_ms else None

    @property
    def share_of_limit(self) -> float | None:
        """limit_ms over fastclip's time; the share of the read bandwidth where nothing is clipped."""
        return self.limit_ms / self.times[1].median_ms if self.times and self.limit_ms else None

    def summary(self) -> dict[str, object]:
        """For the JSON file."""
        return {
            "workload": self.workload,
            "dtype": self.dtype,
            "clipped": self.clipped,
            "note": self.note,
            "first": self.times[0].summary() if self.times else None,
            "second": self.times[1].summary() if self.times else None,
            "ratio": self.ratio,
            "norm_errors": self.norm_errors,
            "bytes_moved": self.bytes_moved,
            "bytes_per_second": self.bandwidth,
            "read_bandwidth": self.read_bandwidth,
            "update_bandwidth": self.update_bandwidth,
            "ceiling": self.ceiling,
            "share_of_limit": self.share_of_limit,
            "bars": {verdict.text: verdict.reached for verdict in self.verdicts},
        }


def _no_memory(nbytes: int) -> str:
    """Why gradients of so many bytes are not measured here, or an empty string."""
    needed = 2 * nbytes + _MEMORY_BESIDE_GRADIENTS
    if needed <= (free := available_memory()):
        return ""
    return f"skipped: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def limit_of(exact: float, clipped: bool) -> float:
    """The max_norm of a case: half of the norm, or twice."""
    return exact * (0.5 if clipped else 2.0)


def _time_row(row: Row, gradients: Gradients, max_norm: float, bandwidth: Bandwidth) -> None:
    nbytes = sum(grad.nbytes for grad in gradients.grads)
    in_memory = nbytes >= ((500 << 10) if SMOKE else 2 * last_level_cache())
    bandwidth.clear()

    def prepare() -> None:
        if row.clipped:
            gradients.restore()
        if in_memory:
            bandwidth.sample(update=row.clipped)

    parameters = gradients.parameters
    row.times = alternate(
        lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm),
        lambda: fastclip.clip_grad_norm_(parameters, max_norm),
        prepare,
        turn=1 if in_memory else CALLS_IN_CACHE,
    )
    row.bytes_moved = nbytes * (3 if row.clipped else 1)
    if in_memory:
        row.read_bandwidth = bandwidth.read
        seconds = nbytes / bandwidth.read
        if row.clipped:
            row.update_bandwidth = bandwidth.update
            seconds += 2 * nbytes / bandwidth.update
        row.limit_ms = seconds * 1e3


def measure(workload: Workload, dtype: str, bandwidth: Bandwidth) -> list[Row]:
    """The unclipped and the clipped row of one workload and dtype."""
    rows = [Row(workload.name, dtype, clipped) for clipped in (False, True)]
    if note := _no_memory(workload.nbytes(dtype)):
        for row in rows:
            row.note = note
        return rows
    gradients = Gradients(workload, dtype)
    exact = parity.exact_norm(gradients.saved)
    for row in rows:
        max_norm = limit_of(exact, row.clipped)
        try:
            row.norm_errors = (
                parity.check_torch(gradients, torch.nn.utils.clip_grad_norm_, max_norm, exact),
                parity.check(gradients, fastclip.clip_grad_norm_, max_norm, exact),
            )
        except parity.ParityError as error:
            row.note, row.failed = f"PARITY FAILED: {error}", True
            continue
        _time_row(row, gradients, max_norm, bandwidth)
        if not SMOKE and row.ratio is not None:
            row.verdicts = bars.judge_ratio(row.case, row.ratio, row.share_of_limit)
    return rows


def compare_embeddings(dtype: str) -> list[Row]:
    """fastclip on a dense embedding gradient (first) and on one with 99 % zero rows (second)."""
    dense, sparse = WORKLOADS["dense_embedding"], WORKLOADS["mostly_zero_embedding"]
    rows = [Row(sparse.name, dtype, clipped) for clipped in (False, True)]
    if note := _no_memory(2 * dense.nbytes(dtype)):
        for row in rows:
            row.note = note
        return rows
    pair = [Gradients(workload, dtype) for workload in (dense, sparse)]
    norms = [parity.exact_norm(gradients.saved) for gradients in pair]
    for row in rows:
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
    return rows


def _restore_all(pair: list[Gradients]) -> None:
    for gradients in pair:
        gradients.restore()
