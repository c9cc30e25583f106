# SPDX-License-Identifier: BSD-3-Clause
"""The tables of a run as text or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from fastclip.bench.clip_rows import ClipRow, TimedRow
from fastclip.bench.clip_table import number
from fastclip.bench.timing import PairedTimes

from . import bars, overhead
from .bars import BarCheck
from .compiled import CompiledRow
from .phases import PhaseRow, bytes_moved

# The least width, also of a pipe or a file; every table fits.
_WIDTH = 120
_MARKDOWN_WIDTH = 1000  # wide enough that nothing wraps


@dataclass
class Grid:
    """A table before its layout. Headers and cells may have several lines."""

    title: str
    headers: list[str]
    labels: int  # text columns, aligned to the left; columns of numbers follow
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{number(value)}x"


def _yes_no(flag: bool) -> str:
    return "yes" if flag else "no"


def _medians(times: PairedTimes | None, factor: float = 1) -> list[str]:
    """Return both medians in milliseconds, or in another unit by its factor."""
    if times is None:
        return ["-", "-"]
    return [number(t.median_ms * factor) for t in (times.first, times.second)]


def _bar_cell(row: TimedRow, checks: Sequence[BarCheck]) -> str:
    if row.failed:
        return "FAILED"
    if row.note:
        return "skipped"
    return "\n".join(check.text for check in checks) or "-"


def _name(row: ClipRow) -> str:
    return f"{row.workload} {row.dtype} {'clipped' if row.clipped else 'unclipped'}"


def _row_notes(rows: Sequence[ClipRow]) -> list[str]:
    return [f"{_name(row)}: {row.note}" for row in rows if row.note]


def _miss_notes(rows: Sequence[ClipRow]) -> list[str]:
    notes = []
    for row in rows:
        share = f", {_percent(row.share_of_limit)} of the limit" if row.share_of_limit else ""
        ceiling = f"; ceiling {_factor(row.ceiling)}" if row.ceiling else ""
        notes += [
            f"NOT REACHED {_name(row)}: bar {check.text.split()[0]}, got {_factor(row.ratio)}{share}{ceiling}"
            for check in bars.check_clip(row)
            if not check.reached
        ]
    return notes


def clip_grid(rows: Sequence[ClipRow]) -> Grid:
    """Return the main table."""
    headers = "workload|dtype|clip|torch\nms|fastclip\nms|ratio|bar|ceiling|GB/s|read\nGB/s|of\nlimit"
    grid = Grid(
        "clip_grad_norm_: torch against fastclip",
        [*headers.split("|"), "error\nfastclip", "error\ntorch"],
        labels=3,
        notes=[*_row_notes(rows), *_miss_notes(rows)],
    )
    for row in rows:
        errors = [f"{error:.0e}" for error in row.norm_errors[::-1]] if row.norm_errors else ["-", "-"]
        grid.rows.append(
            [
                *(row.workload, row.dtype, _yes_no(row.clipped), *_medians(row.times)),
                *(_factor(row.ratio), _bar_cell(row, bars.check_clip(row)), _factor(row.ceiling)),
                *(_giga(row.bandwidth), _giga(row.read_bandwidth), _percent(row.share_of_limit)),
                *errors,
            ]
        )
    return grid


def embedding_grid(rows: Sequence[ClipRow]) -> Grid:
    """Return the table of the dense and the mostly zero gradient of an embedding."""
    grid = Grid(
        "fastclip on an embedding gradient: 99 % of the rows zero against dense",
        ["dtype", "clip", "dense\nms", "99 % zero\nms", "zero / dense", "bar"],
        labels=2,
        notes=[f"The bar allows {bars.ZERO_OVER_DENSE_ALLOWANCE:.0%} for noise.", *_row_notes(rows)],
    )
    for row in rows:
        slower = number(1 / row.ratio) if row.ratio else "-"
        bar = _bar_cell(row, bars.check_embedding(row))
        grid.rows.append([row.dtype, _yes_no(row.clipped), *_medians(row.times), slower, bar])
    return grid


def phase_grid(rows: Sequence[PhaseRow]) -> Grid:
    """Return the table of the optimizer phase."""
    headers = "workload|dtype|optimizer|scaled|clip|torch\nms|fastclip\nms|ratio|bar"
    grid = Grid(
        "Unscaling, clipping and the step: torch's way against fastclip attached",
        [*headers.split("|"), "passes over gradients\ntorch / fastclip", "GB moved\ntorch / fastclip"],
        labels=5,
        notes=["R reads the gradients, W writes them; each word is a call or a pass of a kernel."],
    )
    grid.notes += [f"{r.setting.workload.name} {r.setting.dtype}: {r.note}" for r in rows if r.note]
    for row in rows:
        s = row.setting
        passes = s.torch_passes, s.fastclip_passes
        grid.rows.append(
            [
                *(s.workload.name, s.dtype, s.optimizer, _yes_no(s.scaled), _yes_no(s.clipped)),
                *(*_medians(row.times), _factor(row.ratio), _bar_cell(row, bars.check_phase(row))),
                *(" / ".join(passes), " / ".join(number(bytes_moved(p, s.nbytes) / 1e9) for p in passes)),
            ]
        )
    return grid


def compiled_grid(rows: Sequence[CompiledRow]) -> Grid:
    """Return the table of torch.compile."""
    headers = ["what", "torch\ncompiled ms", "fastclip\nms", "ratio"]
    grid = Grid("Under torch.compile: torch's clipping compiled against fastclip's", headers, labels=1)
    grid.rows = [[row.what, *_medians(row.times), _factor(row.times.ratio)] for row in rows]
    return grid


def host_grid(costs: dict[int, PairedTimes]) -> Grid:
    """Return the table of the host's cost of a call by number of tensors."""
    headers = ["tensors", "torch\nus", "fastclip\nus", "ratio", "fastclip\nus a tensor"]
    grid = Grid("Host cost of a call: tensors of 64 float32 elements, unclipped", headers, labels=0)
    for count, times in costs.items():
        per_tensor = number(times.second.median_ms * 1e3 / count)
        grid.rows.append([str(count), *_medians(times, 1e3), _factor(times.ratio), per_tensor])
    return grid


def memory_grid(added: dict[str, list[int | None]]) -> Grid:
    """Return the table of the memory that a call adds, by implementation."""
    headers = [f"{size} MiB of\ngradients" for size in overhead.MEGABYTES]
    title = "Memory that one clipping call adds to the peak of a fresh process"
    grid = Grid(title, ["implementation", *headers, "bar"], labels=1)
    for name, values in added.items():
        checks = bars.check_memory(values, overhead.MEGABYTES) if name == "fastclip" else []
        cells = ["-" if value is None else f"{value / (1 << 20):.1f} MiB" for value in values]
        grid.rows.append([name, *cells, "\n".join(check.text for check in checks) or "-"])
    return grid


def _layout(grid: Grid, markdown: bool) -> Table:
    table = Table(
        box=box.MARKDOWN if markdown else box.SIMPLE_HEAD,
        padding=(0, 1) if markdown else 0,
        pad_edge=markdown,
    )
    for index, header in enumerate(grid.headers):
        header = header.replace("\n", " ") if markdown else header
        table.add_column(header, justify="left" if index < grid.labels else "right", no_wrap=True)
    for row in grid.rows:
        table.add_row(*(cell.replace("\n", ", ") if markdown else cell for cell in row))
    return table


def _lines(grid: Grid, machine: dict[str, str], markdown: bool) -> Iterator[str | Table]:
    yield f"**{grid.title}**\n" if markdown else grid.title
    yield _layout(grid, markdown)
    for note in grid.notes:
        yield f"- {note}" if markdown else f"  {note}"
    if machine:
        yield ""
    for name, value in machine.items():
        yield f"- {name}: {value}" if markdown else f"  {name:<17} {value}"
    yield ""


def show(grids: Sequence[Grid], machine: dict[str, str], markdown: bool) -> None:
    """Print the first grid, then the machine, then the other grids."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = _MARKDOWN_WIDTH if markdown else max(_WIDTH, console.width)
    with console.capture() as captured:
        for index, grid in enumerate(grids):
            for line in _lines(grid, machine if index == 0 else {}, markdown):
                console.print(line, soft_wrap=isinstance(line, str))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
