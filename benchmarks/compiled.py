# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: torch's clipping compiled as a rival, and whole compiled steps with either in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fastclip
from fastclip.bench.timing import CALLS_IN_CACHE, Times, alternate
from fastclip.bench.workloads import SMOKE, WORKLOADS, Gradients

WORKLOADS_TO_COMPILE = ("mid_150", "one_1m")  # torch.compile unrolls the list of gradients
DTYPES = ("float32", "bfloat16")
_MAX_NORM = 1.0

Clip = Callable[..., Tensor]


@dataclass(frozen=True)
class Comparison:
    """Two calls timed in turns; the first is torch's, compiled."""

    what: str
    torch: Times
    fastclip: Times

    @property
    def ratio(self) -> float:
        return self.torch.median_ms / self.fastclip.median_ms


def _compile(function: Callable) -> Callable:
    # At smoke size the path through the tracer is what is checked, not the code it generates.
    return torch.compile(function, backend="eager" if SMOKE else "inductor")


def _clipping(workload: str, dtype: str) -> list[Comparison]:
    torch._dynamo.reset()
    gradients = Gradients.of(WORKLOADS[workload], dtype)
    theirs, ours = _compile(torch.nn.utils.clip_grad_norm_), _compile(fastclip.clip_grad_norm_)

    def call(clip: Clip) -> Callable[[], Tensor]:
        return lambda: clip(gradients.parameters, _MAX_NORM)

    found = []
    for name, clip in (("fastclip", fastclip.clip_grad_norm_), ("fastclip compiled", ours)):
        first, second = call(theirs), call(clip)
        for warm in (first, second):
            warm()
        times = alternate(first, second, gradients.restore, CALLS_IN_CACHE)
        found.append(Comparison(f"{workload}, {dtype}, {name}", *times))
    return found


def _step(clip: Clip) -> Callable[[], Tensor]:
    """A training step of a small model, as one compiled function."""
    torch.manual_seed(0)
    width, layers = (32, 2) if SMOKE else (256, 8)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(64, width)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs).square().mean()
        loss.backward()
        clip(model.parameters(), _MAX_NORM)
        optimizer.step()
        return loss.detach()

    return _compile(step)


def compare_clipping(dtype: str) -> list[Comparison]:
    """torch's clipping compiled against fastclip's, as it is and compiled. Compiling takes the most time."""
    return [c for workload in WORKLOADS_TO_COMPILE for c in _clipping(workload, dtype)]


def compare_steps() -> Comparison:
    """A whole compiled step with torch's clipping in it against the same with fastclip's."""
    torch._dynamo.reset()
    theirs, ours = _step(torch.nn.utils.clip_grad_norm_), _step(fastclip.clip_grad_norm_)
    for _ in range(3):
        theirs()
        ours()
    times = alternate(theirs, ours, lambda: None, CALLS_IN_CACHE)
    return Comparison("a whole compiled step", *times)
