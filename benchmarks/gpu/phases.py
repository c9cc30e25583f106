# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer's phase on a GPU: unscaling, clipping and the step, from an idle device to an idle device."""

from __future__ import annotations

import torch

from fastclip.bench.workloads import SMOKE, Shapes, gpt2

from ..phases import Phase, Setting, bytes_moved, settings
from .rows import Workload, exact_norm, make_parameters
from .timing import Device, in_turns

_SHAPES: dict[str, Shapes] = (
    {"smoke": ((1000,), (70_000,), (0,))}
    if SMOKE
    else {"gpt2_124m": gpt2(50257, 1024, 768, 12), "2000 x 4096": ((4096,),) * 2000}
)
HEADER = ["workload", "scaled", "clipped", "torch, ms", "fastclip, ms", "ratio", "GB, torch / fastclip"]


def measure(setting: Setting, device: Device, repeats: int) -> list[str]:
    """The cells of one row. The first step is held against the true gradients before anything is timed."""
    torch.manual_seed(0)
    workload = Workload(setting.workload, _SHAPES[setting.workload], getattr(torch, setting.dtype))
    parameters = make_parameters(workload, device)
    for parameter in parameters:
        parameter.data.normal_(std=0.02)
    saved = [p.grad.clone() for p in parameters if p.grad is not None]
    phase = Phase(setting, parameters, saved, exact_norm(saved))
    phase.check()
    phase.torch_call()
    theirs, ours = in_turns(device.seconds, [phase.torch_call, phase.fastclip_call], phase.prepare, repeats)
    nbytes = sum(g.nbytes for g in saved)
    moved = " / ".join(
        f"{bytes_moved(p, nbytes) / 1e9:.2f}" for p in (setting.torch_passes, setting.fastclip_passes)
    )
    yes = ["yes" if flag else "" for flag in (setting.scaled, setting.clipped)]
    name = f"{setting.workload}, {setting.dtype}, {setting.optimizer}"
    return [name, *yes, f"{theirs * 1e3:.3f}", f"{ours * 1e3:.3f}", f"{theirs / ours:.2f}x", moved]


def measure_all(device: Device, repeats: int) -> list[list[str]]:
    """Every row."""
    return [measure(setting, device, repeats) for setting in settings(tuple(_SHAPES))]
