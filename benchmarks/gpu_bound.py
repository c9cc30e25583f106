# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.gpu_bound`: the fraction of a GPU's memory bandwidth that the hot loops can reach.

Nothing is timed. The instructions of the loops are counted in the built library and give two limits:

* issue: a multiprocessor issues 4 instructions of 32 threads per clock, and fewer float64 operations. With I
  instructions for B bytes of each thread it can move 128 B / I bytes per clock, times multiprocessors, times
  clock rate. For the scale kernel, bytes read and bytes written count.
* latency: the bytes in flight in all resident threads, divided by the latency of one load. The latency is a
  conservative assumption.

Both are printed in percent of the GPU's bandwidth. If both are above 100, memory bandwidth is the limit.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from .sass import Loop, hot_loops, resources

LIBRARY = Path(__file__).parent.parent / "fastclip" / "libfastclip_cuda.so"

_ISSUED = 128  # thread instructions that a multiprocessor issues per clock
_LOAD_SECONDS = 1e-6  # latency of a load from busy memory; from idle memory about half
_REGISTERS = 65536


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU, from NVIDIA's data sheets; the clock is that under sustained load."""

    name: str
    architecture: int
    multiprocessors: int
    clock: float  # Hz
    bandwidth: float  # bytes per second
    float64: int  # float64 operations of a multiprocessor per clock
    threads: int = 2048  # resident threads of a multiprocessor


GPUS = (
    Gpu("A100 80GB", 80, 108, 1.41e9, 2.04e12, 32),
    Gpu("H100 SXM", 90, 132, 1.75e9, 3.35e12, 64),
    Gpu("H200", 90, 132, 1.75e9, 4.8e12, 64),
    Gpu("B200", 100, 148, 1.85e9, 8.0e12, 64),
)


@dataclass(frozen=True)
class Bound:
    """The limits of one loop on one GPU, as fractions of the bandwidth; above 1 memory is slower."""

    gpu: Gpu
    loop: Loop
    issue: float
    latency: float

    @property
    def reachable(self) -> float:
        return min(self.issue, self.latency)


def bound(gpu: Gpu, loop: Loop, registers: int) -> Bound:
    """Return the limits of a loop whose kernel uses this many registers per thread."""
    moved = loop.loaded_bytes + 16 * loop.count("STG.E.128")
    wide = loop.count("DFMA", "DADD", "DMUL", "DSETP")
    clocks = max(loop.instructions / _ISSUED, wide / gpu.float64)
    by_issue = moved / clocks * gpu.multiprocessors * gpu.clock
    resident = min(gpu.threads, _REGISTERS // (registers * 256) * 256)
    by_latency = resident * loop.loaded_bytes * gpu.multiprocessors / _LOAD_SECONDS
    if loop.count("STG.E.128"):
        by_latency *= 2  # stores are not waited for
    return Bound(gpu, loop, by_issue / gpu.bandwidth, by_latency / gpu.bandwidth)


def bounds(library: Path = LIBRARY) -> list[Bound]:
    """Return the limits of the statistics and scale kernels on each GPU whose architecture was built."""
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
    """Return a Markdown table: per loop and GPU, instructions and both limits in percent of the bandwidth."""
    names = [gpu.name for gpu in GPUS]
    lines = [
        "| loop | " + " | ".join(f"{name}: instructions, issue, latency" for name in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    rows: dict[str, dict[str, str]] = {}
    for b in found:
        label = f"{b.loop.kernel}, {b.loop.dtype}, {b.loop.loaded_bytes} bytes per iteration"
        cell = f"{b.loop.instructions}, {b.issue:.0%}, {b.latency:.0%}"
        rows.setdefault(label, {})[b.gpu.name] = cell
    lines += [
        f"| {label} | " + " | ".join(cells.get(n, "") for n in names) + " |" for label, cells in rows.items()
    ]
    return "\n".join(lines)


def main() -> int:
    if not LIBRARY.exists():
        print(f"{LIBRARY.name} was not built: nothing to analyze", file=sys.stderr)
        return 1
    print(table(bounds()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
