# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a comparison as lines of text, one at a time."""

from __future__ import annotations

from .rows import Row

# Names and widths; negative for text, which is set to the left.
_COLUMNS = (
    ("gradients", -22),
    ("dtype", -9),
    ("tensors", 7),
    ("clipped", -7),
    ("torch ms", 9),
    ("fastclip ms", 11),
    ("ratio", 7),
    ("middle half", 15),
    ("limit", 7),
    ("norm error", 10),
    ("of torch", 8),
)
NOTES = """
ms           median of one call. torch.nn.utils.clip_grad_norm_ and fastclip.clip_grad_norm_ take turns on the
             same gradients; clipped ones are put back before each call, outside of the time
ratio        torch's median over fastclip's: above 1 fastclip is faster
middle half  the ratios of single turns: half of them lie within
limit        the ratio of what moves each byte only once at the memory bandwidth measured beside the row;
             "-" for gradients that lie in the cache
norm error   relative, against float64, of fastclip; then of torch. Gradients were held against float64 too"""
BUSY = """\
Other processes were running (see "load before"): the two calls of a turn still compare, but times are longer
than on a quiet machine, and short calls may show the wait for a core. Measure again when it is quiet."""


def header() -> str:
    return _line([name for name, _ in _COLUMNS])


def row_line(row: Row) -> str:
    """One row; why there are no times, where there are none."""
    cells = [row.workload, row.dtype, str(row.tensors) if row.tensors else "", "yes" if row.clipped else "no"]
    if row.times is None or row.ratio is None or row.ratio_quartiles is None or row.norm_errors is None:
        return f"{_line(cells)}  {row.note}"
    low, high = row.ratio_quartiles
    theirs, ours = row.norm_errors
    return _line(
        [
            *cells,
            *(number(times.median_ms) for times in row.times),
            f"{number(row.ratio)}x",
            f"{number(low)} to {number(high)}",
            f"{number(row.ceiling)}x" if row.ceiling is not None else "-",
            f"{ours:.0e}",
            f"{theirs:.0e}",
        ]
    )


def number(value: float | None) -> str:
    """Three digits or more, never an exponent."""
    if value is None:
        return "-"
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def _line(cells: list[str]) -> str:
    """Columns of negative width to the left, the others to the right; a long name moves the rest."""
    widths = [width for _, width in _COLUMNS][: len(cells)]
    laid = (
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, width in zip(cells, widths, strict=True)
    )
    return "  ".join(laid).rstrip()
