# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.gpu_bound`: which fraction of a GPU's memory bandwidth the hot loops can reach.

Nothing is timed. The loops' instructions are counted in the built library, and two limits derived from them:

* issue: a multiprocessor issues 4 instructions of 32 threads a clock, and float64 operations more slowly.
  With I instructions for B bytes of each thread it can move 128 B / I bytes a clock, times multiprocessors
  times clock. The scale pass counts the bytes it reads and those it writes.
* latency: bytes that all resident threads have under way, over the time that one load takes. The time is an
  assumption, and a cautious one.

Both are printed in percent of the GPU's bandwidth. Where both are above 100, memory is the limit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .sass import Loop, hot_loops, resources

LIBRARY = Path(__file__).parent.parent / "fastclip" / "libfastclip_cuda.so"

_ISSUED = 128  # instructions of single threads that a multiprocessor issues in a clock
_LOAD_SECONDS = 1e-6  # of a load from memory that is busy; without load it is about half
_REGISTERS = 65536


@dataclass(frozen=True)
class Gpu:
    """From NVIDIA's data sheets; the clock is the one under sustained load."""

    name: str
    architecture: int
    multiprocessors: int
    clock: float  # Hz
    bandwidth: float  # bytes in a second
    float64: int  # operations of a multiprocessor in a clock
    threads: int = 2048  # that a multiprocessor can hold


GPUS = (
    Gpu("A100 80GB", 80, 108, 1.41e9, 2.04e12, 32),
    Gpu("H100 SXM", 90, 132, 1.75e9, 3.35e12, 64),
    Gpu("H200", 90, 132, 1.75e9, 4.8e12, 64),
    Gpu("B200", 100, 148, 1.85e9, 8.0e12, 64),
)


@dataclass(frozen=True)
class Bound:
    """One loop on one GPU. Limits are fractions of the bandwidth; above 1 the memory is slower."""

    gpu: Gpu
    loop: Loop
    issue: float
    latency: float

    @property
    def reachable(self) -> float:
        return min(self.issue, self.latency)


def bound(gpu: Gpu, loop: Loop, registers: int) -> Bound:
    """The limits of a loop whose kernel takes this many registers a thread."""
    moved = loop.loaded_bytes + 16 * loop.count("STG.E.128")
    wide = loop.count("DFMA", "DADD", "DMUL", "DSETP")
    clocks = max(loop.instructions / _ISSUED, wide / gpu.float64)
    by_issue = moved / clocks * gpu.multiprocessors * gpu.clock
    resident = min(gpu.threads, _REGISTERS // (registers * 256) * 256)
    by_latency = resident * loop.loaded_bytes * gpu.multiprocessors / _LOAD_SECONDS
    if loop.count("STG.E.128"):
        by_latency *= 2  # what is written needs no waiting
    return Bound(gpu, loop, by_issue / gpu.bandwidth, by_latency / gpu.bandwidth)


def bounds(library: Path = LIBRARY) -> list[Bound]:
    """Every hot loop of the statistics and scale kernels on every GPU whose architecture was built."""
    registers = {key: found.registers for key, found in resources(library).items()}
    architectures = {architecture for architecture, _ in registers}
    return [
        bound(gpu, loop, registers[gpu.architecture, loop.kernel])
        for gpu in GPUS
        if gpu.architecture in architectures
        for loop in hot_loops(library, gpu.architecture)
        if loop.kernel != "clamp"
    ]


def table(found: list[Bound]) -> str:
    """A row for each loop; for each GPU instructions, and the two limits in percent of its bandwidth."""
    names = [gpu.name for gpu in GPUS]
    lines = [
        "| loop | " + " | ".join(f"{name}: instructions, issue, latency" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    rows: dict[str, dict[str, str]] = {}
    for b in found:
        label = f"{b.loop.kernel}, {b.loop.dtype}, {b.loop.loaded_bytes} bytes a turn"
        cell = f"{b.loop.instructions}, {b.issue:.0%}, {b.latency:.0%}"
        rows.setdefault(label, {})[b.gpu.name] = cell
    lines += [
        f"| {label} | " + " | ".join(cells.get(n, "") for n in names) + " |" for label, cells in rows.items()
    ]
    return "\n".join(lines)


def main() -> int:
    if not LIBRARY.exists():
        print(f"{LIBRARY.name} was not built: there is nothing to read", file=sys.stderr)
        return 1
    print(table(bounds()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
