# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile: torch's clipping compiled against fastclip's, and whole compiled steps with either."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import fastclip
from fastclip.bench.timing import CALLS_IN_CACHE, PairedTimes, take_turns
from fastclip.bench.workloads import SMOKE, WORKLOADS, RestorableGradients

WORKLOADS_TO_COMPILE = ("mid_150", "one_1m")  # torch.compile unrolls the list of gradients
DTYPES = ("float32", "bfloat16")
_MAX_NORM = 1.0

Clip = Callable[..., Tensor]


@dataclass(frozen=True)
class CompiledRow:
    """A row of the table: torch compiled is first, fastclip second."""

    what: str
    times: PairedTimes


def compile_function(function: Callable) -> Callable:
    """Return the function compiled by torch, after dropping what was compiled before.

    Without the reset, the ninth compilation of one function would silently run eagerly. At smoke size the
    path through the tracer is tested, not the generated code.
    """
    torch._dynamo.reset()
    return torch.compile(function, backend="eager" if SMOKE else "inductor")


def _compare_clipping(workload: str, dtype: str) -> list[CompiledRow]:
    gradients = RestorableGradients.of(WORKLOADS[workload], dtype)
    torch_clip, compiled = map(compile_function, (torch.nn.utils.clip_grad_norm_, fastclip.clip_grad_norm_))
    rows = []
    for name, clip in (("fastclip", fastclip.clip_grad_norm_), ("fastclip compiled", compiled)):
        calls = [functools.partial(c, gradients.parameters, _MAX_NORM) for c in (torch_clip, clip)]
        for call in calls:
            call()
        times = take_turns(calls, gradients.restore, turn=CALLS_IN_CACHE)
        rows.append(CompiledRow(f"{workload}, {dtype}, {name}", PairedTimes(*times)))
    return rows


def _compiled_step(clip: Clip) -> Callable[[], Tensor]:
    """Return a training step of a small model, compiled as one function."""
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

    return compile_function(step)


def compare_clipping(dtype: str) -> list[CompiledRow]:
    """Compare torch's compiled clipping with fastclip's, plain and compiled.

    Compiling takes most of the time.
    """
    return [row for workload in WORKLOADS_TO_COMPILE for row in _compare_clipping(workload, dtype)]


def compare_steps() -> CompiledRow:
    """Compare a whole compiled step that clips with torch with the same step that clips with fastclip."""
    steps = [_compiled_step(clip) for clip in (torch.nn.utils.clip_grad_norm_, fastclip.clip_grad_norm_)]
    for _ in range(3):
        for step in steps:
            step()
    return CompiledRow("a whole compiled step", PairedTimes(*take_turns(steps, turn=CALLS_IN_CACHE)))
