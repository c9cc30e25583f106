# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.gpu.tables`: the measurements of gpu-check, printed as Markdown tables."""

from __future__ import annotations

import argparse
import sys

import torch

from fastclip.bench.workloads import SMOKE

from . import phase_table
from .clip_times import MANY_4096, GpuClipRow, cases, measure, measure_ops
from .clocks import DeviceClocks

BAR_MISSED = 2
_HOST_MS = 0.6  # the most for 2,000 gradients


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [" | ".join(cells) for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _name(row: GpuClipRow) -> str:
    return f"{row.case.workload.name}, {row.case.dtype}, {row.nbytes / 1e6:.0f} MB"


def clip_table(rows: list[GpuClipRow], what: str) -> str:
    """Return fastclip's milliseconds, and the others' times as multiples of it."""
    others = sorted({name for row in rows for name in getattr(row, what)} - {"fastclip"})
    body = []
    for row in rows:
        times = getattr(row, what)
        ratios = [f"{times[o] / times['fastclip']:.2f}x" if o in times else "" for o in others]
        body.append([_name(row), f"{times['fastclip'] * 1e3:.3f}", *ratios])
    return _table(["workload", "fastclip, ms", *others], body)


def bandwidth_table(rows: list[GpuClipRow]) -> str:
    """Return the bandwidth of the pass over unclipped gradients, which reads each byte once."""
    body = [
        [
            _name(row),
            f"{row.bandwidth / 1e9:.0f}",
            f"{row.copy_bandwidth / 1e9:.0f}",
            f"{row.bandwidth_fraction:.0%}",
            f"{row.norm_error:.0e}",
        ]
        for row in rows
    ]
    return _table(["workload", "GB/s", "copy GB/s", "fraction", "error of the norm"], body)


def bar_lines(rows: list[GpuClipRow]) -> list[str]:
    """Return one line for each bar."""
    lines = []
    for row in rows:
        for what, reached, bar in row.checks():
            word = "reached" if reached >= bar else "MISSED"
            lines.append(f"- {word}: {_name(row)}, {what}: {reached:.2f} (bar {bar})")
        if row.case.workload is MANY_4096:
            host = row.host["fastclip"] * 1e3
            word = "reached" if host <= _HOST_MS else "MISSED"
            lines.append(f"- {word}: host time for 2,000 gradients: {host:.2f} ms (bar {_HOST_MS} or less)")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu.tables", description=__doc__)
    parser.add_argument("--ops", action="store_true", help="print only a line about the two passes")
    options = parser.parse_args()
    clocks = DeviceClocks("cuda" if torch.cuda.is_available() else "cpu")
    repeats = 3 if SMOKE else 21
    if options.ops:
        found = measure_ops(clocks, repeats)
        print(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        return 0
    rows = [measure(case, clocks, repeats) for case in cases()]
    lines = bar_lines(rows)
    titles = {
        "unclipped": "Unclipped, work of the device alone",
        "clipped": "Clipped, work of the device alone",
        "end_to_end": "Unclipped, from an idle device to an idle device",
        "host": "Unclipped, until the call returns",
    }
    for what, title in titles.items():
        print(f"### {title}\n\n{clip_table(rows, what)}\n")
    phase_rows = phase_table.measure_all(clocks, repeats)
    print(f"### Unscaling, clipping and the step\n\n{_table(phase_table.HEADER, phase_rows)}\n")
    print(f"### Bandwidth\n\n{bandwidth_table(rows)}\n\n### Bars\n\n" + "\n".join(lines))
    return BAR_MISSED if any("MISSED" in line for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
