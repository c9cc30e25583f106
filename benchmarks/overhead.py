# SPDX-License-Identifier: BSD-3-Clause
"""What a call costs beside its work: host time, memory, and the import.

`python -m benchmarks.overhead PROVIDER MEGABYTES` prints the bytes that one call adds to the peak memory of
that process; the measurements below run it in processes of their own, whose peak nothing else has raised.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import fastclip
from fastclip.bench.machine import status_bytes
from fastclip.bench.timing import CALLS_IN_CACHE, Times, alternate
from fastclip.bench.workloads import SMOKE, Gradients, Workload

_ROOT = Path(__file__).parent.parent

TENSOR_COUNTS = (1, 100, 400, 2000)
_TINY = 64

MEGABYTES = (32, 64) if SMOKE else (100, 400)
_TENSORS = 16


def tiny(count: int) -> Gradients:
    """So little work that nearly all of a call is its fixed cost."""
    return Gradients.of(Workload(f"{count} x {_TINY}", ((_TINY,),) * count), "float32")


def host_cost(count: int) -> tuple[Times, Times]:
    """torch's and fastclip's time for `count` tiny gradients that need no clipping."""
    parameters = tiny(count).parameters
    return alternate(
        lambda: torch.nn.utils.clip_grad_norm_(parameters, 1e6),
        lambda: fastclip.clip_grad_norm_(parameters, 1e6),
        prepare=lambda: None,
        turn=CALLS_IN_CACHE,
    )


def _flatten(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    """Clips by way of one long copy of all gradients: shows that the measurement sees such a copy."""
    flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
    total_norm = flat.norm()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)
    return total_norm


def _reference(parameters: Sequence[Tensor], max_norm: float) -> Tensor:
    with fastclip.backends.use("reference"):
        return fastclip.clip_grad_norm_(parameters, max_norm)


CONTROL = "flat copy (control)"
MEMORY_PROVIDERS: dict[str, Callable[[Sequence[Tensor], float], Tensor]] = {
    "torch": torch.nn.utils.clip_grad_norm_,
    "fastclip": fastclip.clip_grad_norm_,
    "fastclip reference": _reference,
    CONTROL: _flatten,
}


def _added_by_one_call(provider: str, megabytes: int) -> int:
    clip = MEMORY_PROVIDERS[provider]

    def parameters(numel: int) -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.empty(numel // _TENSORS)) for _ in range(_TENSORS)]
        for parameter in made:
            parameter.grad = torch.empty_like(parameter.data).normal_()
        return made

    clip(parameters(1 << 20), 1.0)  # threads and code pages, which later calls find there
    measured = parameters((megabytes << 20) // 4)
    before = status_bytes("VmRSS") or 0
    clip(measured, 1.0)
    return (status_bytes("VmHWM") or 0) - before


def peak_memory(provider: str, megabytes: int) -> int | None:
    """Bytes that one clipping call adds to the peak of a fresh process; None where there is no /proc."""
    if status_bytes("VmHWM") is None:
        return None
    return int(_python("-m", "benchmarks.overhead", provider, str(megabytes)))


def import_ms(repeats: int = 1 if SMOKE else 7) -> float:
    """Median time of `import fastclip` in fresh processes that have imported torch."""
    code = (
        "import time, torch; start = time.perf_counter(); import fastclip; print(time.perf_counter() - start)"
    )
    return statistics.median(float(_python("-c", code)) * 1e3 for _ in range(repeats))


def _python(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    print(_added_by_one_call(sys.argv[1], int(sys.argv[2])))
