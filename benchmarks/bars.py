# SPDX-License-Identifier: BSD-3-Clause
"""What the figures must reach. Set for 2 cores with AVX-512; printed beside every figure they judge."""

from __future__ import annotations

from dataclasses import dataclass

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

# Time for the embedding gradient of which 99 % is zero over the time for a dense one: no slower. Two
# measurements of the very same thing differ by a few percent, hence the allowance.
ZERO_OVER_DENSE = 1.0
ZERO_OVER_DENSE_ALLOWANCE = 0.05

# (workload, dtype, fused, scaled, clipped) -> the same for the whole phase of the optimizer.
PHASE: dict[tuple[str, str, bool, bool, bool], float] = {
    ("gpt2_124m", "float32", True, False, False): 1.25,
    ("gpt2_124m", "float32", True, True, False): 1.5,
}

# Peak memory that a call adds, as a share of the gradients' bytes. The table of chunks takes 0.02 %.
PEAK_MEMORY_SHARE = 0.01

# `import fastclip` after `import torch`.
IMPORT_MS = 50.0


@dataclass(frozen=True)
class Verdict:
    """One bar held against what was measured. `text` is what the table prints."""

    reached: bool
    text: str


def judge_ratio(case: tuple[str, str, bool], ratio: float, read_share: float | None) -> list[Verdict]:
    """The bars of one row of the main table; none for most."""
    verdicts = []
    if (bar := RATIO.get(case)) is not None:
        verdicts.append(_verdict(ratio >= bar, f"{bar:.1f}x"))
    if (bar := READ_SHARE.get(case)) is not None and read_share is not None:
        verdicts.append(_verdict(read_share >= bar, f"{bar:.0%}"))
    return verdicts


def judge_phase(case: tuple[str, str, bool, bool, bool], ratio: float) -> list[Verdict]:
    """The bar of a row of the optimizer's phase; none for most."""
    bar = PHASE.get(case)
    return [] if bar is None else [_verdict(ratio >= bar, f"{bar:.2f}x")]


def judge_zero_rows(zero_over_dense: float) -> Verdict:
    """The bar of the embedding comparison."""
    limit = ZERO_OVER_DENSE + ZERO_OVER_DENSE_ALLOWANCE
    return _verdict(zero_over_dense <= limit, f"<={ZERO_OVER_DENSE:.2f}")


def judge_memory(added: int, megabytes: int) -> Verdict:
    """The bar of the memory that a call takes for so many MiB of gradients."""
    share = added / (megabytes << 20)
    return _verdict(share <= PEAK_MEMORY_SHARE, f"<={PEAK_MEMORY_SHARE:.0%} of {megabytes} MiB")


def judge_import(milliseconds: float) -> Verdict:
    """The bar of the import."""
    return _verdict(milliseconds <= IMPORT_MS, f"<={IMPORT_MS:.0f} ms")


def _verdict(reached: bool, bar: str) -> Verdict:
    return Verdict(reached, f"{bar} {'yes' if reached else 'NO'}")
