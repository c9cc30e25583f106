# SPDX-License-Identifier: BSD-3-Clause
"""The optimizer phase on a GPU: unscaling, clipping and the step, from an idle device to an idle device."""

from __future__ import annotations

import torch

from fastclip.bench.timing import take_turns
from fastclip.bench.workloads import SMOKE, WORKLOADS

from ..phases import PhaseSetting, bytes_moved, checked_phase, settings
from .clip_times import MANY_4096, SMOKE_WORKLOAD
from .clocks import DeviceClocks

_WORKLOADS = (SMOKE_WORKLOAD,) if SMOKE else (WORKLOADS["gpt2_124m"], MANY_4096)
HEADER = ["workload", "scaled", "clipped", "torch, ms", "fastclip, ms", "ratio", "GB, torch / fastclip"]


def measure(setting: PhaseSetting, clocks: DeviceClocks, repeats: int) -> list[str]:
    """Return the cells of one row; the first step is checked before anything is timed."""
    phase = checked_phase(setting, torch.device(clocks.name))
    calls = (phase.torch_call, phase.fastclip_call)
    theirs, ours = (t.median for t in take_turns(calls, phase.prepare, clock=clocks.seconds, rounds=repeats))
    moved = " / ".join(
        f"{bytes_moved(p, setting.nbytes) / 1e9:.2f}" for p in (setting.torch_passes, setting.fastclip_passes)
    )
    yes = ["yes" if flag else "" for flag in (setting.scaled, setting.clipped)]
    name = f"{setting.workload.name}, {setting.dtype}, {setting.optimizer}"
    return [name, *yes, f"{theirs * 1e3:.3f}", f"{ours * 1e3:.3f}", f"{theirs / ours:.2f}x", moved]


def measure_all(clocks: DeviceClocks, repeats: int) -> list[list[str]]:
    """Return the cells of every row."""
    return [measure(setting, clocks, repeats) for setting in settings(_WORKLOADS)]
