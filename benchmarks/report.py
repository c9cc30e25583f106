# SPDX-License-Identifier: BSD-3-Clause
"""The tables of a run, as text or as markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from fastclip.bench.table import number
from fastclip.bench.timing import Times

from . import bars, overhead
from .bars import Verdict
from .compiled import Comparison
from .phases import PhaseRow, bytes_moved
from .rows import Row

# What a pipe or a file gets; every table fits.
_WIDTH = 120
_MARKDOWN_WIDTH = 1000  # nothing may be wrapped


@dataclass
class Grid:
    """A table before it is laid out. A header may have several lines; a cell too."""

    title: str
    headers: list[str]
    labels: int  # columns that are text, set to the left; numbers follow
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _giga(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e9:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{number(value)}x"


def _clip(clipped: bool) -> str:
    return "yes" if clipped else "no"


def _bars(row: Row | PhaseRow) -> str:
    if row.failed:
        return "FAILED"
    if row.note:
        return "skipped"
    return "\n".join(verdict.text for verdict in row.verdicts) or "-"


def _name(row: Row) -> str:
    return f"{row.workload} {row.dtype} {'clipped' if row.clipped else 'unclipped'}"


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = [f"{_name(row)}: {row.note}" for row in rows if row.note]
    for row in rows:
        for verdict in row.verdicts:
            if not verdict.reached:
                ceiling = f"; ceiling {_times(row.ceiling)}" if row.ceiling else ""
                share = f", {_percent(row.share_of_limit)} of the limit" if row.share_of_limit else ""
                notes.append(
                    f"NOT REACHED {_name(row)}: bar {verdict.text.split()[0]}, "
                    f"got {_times(row.ratio)}{share}{ceiling}"
                )
    return notes


def clip_grid(rows: Sequence[Row]) -> Grid:
    headers = "workload|dtype|clip|torch\nms|fastclip\nms|ratio|bar|ceiling|GB/s|read\nGB/s|of\nlimit"
    grid = Grid(
        "clip_grad_norm_: torch against fastclip",
        [*headers.split("|"), "error\nfastclip", "error\ntorch"],
        labels=3,
        notes=_notes(rows),
    )
    for row in rows:
        torch_ms, fastclip_ms = (t.median_ms for t in row.times) if row.times else (None, None)
        errors = [f"{error:.0e}" for error in row.norm_errors[::-1]] if row.norm_errors else ["-", "-"]
        grid.rows.append(
            [
                *(row.workload, row.dtype, _clip(row.clipped), number(torch_ms), number(fastclip_ms)),
                *(_times(row.ratio), _bars(row), _times(row.ceiling)),
                *(_giga(row.bandwidth), _giga(row.read_bandwidth), _percent(row.share_of_limit)),
                *errors,
            ]
        )
    return grid


def embedding_grid(rows: Sequence[Row]) -> Grid:
    grid = Grid(
        "fastclip on an embedding gradient: 99 % of the rows zero against dense",
        ["dtype", "clip", "dense\nms", "99 % zero\nms", "zero / dense", "bar"],
        labels=2,
        notes=[f"The bar allows {bars.ZERO_OVER_DENSE_ALLOWANCE:.0%} for noise."],
    )
    grid.notes += [f"{_name(row)}: {row.note}" for row in rows if row.note]
    for row in rows:
        dense, zero = (number(t.median_ms) for t in row.times) if row.times else ("-", "-")
        slower = number(1 / row.ratio) if row.ratio else "-"
        grid.rows.append([row.dtype, _clip(row.clipped), dense, zero, slower, _bars(row)])
    return grid


def phase_grid(rows: Sequence[PhaseRow]) -> Grid:
    headers = "workload|dtype|optimizer|scaled|clip|torch\nms|fastclip\nms|ratio|bar"
    grid = Grid(
        "Unscaling, clipping and the step: torch's way against fastclip attached",
        [*headers.split("|"), "passes over gradients\ntorch / fastclip", "GB moved\ntorch / fastclip"],
        labels=5,
        notes=["R reads the gradients, W writes them; each word is a call or a pass of a kernel."],
    )
    grid.notes += [f"{r.setting.workload} {r.setting.dtype}: {r.note}" for r in rows if r.note]
    for row in rows:
        s = row.setting
        passes = s.torch_passes, s.fastclip_passes
        torch_ms, fastclip_ms = (number(t.median_ms) for t in row.times) if row.times else ("-", "-")
        grid.rows.append(
            [
                *(s.workload, s.dtype, s.optimizer, _clip(s.scaled), _clip(s.clipped)),
                *(torch_ms, fastclip_ms, _times(row.ratio), _bars(row), " / ".join(passes)),
                " / ".join(number(bytes_moved(p, row.nbytes) / 1e9) for p in passes),
            ]
        )
    return grid


def compiled_grid(comparisons: Sequence[Comparison]) -> Grid:
    grid = Grid(
        "Under torch.compile: torch's clipping compiled against fastclip's",
        ["what", "torch\ncompiled ms", "fastclip\nms", "ratio"],
        labels=1,
    )
    for c in comparisons:
        row = [c.what, number(c.torch.median_ms), number(c.fastclip.median_ms), _times(c.ratio)]
        grid.rows.append(row)
    return grid


def host_grid(costs: dict[int, tuple[Times, Times]]) -> Grid:
    grid = Grid(
        "Host cost of a call: tensors of 64 float32 elements, unclipped",
        ["tensors", "torch\nus", "fastclip\nus", "ratio", "fastclip\nus a tensor"],
        labels=0,
    )
    for count, (torch_times, fastclip_times) in costs.items():
        ours, theirs = fastclip_times.median_ms * 1e3, torch_times.median_ms * 1e3
        row = [str(count), number(theirs), number(ours), _times(theirs / ours), number(ours / count)]
        grid.rows.append(row)
    return grid


def memory_grid(added: dict[str, list[int | None]], verdicts: Sequence[Verdict]) -> Grid:
    def megabytes(value: int | None) -> str:
        return "-" if value is None else f"{value / (1 << 20):.1f} MiB"

    headers = [f"{size} MiB of\ngradients" for size in overhead.MEGABYTES]
    grid = Grid(
        "Memory that one clipping call adds to the peak of a fresh process",
        ["implementation", *headers, "bar"],
        labels=1,
    )
    for provider, values in added.items():
        bar = "\n".join(verdict.text for verdict in verdicts) if provider == "fastclip" else "-"
        grid.rows.append([provider, *map(megabytes, values), bar or "-"])
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
