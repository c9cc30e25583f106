# SPDX-License-Identifier: BSD-3-Clause
"""The rows of `fastclip bench` as lines of text, each printed as soon as it is measured."""

from __future__ import annotations

from .clip_rows import ClipRow

# Names and widths; a negative width is that of text, which is aligned to the left.
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
ms           median time of one call. torch.nn.utils.clip_grad_norm_ and fastclip.clip_grad_norm_ take turns
             on the same gradients; clipped gradients are restored before each call, outside the time
ratio        torch's median over fastclip's: above 1 fastclip is faster
middle half  the quartiles of the ratios of single turns
limit        the ratio of moving each byte only once at the memory bandwidth measured beside the row;
             "-" for gradients that fit in the cache
norm error   relative error against float64: fastclip's, then torch's. Gradients were checked as well"""
BUSY = """\
Other processes were running (see "load before"). The two calls of a turn are still comparable, but times
are longer than on an idle machine, and short calls may include the wait for a core. Repeat the run when the
machine is idle."""


def header() -> str:
    """Return the line of column names."""
    return _line([name for name, _ in _COLUMNS])


def row_line(row: ClipRow) -> str:
    """Return the line of one row; a row without times ends with its note."""
    cells = [row.workload, row.dtype, str(row.tensors) if row.tensors else "", "yes" if row.clipped else "no"]
    if row.times is None or row.norm_errors is None:
        return f"{_line(cells)}  {row.note}"
    low, high = row.times.ratio_quartiles
    torch_error, fastclip_error = row.norm_errors
    return _line(
        [
            *cells,
            *(number(times.median_ms) for times in (row.times.first, row.times.second)),
            f"{number(row.times.ratio)}x",
            f"{number(low)} to {number(high)}",
            f"{number(row.ceiling)}x" if row.ceiling is not None else "-",
            f"{fastclip_error:.0e}",
            f"{torch_error:.0e}",
        ]
    )


def number(value: float | None) -> str:
    """Return a value with at least three digits and without an exponent."""
    if value is None:
        return "-"
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def _line(cells: list[str]) -> str:
    """Align the cells to their columns; a longer name moves the rest to the right."""
    widths = [width for _, width in _COLUMNS][: len(cells)]
    aligned = (
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, width in zip(cells, widths, strict=True)
    )
    return "  ".join(aligned).rstrip()
