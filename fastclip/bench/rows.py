# SPDX-License-Identifier: BSD-3-Clause
"""The comparison: torch's clip_grad_norm_ against fastclip's on the same gradients, in turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..clip_grad import clip_grad_norm_
from . import parity
from .machine import available_memory
from .timing import CALLS_IN_CACHE, Bandwidth, Times, alternate, last_level_cache, waiting_for
from .workloads import CPU, SMOKE, Gradients

# Gradients, their copy, and what a comparison in float64 needs for a moment.
_MEMORY_BESIDE_GRADIENTS = 1 << 30


@dataclass
class Row:
    """One line of a table. Without `ratio` nothing was measured and `note` says why.

    The first time is torch's, the second fastclip's.

    Attributes:
        bytes_moved: what has to move at least: N bytes of gradients read; when clipped, read again and
            written too.
        limit_ms: the time of moving them at the bandwidths of this row, for rows that no cache holds.
        times: of the two calls.
    """

    workload: str
    dtype: str
    clipped: bool
    tensors: int = 0
    note: str = ""
    failed: bool = False
    times: tuple[Times, Times] | None = None
    norm_errors: tuple[float, float] | None = None  # torch, fastclip
    bytes_moved: int = 0
    limit_ms: float | None = None
    read_bandwidth: float | None = None
    update_bandwidth: float | None = None

    @property
    def ratio(self) -> float | None:
        """The first time over the second."""
        return self.times[0].median_ms / self.times[1].median_ms if self.times else None

    @property
    def ratio_quartiles(self) -> tuple[float, float] | None:
        """The first time over the second of each pair of turns: between which the middle half lies."""
        if self.times is None:
            return None
        pairs = zip(self.times[0].seconds, self.times[1].seconds, strict=True)
        low, _, high = statistics.quantiles([first / second for first, second in pairs], n=4)
        return low, high

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
            "tensors": self.tensors,
            "note": self.note,
            "first": self.times[0].summary() if self.times else None,
            "second": self.times[1].summary() if self.times else None,
            "ratio": self.ratio,
            "ratio_quartiles": self.ratio_quartiles,
            "norm_errors": self.norm_errors,
            "bytes_moved": self.bytes_moved,
            "bytes_per_second": self.bandwidth,
            "read_bandwidth": self.read_bandwidth,
            "update_bandwidth": self.update_bandwidth,
            "ceiling": self.ceiling,
            "share_of_limit": self.share_of_limit,
        }


def no_memory(nbytes: int, device: torch.device = CPU) -> str:
    """Why gradients of so many bytes are not measured here, or an empty string."""
    needed = 2 * nbytes + _MEMORY_BESIDE_GRADIENTS
    if needed <= (free := available_memory(device)):
        return ""
    return f"skipped: needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"


def limit_of(exact: float, clipped: bool) -> float:
    """The max_norm of a case: half of the norm, or twice."""
    return exact * (0.5 if clipped else 2.0)


def measure(rows: Sequence[Row], gradients: Gradients, bandwidth: Bandwidth) -> None:
    """Hold norms and gradients against float64, then time; a row whose results are wrong gets no time."""
    exact = parity.exact_norm(gradients.saved)
    for row in rows:
        row.tensors = len(gradients.saved)
        max_norm = limit_of(exact, row.clipped)
        try:
            row.norm_errors = (
                parity.check_torch(gradients, torch.nn.utils.clip_grad_norm_, max_norm, exact),
                parity.check(gradients, clip_grad_norm_, max_norm, exact),
            )
        except parity.ParityError as error:
            row.note, row.failed = f"PARITY FAILED: {error}", True
            continue
        _time(row, gradients, max_norm, bandwidth)


def _time(row: Row, gradients: Gradients, max_norm: float, bandwidth: Bandwidth) -> None:
    nbytes = gradients.nbytes
    in_memory = nbytes >= ((500 << 10) if SMOKE else 2 * last_level_cache(bandwidth.device))
    bandwidth.clear()

    def prepare() -> None:
        if row.clipped:
            gradients.restore()
        if in_memory:
            bandwidth.sample(update=row.clipped)

    parameters = gradients.parameters
    row.times = alternate(
        lambda: torch.nn.utils.clip_grad_norm_(parameters, max_norm),
        lambda: clip_grad_norm_(parameters, max_norm),
        prepare,
        turn=1 if in_memory else CALLS_IN_CACHE,
        wait=waiting_for(bandwidth.device),
    )
    row.bytes_moved = nbytes * (3 if row.clipped else 1)
    if in_memory:
        row.read_bandwidth = bandwidth.read
        seconds = nbytes / bandwidth.read
        if row.clipped:
            row.update_bandwidth = bandwidth.update
            seconds += 2 * nbytes / bandwidth.update
        row.limit_ms = seconds * 1e3
