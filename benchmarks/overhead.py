# SPDX-License-Identifier: BSD-3-Clause
"""The costs beside the work itself: host time of a call, peak memory, and the import.

`python -m benchmarks.overhead IMPLEMENTATION MEGABYTES` prints the bytes that one call adds to the peak
memory of its process. peak_memory() runs it in a fresh process, whose peak nothing else has raised.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fastclip
from fastclip.bench.machine import status_bytes
from fastclip.bench.timing import CALLS_IN_CACHE, PairedTimes, take_turns
from fastclip.bench.workloads import SMOKE, RestorableGradients, Workload

from .provenance import ROOT

TENSOR_COUNTS = (1, 100, 400, 2000)
_TINY = 64

MEGABYTES = (32, 64) if SMOKE else (100, 400)
_TENSORS = 16


def tiny(count: int) -> RestorableGradients:
    """Return gradients with so little work that nearly all of a call is its fixed cost."""
    return RestorableGradients.of(Workload(f"{count} x {_TINY}", ((_TINY,),) * count), "float32")


def host_cost(count: int) -> PairedTimes:
    """Return torch's and fastclip's times for this many tiny gradients that need no clipping."""
    parameters = tiny(count).parameters
    calls = [
        functools.partial(clip, parameters, 1e6)
        for clip in (torch.nn.utils.clip_grad_norm_, fastclip.clip_grad_norm_)
    ]
    return PairedTimes(*take_turns(calls, turn=CALLS_IN_CACHE))


def _flatten(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clip by way of one flat copy of all gradients, to show that the measurement includes such a copy."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    total_norm = flat.norm()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


def _reference(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    with fastclip.backends.use("reference"):
        return fastclip.clip_grad_norm_(parameters, max_norm)


CONTROL = "flat copy (control)"
MEMORY_IMPLEMENTATIONS: dict[str, Callable[[Sequence[Tensor], float], Tensor]] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "fastclip": fastclip.clip_grad_norm_,
    "fastclip reference": _reference,
    CONTROL: _flatten,
}


def _added_by_one_call(implementation: str, megabytes: int) -> int:
    clip = MEMORY_IMPLEMENTATIONS[implementation]

    def parameters(numel: int) -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.empty(numel // _TENSORS)) for _ in range(_TENSORS)]
        for parameter in made:
            parameter.grad = torch.empty_like(parameter.data).normal_()
        return made

    clip(parameters(1 << 20), 1.0)  # start threads and load code pages
    measured = parameters((megabytes << 20) // 4)
    before = status_bytes("VmRSS") or 0
    clip(measured, 1.0)
    return (status_bytes("VmHWM") or 0) - before


def peak_memory(implementation: str, megabytes: int) -> int | None:
    """Return the bytes that one call adds to the peak of a fresh process; None without /proc."""
    if status_bytes("VmHWM") is None:
        return None
    return int(_python("-m", "benchmarks.overhead", implementation, str(megabytes)))


def import_ms(repeats: int = 1 if SMOKE else 7) -> float:
    """Return the median time of `import fastclip` in fresh processes that have imported torch."""
    code = (
        "import time, torch; start = time.perf_counter(); import fastclip; print(time.perf_counter() - start)"
    )
    return statistics.median(float(_python("-c", code)) * 1e3 for _ in range(repeats))


def _python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    print(_added_by_one_call(sys.argv[1], int(sys.argv[2])))
