# SPDX-License-Identifier: BSD-3-Clause
"""The bars: what the figures must reach on 2 cores with AVX-512. Each is printed beside its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastclip.bench.clip_rows import ClipRow
from fastclip.bench.workloads import SMOKE

from .phases import PhaseRow

# (workload, dtype, clipped) -> torch's time over fastclip's.
RATIO: dict[tuple[str, str, bool], float] = {
    ("gpt2_124m", "float32", False): 2.8,
    ("gpt2_124m", "float32", True): 1.5,
    ("gpt2_124m", "bfloat16", False): 4.3,
    ("gpt2_124m", "bfloat16", True): 2.4,
    ("gpt2_124m", "float16", False): 8.0,
    ("gpt2_124m", "float16", True): 3.0,
    **{("many_tiny", dtype, False): 7.5 for dtype in ("float32", "bfloat16", "float16")},
    **{("many_tiny", dtype, True): 6.5 for dtype in ("float32", "bfloat16", "float16")},
    ("mid_150", "float32", False): 8.0,
    ("mid_150", "float32", True): 6.0,
    ("one_1m", "float32", False): 4.0,
    ("one_1m", "float32", True): 2.0,
}

# (workload, dtype, clipped) -> share of the read bandwidth measured beside it.
READ_SHARE: dict[tuple[str, str, bool], float] = {("gpt2_124m", "float32", False): 0.80}

# The time for an embedding's gradient with 99 % zero rows over the time for a dense one: no slower. Two
# measurements of the very same thing differ by a few percent, hence the allowance.
ZERO_OVER_DENSE = 1.0
ZERO_OVER_DENSE_ALLOWANCE = 0.05

# (workload, dtype, fused, scaled, clipped) -> the ratio of the times of the whole optimizer phase.
PHASE: dict[tuple[str, str, bool, bool, bool], float] = {
    ("gpt2_124m", "float32", True, False, False): 1.25,
    ("gpt2_124m", "float32", True, True, False): 1.5,
}

# Peak memory added by a call, as a share of the gradients' bytes. The table of chunks takes 0.02 %.
PEAK_MEMORY_SHARE = 0.01

# `import fastclip` after `import torch`.
IMPORT_MS = 50.0


@dataclass(frozen=True)
class BarCheck:
    """The comparison of a figure with its bar; the table prints the text."""

    reached: bool
    text: str


def check_clip(row: ClipRow) -> list[BarCheck]:
    """Return the checks of a row of the main table; most rows have no bar."""
    checks: list[BarCheck] = []
    if SMOKE or row.ratio is None:
        return checks
    case = row.workload, row.dtype, row.clipped
    if (bar := RATIO.get(case)) is not None:
        checks.append(_check(row.ratio >= bar, f"{bar:.1f}x"))
    if (bar := READ_SHARE.get(case)) is not None and row.share_of_limit is not None:
        checks.append(_check(row.share_of_limit >= bar, f"{bar:.0%}"))
    return checks


def check_embedding(row: ClipRow) -> list[BarCheck]:
    """Return the check of a row of the embedding comparison."""
    if SMOKE or row.ratio is None:
        return []
    limit = ZERO_OVER_DENSE + ZERO_OVER_DENSE_ALLOWANCE
    return [_check(1 / row.ratio <= limit, f"<={ZERO_OVER_DENSE:.2f}")]


def check_phase(row: PhaseRow) -> list[BarCheck]:
    """Return the checks of a row of the optimizer phase; most rows have no bar."""
    bar = PHASE.get(row.setting.case)
    if SMOKE or row.ratio is None or bar is None:
        return []
    return [_check(row.ratio >= bar, f"{bar:.2f}x")]


def check_memory(added: Sequence[int | None], megabytes: Sequence[int]) -> list[BarCheck]:
    """Return the checks of the bytes that a call adds for each size of gradients in MiB.

    Sizes whose memory could not be measured have no check.
    """
    return [
        _check(
            nbytes / (size << 20) <= PEAK_MEMORY_SHARE,
            f"<={PEAK_MEMORY_SHARE:.0%} of {size} MiB",
        )
        for nbytes, size in zip(added, megabytes, strict=True)
        if nbytes is not None
    ]


def check_import(milliseconds: float) -> BarCheck:
    """Return the check of the import's time."""
    return _check(milliseconds <= IMPORT_MS, f"<={IMPORT_MS:.0f} ms")


def _check(reached: bool, bar: str) -> BarCheck:
    return BarCheck(reached, f"{bar} {'yes' if reached else 'NO'}")
