# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.sharded`: the clip of DTensor gradients on gloo processes, torch against fastclip."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fastclip
from fastclip.bench.timing import Call, take_turns
from fastclip.bench.workloads import SMOKE

BAR = 5.0
COUNTS = (10, 20) if SMOKE else (400, 2000)
_SIZE = 64  # elements of each shard: few, so that the host's work and the collectives dominate
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


def _seconds_in_a_row(call: Call) -> float:
    """Return the mean seconds of several calls in a row; between them nothing synchronizes the processes."""
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
        clips = (torch.nn.utils.clip_grad_norm_, fastclip.clip_grad_norm_)
        calls = [functools.partial(clip, parameters, 1e9) for clip in clips]
        norms = [float(getattr(n := call(), "full_tensor", lambda n=n: n)()) for call in calls]
        assert abs(norms[0] / norms[1] - 1) < 1e-4, norms
        theirs, ours = (t.median_ms for t in take_turns(calls, clock=_seconds_in_a_row, rounds=_ROUNDS))
        lines.append(f"{count} {theirs:.3f} {ours:.3f}")
    if rank == 0:
        Path(results).write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def measure(world: int = 2) -> list[tuple[int, float, float]]:
    """Return (number of parameters, torch's median ms, fastclip's median ms) of the first process."""
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
        bar = f"{BAR:.0f}x {'yes' if reached else 'NO'}"
        print(f"{count} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.1f}x | {bar}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
