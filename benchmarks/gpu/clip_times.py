# SPDX-License-Identifier: BSD-3-Clause
"""Clipping on a GPU: the cases, their bars, and the times of all implementations in turns."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fastclip.backends import native
from fastclip.bench import parity
from fastclip.bench.timing import do_nothing, take_turns
from fastclip.bench.workloads import SMOKE, WORKLOADS, RestorableGradients, Workload

from .clocks import DeviceClocks, copy_bandwidth
from .gpu_implementations import implementations

UNCLIPPED, CLIPPED = 1e9, 1e-3
_MOST_NORM_ERROR = 0.02  # of the other implementations, which sum in the gradients' dtype or in float32

SMOKE_WORKLOAD = Workload("smoke", ((1000,), (70_000,), (0,)))
MANY_4096 = Workload("2000 x 4096", ((4096,),) * 2000)


@dataclass(frozen=True)
class GpuCase:
    """A workload in one dtype, and its bars.

    Attributes:
        unclipped, clipped, end_to_end: the least ratios of torch foreach's time to fastclip's.
        bandwidth: the least share of the copy bandwidth when unclipped.
    """

    workload: Workload
    dtype: str
    unclipped: float | None = None
    clipped: float | None = None
    end_to_end: float | None = None
    bandwidth: float | None = None


def cases() -> list[GpuCase]:
    """Return the cases: 1e9 elements, in many tensors and in one; a small model; small tensors."""
    if SMOKE:
        return [GpuCase(SMOKE_WORKLOAD, "bfloat16", 2.7, 1.15, 8, 0.9)]
    llama, gpt2 = WORKLOADS["llama_1b"], WORKLOADS["gpt2_124m"]
    huge = Workload("one_huge_1e9", ((1_000_000_000,),))
    return [
        GpuCase(llama, "bfloat16", 2.7, 1.15, bandwidth=0.9),
        GpuCase(huge, "bfloat16", 2.7, 1.15, bandwidth=0.9),
        GpuCase(llama, "float32"),
        GpuCase(gpt2, "bfloat16"),
        GpuCase(gpt2, "float32"),
        GpuCase(Workload("many_tiny 5000 x 64", ((64,),) * 5000), "float32", end_to_end=8),
        GpuCase(MANY_4096, "bfloat16"),
        GpuCase(Workload("150 x 4096", ((4096,),) * 150), "float32"),
    ]


@dataclass
class GpuClipRow:
    """Median seconds by implementation: of the device alone, end to end, and of the host alone."""

    case: GpuCase
    copy_bandwidth: float
    norm_error: float = 0.0
    unclipped: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)
    end_to_end: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the gradients."""
        return self.case.workload.nbytes(self.case.dtype)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of fastclip when nothing is clipped, which reads each byte once."""
        return self.nbytes / self.unclipped["fastclip"]

    @property
    def bandwidth_fraction(self) -> float:
        """The share of the copy bandwidth."""
        return self.bandwidth / self.copy_bandwidth

    def checks(self) -> Iterator[tuple[str, float, float]]:
        """Yield the name of each bar, the figure, and the bar."""
        for times, what, bar in (
            (self.unclipped, "unclipped", self.case.unclipped),
            (self.clipped, "clipped", self.case.clipped),
            (self.end_to_end, "end to end", self.case.end_to_end),
        ):
            if bar:
                yield f"{what} against torch foreach", times["torch foreach"] / times["fastclip"], bar
        if self.case.bandwidth:
            yield "fraction of the copy bandwidth", self.bandwidth_fraction, self.case.bandwidth


def measure(case: GpuCase, clocks: DeviceClocks, repeats: int) -> GpuClipRow:
    """Return all times of one case; norms are checked against float64 before anything is timed."""
    device = torch.device(clocks.name)
    gradients = RestorableGradients.of(case.workload, case.dtype, device)
    parameters = gradients.parameters
    row = GpuClipRow(case, copy_bandwidth(clocks, max(gradients.nbytes, 1 << 16), repeats))
    exact = parity.exact_norm(gradients.saved)
    clips = implementations(len(parameters), device)
    for name, clip in list(clips.items()):
        error = abs(float(clip(parameters, UNCLIPPED)) / exact - 1)  # type: ignore[arg-type]
        if name == "fastclip":
            row.norm_error = error
            assert error < parity.NORM_ERROR, f"the norm is off by {error:.1e}"
        elif not error < _MOST_NORM_ERROR:
            print(f"{name}: the norm is off by {error:.1e} and is not measured on {case.workload.name}")
            del clips[name]
    for target, clock, max_norm, prepare in (
        (row.unclipped, clocks.kernel_seconds, UNCLIPPED, do_nothing),
        (row.clipped, clocks.kernel_seconds, CLIPPED, gradients.restore),
        (row.end_to_end, clocks.seconds, UNCLIPPED, do_nothing),
        (row.host, clocks.host_seconds, UNCLIPPED, do_nothing),
    ):
        calls = [functools.partial(clip, parameters, max_norm) for clip in clips.values()]
        for call in calls:
            prepare()
            call()
        medians = [t.median for t in take_turns(calls, prepare, clock=clock, rounds=repeats)]
        target.update(zip(clips, medians, strict=True))
    return row


def measure_ops(clocks: DeviceClocks, repeats: int) -> dict[str, float]:
    """Return figures for comparing builds: GB/s of the statistics pass and of a scale pass that writes."""
    size = 1 << 16 if SMOKE else 500_000_000
    grads = [torch.empty(size, dtype=torch.bfloat16, device=clocks.name).normal_()]
    half = torch.tensor([0.999], device=clocks.name)
    calls = [lambda: native.grad_stats(grads, 2.0), lambda: native.scale_(grads, half)]
    clips = [lambda: native.clip_(grads, 1e-9, 2.0, "propagate")]
    statistics, scale = (t.median for t in take_turns(calls, clock=clocks.kernel_seconds, rounds=repeats))
    small = [g[: size // 32] for g in grads]  # fits in the L2 cache
    clips.append(lambda: native.clip_(small, 1e-9, 2.0, "propagate"))
    whole, cached = (t.median for t in take_turns(clips, clock=clocks.kernel_seconds, rounds=repeats))
    return {
        "statistics GB/s": 2 * size / statistics / 1e9,
        "scale GB/s": 4 * size / scale / 1e9,
        "clip ms": whole * 1e3,
        "clip of 1/32 ms": cached * 1e3,
    }
