# SPDX-License-Identifier: BSD-3-Clause
"""The comparison: torch's clip_grad_norm_ and fastclip's take turns on the same gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..clip_grad import clip_grad_norm_
from . import parity
from .machine import available_memory
from .timing import CALLS_IN_CACHE, Bandwidth, PairedTimes, clock_of, last_level_cache, take_turns
from .workloads import CPU, SMOKE, RestorableGradients, Workload

# Temporary memory of the comparison with float64, beside the gradients and their copy.
_EXTRA_MEMORY = 1 << 30


@dataclass(kw_only=True)
class TimedRow:
    """A row of a table of two calls that took turns. Without times the note says why."""

    times: PairedTimes | None = None
    note: str = ""
    failed: bool = False

    @property
    def ratio(self) -> float | None:
        """The median of the first call over the median of the second."""
        return self.times.ratio if self.times else None

    def fail(self, error: parity.ParityError) -> None:
        """Record that a result was wrong, so that the row gets no times."""
        self.note, self.failed = f"PARITY FAILED: {error}", True


@dataclass
class ClipRow(TimedRow):
    """The times of one list of gradients: torch's first, fastclip's second.

    Attributes:
        norm_errors: relative errors of the norms of torch and of fastclip.
        bytes_moved: the least bytes that have to move: N bytes of gradients are read; when clipped, they are
            also read again and written.
        limit_ms: the time of moving them at the bandwidths of this row; None if the gradients fit a cache.
    """

    workload: str
    dtype: str
    clipped: bool
    tensors: int = 0
    norm_errors: tuple[float, float] | None = None
    bytes_moved: int = 0
    limit_ms: float | None = None
    read_bandwidth: float | None = None
    update_bandwidth: float | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of fastclip."""
        return self.bytes_moved / (self.times.second.median_ms * 1e-3) if self.times else None

    @property
    def ceiling(self) -> float | None:
        """The largest ratio that moving only the counted bytes could reach in this run."""
        return self.times.first.median_ms / self.limit_ms if self.times and self.limit_ms else None

    @property
    def share_of_limit(self) -> float | None:
        """limit_ms over fastclip's time; for unclipped gradients the share of the read bandwidth."""
        return self.limit_ms / self.times.second.median_ms if self.times and self.limit_ms else None

    def summary(self) -> dict[str, object]:
        """Return what the JSON file has of this row."""
        return {
            "workload": self.workload,
            "dtype": self.dtype,
            "clipped": self.clipped,
            "tensors": self.tensors,
            "note": self.note,
            "first": self.times.first.summary() if self.times else None,
            "second": self.times.second.summary() if self.times else None,
            "ratio": self.ratio,
            "ratio_quartiles": self.times.ratio_quartiles if self.times else None,
            "norm_errors": self.norm_errors,
            "bytes_moved": self.bytes_moved,
            "bytes_per_second": self.bandwidth,
            "read_bandwidth": self.read_bandwidth,
            "update_bandwidth": self.update_bandwidth,
            "ceiling": self.ceiling,
            "share_of_limit": self.share_of_limit,
        }


def untimed_rows(name: str, dtype: str, nbytes: int, device: torch.device = CPU) -> list[ClipRow]:
    """Return the unclipped and the clipped row of gradients of this size, without times.

    Their notes are empty if the memory suffices, and otherwise say that the rows are skipped.
    """
    needed, free = 2 * nbytes + _EXTRA_MEMORY, available_memory(device)
    note = ""
    if needed > free:
        note = f"skipped: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return [ClipRow(name, dtype, clipped, note=note) for clipped in (False, True)]


def max_norm_of(exact_norm: float, clipped: bool) -> float:
    """Return the max_norm of a row: half of the norm if it is clipped, otherwise twice the norm."""
    return exact_norm * (0.5 if clipped else 2.0)


def compare_workload(workload: Workload, dtype: str, bandwidth: Bandwidth) -> list[ClipRow]:
    """Return the unclipped and the clipped row of one workload."""
    rows = untimed_rows(workload.name, dtype, workload.nbytes(dtype), bandwidth.device)
    if not rows[0].note:
        measure(rows, RestorableGradients.of(workload, dtype, bandwidth.device), bandwidth)
    return rows


def compare_parameters(
    name: str, dtype: str, parameters: Sequence[nn.Parameter], bandwidth: Bandwidth
) -> list[ClipRow]:
    """Return the unclipped and the clipped row of random gradients of these parameters."""
    rows = untimed_rows(name, dtype, sum(p.nbytes for p in parameters), bandwidth.device)
    if not rows[0].note:
        measure(rows, RestorableGradients(parameters), bandwidth)
    return rows


def measure(rows: Sequence[ClipRow], gradients: RestorableGradients, bandwidth: Bandwidth) -> None:
    """Check norms and gradients against float64, then time; a row with a wrong result gets no times."""
    exact = parity.exact_norm(gradients.saved)
    for row in rows:
        row.tensors = len(gradients.saved)
        max_norm = max_norm_of(exact, row.clipped)
        try:
            row.norm_errors = (
                parity.check_torch(gradients, torch.nn.utils.clip_grad_norm_, max_norm, exact),
                parity.check(gradients, clip_grad_norm_, max_norm, exact),
            )
        except parity.ParityError as error:
            row.fail(error)
            continue
        _time(row, gradients, max_norm, bandwidth)


def _time(row: ClipRow, gradients: RestorableGradients, max_norm: float, bandwidth: Bandwidth) -> None:
    nbytes = gradients.nbytes
    in_memory = nbytes >= ((500 << 10) if SMOKE else 2 * last_level_cache(bandwidth.device))
    bandwidth.clear()

    def prepare() -> None:
        if row.clipped:
            gradients.restore()
        if in_memory:
            bandwidth.sample(update=row.clipped)

    parameters = gradients.parameters
    row.times = PairedTimes(
        *take_turns(
            (
                lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm),
                lambda: clip_grad_norm_(parameters, max_norm),
            ),
            prepare,
            turn=1 if in_memory else CALLS_IN_CACHE,
            clock=clock_of(bandwidth.device),
        )
    )
    row.bytes_moved = nbytes * (3 if row.clipped else 1)
    if in_memory:
        row.read_bandwidth = bandwidth.read
        seconds = nbytes / bandwidth.read
        if row.clipped:
            row.update_bandwidth = bandwidth.update
            seconds += 2 * nbytes / bandwidth.update
        row.limit_ms = seconds * 1e3
