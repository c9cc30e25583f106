# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks`: one run that measures, judges and prints everything in one process."""

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

from fastclip.bench.machine import is_busy
from fastclip.bench.timing import Bandwidth, Times
from fastclip.bench.workloads import DTYPES, SMOKE, WORKLOADS

from . import bars, compiled, machine, overhead, phases, report, rows
from .bars import Verdict
from .compiled import Comparison
from .phases import PhaseRow
from .rows import Row

TABLES = ("clip", "embedding", "phase", "compiled", "overhead")

_T = TypeVar("_T")

_BUSY = "OTHER PROCESSES WERE RUNNING (see load): neither a bar reached nor a bar missed is evidence here."


@dataclass
class Results:
    """All that one run found. What was not asked for is empty."""

    clip: list[Row] = field(default_factory=list)
    embedding: list[Row] = field(default_factory=list)
    phase: list[PhaseRow] = field(default_factory=list)
    compiled: list[Comparison] = field(default_factory=list)
    host: dict[int, tuple[Times, Times]] = field(default_factory=dict)
    memory: dict[str, list[int | None]] = field(default_factory=dict)
    memory_verdicts: list[Verdict] = field(default_factory=list)
    import_ms: float | None = None
    import_verdicts: list[Verdict] = field(default_factory=list)

    @property
    def all_reached(self) -> bool:
        verdicts = [v for row in (*self.clip, *self.embedding, *self.phase) for v in row.verdicts]
        return all(v.reached for v in verdicts + self.memory_verdicts + self.import_verdicts)

    @property
    def parity_failed(self) -> bool:
        return any(row.failed for row in (*self.clip, *self.embedding, *self.phase))

    def summary(self) -> dict[str, object]:
        """For the JSON file. First and second of a row: torch and fastclip; embedding: dense and zero."""
        return {
            "smoke": SMOKE,
            "clip": [row.summary() for row in self.clip],
            "embedding": [row.summary() for row in self.embedding],
            "phase": [row.summary() for row in self.phase],
            "compiled": [
                {"what": c.what, "torch": c.torch.summary(), "fastclip": c.fastclip.summary()}
                for c in self.compiled
            ],
            "host": {n: {"torch": a.summary(), "fastclip": b.summary()} for n, (a, b) in self.host.items()},
            "peak_memory_bytes": {"gradient_mebibytes": overhead.MEGABYTES, **self.memory},
            "import_ms": self.import_ms,
            "all_bars_reached": self.all_reached,
        }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description="Measure torch's clip_grad_norm_ and fastclip's in turns."
    )
    for option, choices, default in (
        ("--workload", tuple(WORKLOADS), "all"),
        ("--dtype", DTYPES, "those named by each workload"),
        ("--tables", TABLES, "all"),
    ):
        text = f"any of {', '.join(choices)} (default: {default})"
        parser.add_argument(option, nargs="+", choices=choices, metavar="NAME", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--markdown", action="store_true", help="print the tables as markdown")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bar was not reached")
    return parser.parse_args()


def _progress(items: Iterable[_T], what: str) -> Iterator[_T]:
    yield from track(list(items), what, console=Console(stderr=True), transient=True)


def _measure_overhead(results: Results) -> None:
    for count in _progress(overhead.TENSOR_COUNTS, "host cost"):
        results.host[count] = overhead.host_cost(count)
    for provider, size in _progress(
        itertools.product(overhead.MEMORY_PROVIDERS, overhead.MEGABYTES), "memory"
    ):
        results.memory.setdefault(provider, []).append(overhead.peak_memory(provider, size))
    for size, added in zip(overhead.MEGABYTES, results.memory["fastclip"], strict=True):
        if added is not None:
            results.memory_verdicts.append(bars.judge_memory(added, size))
    results.import_ms = overhead.import_ms()
    results.import_verdicts = [bars.judge_import(results.import_ms)]


def _measure(options: argparse.Namespace) -> Results:
    results = Results()
    tables = options.tables or TABLES
    if "clip" in tables:
        bandwidth = Bandwidth()
        workloads = [WORKLOADS[name] for name in options.workload or WORKLOADS]
        cases = [(workload, dtype) for workload in workloads for dtype in options.dtype or workload.dtypes]
        for workload, dtype in _progress(cases, "clip"):
            results.clip += rows.measure(workload, dtype, bandwidth)
    if "embedding" in tables:
        for dtype in _progress(options.dtype or DTYPES, "embedding"):
            results.embedding += rows.compare_embeddings(dtype)
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


def _grids(results: Results) -> list[report.Grid]:
    grids = []
    if results.clip:
        grids.append(report.clip_grid(results.clip))
    if results.embedding:
        grids.append(report.embedding_grid(results.embedding))
    if results.phase:
        grids.append(report.phase_grid(results.phase))
    if results.compiled:
        grids.append(report.compiled_grid(results.compiled))
    if results.host:
        grids.append(report.host_grid(results.host))
        grids.append(report.memory_grid(results.memory, results.memory_verdicts))
        verdict = results.import_verdicts[0]
        grids[-1].notes.append(
            f"import fastclip after import torch: {results.import_ms:.1f} ms, bar {verdict.text}"
        )
    if SMOKE:
        grids[0].title += " (SMOKE SIZES: the figures mean nothing)"
    return grids


def main() -> int:
    """Returns the exit status: 1 if a result was wrong, or, with --strict, if a bar was not reached."""
    options = _parse()
    before, busy = machine.describe(), is_busy()
    results = _measure(options)
    grids = _grids(results)
    if busy:
        grids[0].notes.insert(0, _BUSY)
    report.show(grids, before, options.markdown)
    if options.json:
        text = json.dumps({"machine": before, "busy": busy, **results.summary()}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(results.parity_failed or (options.strict and not results.all_reached))


if __name__ == "__main__":
    raise SystemExit(main())
