# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.sharded`: DTensor gradients on gloo processes, torch against fastclip."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastclip
from fastclip.bench.workloads import SMOKE

BAR = 5.0
COUNTS = (10, 20) if SMOKE else (400, 2000)
_SIZE = 64  # elements of each shard: what is measured is the host's work and the collectives
_ROUNDS = 3 if SMOKE else 9
_IN_A_ROW = 5


def _parameters(count: int) -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = []
    for number in range(count):
        value = torch.full((_SIZE * dist.get_world_size(),), 0.01 + number / count)
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(value, mesh, [Shard(0)])
        made.append(parameter)
    return made


def _seconds(call: Callable[[], object]) -> float:
    """Of one call out of several in a row: nothing brings the processes into step before it."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_IN_A_ROW):
        call()
    return (time.perf_counter() - start) / _IN_A_ROW


def _serve(rank: int, world: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    lines = []
    for count in COUNTS:
        parameters = _parameters(count)
        calls = {
            "torch": lambda p=parameters: torch.nn.utils.clip_grad_norm_(p, 1e9),
            "fastclip": lambda p=parameters: fastclip.clip_grad_norm_(p, 1e9),
        }
        norms = [float(getattr(n := call(), "full_tensor", lambda n=n: n)()) for call in calls.values()]
        assert abs(norms[0] / norms[1] - 1) < 1e-4, norms
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                taken[name].append(_seconds(call))
        theirs, ours = (statistics.median(taken[name]) * 1e3 for name in calls)
        lines.append(f"{count} {theirs:.3f} {ours:.3f}")
    if rank == 0:
        Path(results).write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int = 2) -> list[tuple[int, float, float]]:
    """(number of parameters, torch's median ms, fastclip's) in turns on the first of `world` processes."""
    with tempfile.TemporaryDirectory() as folder:
        store, results = Path(folder, "store"), Path(folder, "results")
        multiprocessing.spawn(_serve, (world, str(store), str(results)), nprocs=world)
        rows = [line.split() for line in results.read_text().splitlines()]
    return [(int(count), float(theirs), float(ours)) for count, theirs, ours in rows]


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.sharded", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="processes (default: 2)")
    options = parser.parse_args()
    print(f"clip_grad_norm_ of DTensor gradients, {options.world} gloo processes, torch {torch.__version__}")
    print("parameters | torch, ms | fastclip, ms | ratio | bar")
    missed = False
    for count, theirs, ours in measure(options.world):
        reached = theirs / ours >= BAR
        missed |= not reached and not SMOKE
        verdict = f"{BAR:.0f}x {'yes' if reached else 'NO'}"
        print(f"{count} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.1f}x | {verdict}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
