# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks`: one run that measures, checks the bars and prints all tables in one process."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from fastclip.bench.clip_rows import ClipRow, compare_workload
from fastclip.bench.machine import is_busy
from fastclip.bench.timing import Bandwidth, PairedTimes
from fastclip.bench.workloads import DTYPES, SMOKE, WORKLOADS

from . import bars, compiled, embeddings, grids, overhead, phases, provenance
from .bars import BarCheck
from .compiled import CompiledRow
from .phases import PhaseRow

TABLES = ("clip", "embedding", "phase", "compiled", "overhead")

_T = TypeVar("_T")

_BUSY = "OTHER PROCESSES WERE RUNNING (see load): neither a bar reached nor a bar missed is evidence here."


@dataclass
class Results:
    """The results of one run; a table that was not requested is empty."""

    clip: list[ClipRow] = field(default_factory=list)
    embedding: list[ClipRow] = field(default_factory=list)
    phase: list[PhaseRow] = field(default_factory=list)
    compiled: list[CompiledRow] = field(default_factory=list)
    host: dict[int, PairedTimes] = field(default_factory=dict)
    memory: dict[str, list[int | None]] = field(default_factory=dict)
    import_ms: float | None = None

    def checks(self) -> Iterator[BarCheck]:
        """Yield the check of every bar."""
        for row in self.clip:
            yield from bars.check_clip(row)
        for row in self.embedding:
            yield from bars.check_embedding(row)
        for phase_row in self.phase:
            yield from bars.check_phase(phase_row)
        if self.import_ms is not None:
            yield from bars.check_memory(self.memory["fastclip"], overhead.MEGABYTES)
            yield bars.check_import(self.import_ms)

    @property
    def all_reached(self) -> bool:
        return all(check.reached for check in self.checks())

    @property
    def parity_failed(self) -> bool:
        return any(row.failed for row in (*self.clip, *self.embedding, *self.phase))

    def summary(self) -> dict[str, object]:
        """Return what the JSON file has.

        The first and second times of a row are torch's and fastclip's; of an embedding, dense and zero.
        """
        return {
            "smoke": SMOKE,
            "clip": [_with_bars(row, bars.check_clip(row)) for row in self.clip],
            "embedding": [_with_bars(row, bars.check_embedding(row)) for row in self.embedding],
            "phase": [_with_bars(row, bars.check_phase(row)) for row in self.phase],
            "compiled": [{"what": row.what, **_torch_and_fastclip(row.times)} for row in self.compiled],
            "host": {count: _torch_and_fastclip(times) for count, times in self.host.items()},
            "peak_memory_bytes": {"gradient_mebibytes": overhead.MEGABYTES, **self.memory},
            "import_ms": self.import_ms,
            "all_bars_reached": self.all_reached,
        }


def _with_bars(row: ClipRow | PhaseRow, checks: list[BarCheck]) -> dict[str, object]:
    return {**row.summary(), "bars": {check.text: check.reached for check in checks}}


def _torch_and_fastclip(times: PairedTimes) -> dict[str, object]:
    return {"torch": times.first.summary(), "fastclip": times.second.summary()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Time torch's clip_grad_norm_ and fastclip's in turns."
    )
    for option, choices, default in (
        ("--workload", tuple(WORKLOADS), "all"),
        ("--dtype", DTYPES, "those of each workload"),
        ("--tables", TABLES, "all"),
    ):
        text = f"any of {', '.join(choices)} (default: {default})"
        parser.add_argument(option, nargs="+", choices=choices, metavar="NAME", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if a bar was missed")
    return parser.parse_args()


def _progress(items: Iterable[_T], what: str) -> Iterator[_T]:
    yield from track(list(items), what, console=Console(stderr=True), transient=True)


def _measure_overhead(results: Results) -> None:
    for count in _progress(overhead.TENSOR_COUNTS, "host cost"):
        results.host[count] = overhead.host_cost(count)
    cases = itertools.product(overhead.MEMORY_IMPLEMENTATIONS, overhead.MEGABYTES)
    for name, size in _progress(cases, "memory"):
        results.memory.setdefault(name, []).append(overhead.peak_memory(name, size))
    results.import_ms = overhead.import_ms()


def _measure(options: argparse.Namespace) -> Results:
    results = Results()
    tables = options.tables or TABLES
    if "clip" in tables:
        bandwidth = Bandwidth()
        workloads = [WORKLOADS[name] for name in options.workload or WORKLOADS]
        cases = [(workload, dtype) for workload in workloads for dtype in options.dtype or workload.dtypes]
        for workload, dtype in _progress(cases, "clip"):
            results.clip += compare_workload(workload, dtype, bandwidth)
    if "embedding" in tables:
        for dtype in _progress(options.dtype or DTYPES, "embedding"):
            results.embedding += embeddings.compare(dtype)
    if "phase" in tables:
        for setting in _progress(phases.settings(), "phase"):
            results.phase.append(phases.measure(setting))
    if "compiled" in tables:
        for dtype in _progress(options.dtype or compiled.DTYPES, "compiled"):
            results.compiled += compiled.compare_clipping(dtype)
        results.compiled.append(compiled.compare_steps())
    if "overhead" in tables:
        _measure_overhead(results)
    return results


def _grids(results: Results) -> list[grids.Grid]:
    found = []
    if results.clip:
        found.append(grids.clip_grid(results.clip))
    if results.embedding:
        found.append(grids.embedding_grid(results.embedding))
    if results.phase:
        found.append(grids.phase_grid(results.phase))
    if results.compiled:
        found.append(grids.compiled_grid(results.compiled))
    if results.import_ms is not None:
        found.append(grids.host_grid(results.host))
        found.append(grids.memory_grid(results.memory))
        check = bars.check_import(results.import_ms)
        note = f"import fastclip after import torch: {results.import_ms:.1f} ms, bar {check.text}"
        found[-1].notes.append(note)
    if SMOKE:
        found[0].title += " (SMOKE SIZES: the figures mean nothing)"
    return found


def main() -> int:
    """Run the benchmarks; return 1 if a result was wrong or, with --strict, if a bar was missed."""
    options = _parse()
    before, busy = provenance.describe(), is_busy()
    results = _measure(options)
    tables = _grids(results)
    if busy:
        tables[0].notes.insert(0, _BUSY)
    grids.show(tables, before, options.markdown)
    if options.json:
        text = json.dumps({"machine": before, "busy": busy, **results.summary()}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(results.parity_failed or (options.strict and not results.all_reached))


if __name__ == "__main__":
    raise SystemExit(main())
