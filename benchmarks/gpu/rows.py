# SPDX-License-Identifier: BSD-3-Clause
"""The workloads on a GPU, each against torch in the same run, and what they must reach."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fastclip
from fastclip.backends import native, triton
from fastclip.bench.workloads import SMOKE, Shapes, gpt2, llama

from .timing import Device, copy_bandwidth, in_turns

UNCLIPPED, CLIPPED = 1e9, 1e-3


@dataclass(frozen=True)
class Workload:
    """Shapes and dtype, and the least ratios against torch foreach: unclipped, clipped, end to end."""

    name: str
    shapes: Shapes
    dtype: torch.dtype
    unclipped: float | None = None
    clipped: float | None = None
    end_to_end: float | None = None
    bandwidth: float | None = None  # fraction of the copy bandwidth, unclipped


def workloads() -> list[Workload]:
    """1e9 elements in a language model's shapes, and in one piece; a small model; many tiny gradients."""
    bfloat16, float32 = torch.bfloat16, torch.float32
    if SMOKE:
        return [Workload("smoke", ((1000,), (70_000,), (0,)), bfloat16, 2.7, 1.15, 8, 0.9)]
    return [
        Workload("llama_1b", llama(32000, 2048, 256, 5632, 22), bfloat16, 2.7, 1.15, bandwidth=0.9),
        Workload("one_huge_1e9", ((1_000_000_000,),), bfloat16, 2.7, 1.15, bandwidth=0.9),
        Workload("llama_1b", llama(32000, 2048, 256, 5632, 22), float32),
        Workload("gpt2_124m", gpt2(50257, 1024, 768, 12), bfloat16),
        Workload("gpt2_124m", gpt2(50257, 1024, 768, 12), float32),
        Workload("many_tiny 5000 x 64", ((64,),) * 5000, float32, end_to_end=8),
        Workload("2000 x 4096", ((4096,),) * 2000, bfloat16),
        Workload("150 x 4096", ((4096,),) * 150, float32),
    ]


@dataclass
class Row:
    """Seconds on the device (the host's own time hidden), end to end, and of the host alone."""

    workload: Workload
    nbytes: int
    copy_bandwidth: float
    unclipped: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)
    end_to_end: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    norm_error: float = 0.0

    def ratio(self, times: dict[str, float], other: str = "torch foreach") -> float:
        return times[other] / times["fastclip"]

    @property
    def bandwidth_fraction(self) -> float:
        """Bytes read once, over the copy bandwidth."""
        return self.nbytes / self.unclipped["fastclip"] / self.copy_bandwidth

    def verdicts(self) -> Iterator[tuple[str, float, float]]:
        """What, how much was reached, and how much was to be reached."""
        bars = self.workload
        if bars.unclipped:
            yield "unclipped against torch foreach", self.ratio(self.unclipped), bars.unclipped
        if bars.clipped:
            yield "clipped against torch foreach", self.ratio(self.clipped), bars.clipped
        if bars.end_to_end:
            yield "end to end against torch foreach", self.ratio(self.end_to_end), bars.end_to_end
        if bars.bandwidth:
            yield "fraction of the copy bandwidth", self.bandwidth_fraction, bars.bandwidth


Clip = Callable[[list[torch.nn.Parameter], float], object]


def _transformer_engine() -> Clip:
    """Norm and scale by its multi-tensor kernels, as its users call them."""
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")

    def clip(parameters: list[torch.nn.Parameter], max_norm: float) -> object:
        grads = [p.grad for p in parameters]
        flag = torch.zeros(1, dtype=torch.int, device=grads[0].device)
        norm, _ = optimizers.multi_tensor_applier(optimizers.multi_tensor_l2norm, flag, [grads], False)
        coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        optimizers.multi_tensor_applier(optimizers.multi_tensor_scale_tensor, flag, [grads, grads], coef)
        return norm

    return clip


def _apex() -> Clip:
    return importlib.import_module("apex.contrib.clip_grad").clip_grad_norm_


def _by_triton(parameters: list[torch.nn.Parameter], max_norm: float) -> object:
    with fastclip.backends.use("triton"):
        return fastclip.clip_grad_norm_(parameters, max_norm)


def providers(count: int, device: Device) -> dict[str, Clip]:
    """fastclip, torch's ways, and the peers that can be imported here."""
    torch_clip = torch.nn.utils.clip_grad_norm_
    found: dict[str, Clip] = {
        "fastclip": lambda parameters, max_norm: fastclip.clip_grad_norm_(parameters, max_norm),
        "fastclip, Triton": _by_triton,
        "torch foreach": lambda parameters, max_norm: torch_clip(parameters, max_norm, foreach=True),
    }
    if count <= 300:  # it unrolls the list
        torch._dynamo.reset()
        # At smoke size the path through the tracer is what is checked, not the code it generates.
        found["torch.compile"] = torch.compile(torch_clip, backend="eager" if SMOKE else "inductor")
    if triton.unavailable(torch.device(device.name)) is not None:
        del found["fastclip, Triton"]
    for name, make in (("TransformerEngine", _transformer_engine), ("apex", _apex)):
        try:
            found[name] = make()
        except ImportError:
            continue
    return found


def make_parameters(workload: Workload, device: Device) -> list[torch.nn.Parameter]:
    """Parameters whose gradients are all there is of them: only these take memory."""
    made = []
    for shape in workload.shapes:
        parameter = torch.nn.Parameter(torch.empty(shape, dtype=workload.dtype, device=device.name))
        parameter.grad = torch.empty_like(parameter).normal_(std=0.01)
        made.append(parameter)
    return made


def exact_norm(grads: list[Tensor]) -> float:
    squares = [piece.double().square().sum() for g in grads for piece in g.reshape(-1).split(1 << 26)]
    return torch.stack(squares).sum().sqrt().item()


def measure(workload: Workload, device: Device, repeats: int) -> Row:
    """All times of one workload. Norms are held against float64 before anything is timed."""
    torch.manual_seed(0)
    parameters = make_parameters(workload, device)
    grads = [p.grad for p in parameters if p.grad is not None]
    nbytes = sum(g.nbytes for g in grads)
    row = Row(workload, nbytes, copy_bandwidth(device, max(nbytes, 1 << 16), repeats))
    exact = exact_norm(grads)
    clips = providers(len(grads), device)
    for name, clip in list(clips.items()):
        norm = float(clip(parameters, UNCLIPPED))  # type: ignore[arg-type]
        error = abs(norm / exact - 1)
        if name == "fastclip":
            row.norm_error = error
            assert error < 1e-6, f"the norm is off by {error:.1e}"
        elif not error < 0.02:
            print(f"{name}: the norm is off by {error:.1e} and is not measured on {workload.name}")
            del clips[name]
    saved = [g.clone() for g in grads]

    def restore() -> None:
        torch._foreach_copy_(grads, saved)

    def nothing() -> None:
        pass

    names = list(clips)
    calls = {
        max_norm: [lambda clip=clips[n], m=max_norm: clip(parameters, m) for n in names]
        for max_norm in (UNCLIPPED, CLIPPED)
    }
    timed = (
        (row.unclipped, device.kernel_seconds, UNCLIPPED, nothing),
        (row.clipped, device.kernel_seconds, CLIPPED, restore),
        (row.end_to_end, device.seconds, UNCLIPPED, nothing),
        (row.host, device.host_seconds, UNCLIPPED, nothing),
    )
    for target, clock, max_norm, prepare in timed:
        for call in calls[max_norm]:
            prepare()
            call()
        target.update(zip(names, in_turns(clock, calls[max_norm], prepare, repeats), strict=True))
    return row


def measure_ops(device: Device, repeats: int) -> dict[str, float]:
    """GB/s of the statistics pass and of a scale pass that writes, for comparing builds with one another."""
    size = 1 << 16 if SMOKE else 500_000_000
    grads = [torch.empty(size, dtype=torch.bfloat16, device=device.name).normal_()]
    half = torch.tensor([0.999], device=device.name)
    calls = [lambda: native.grad_stats(grads, 2.0), lambda: native.scale_(grads, half)]
    clip = [lambda: native.clip_(grads, 1e-9, 2.0, "propagate")]
    statistics, scale = in_turns(device.kernel_seconds, calls, lambda: None, repeats)
    small = [g[: size // 32] for g in grads]  # fits the L2 cache
    clip.append(lambda: native.clip_(small, 1e-9, 2.0, "propagate"))
    whole, cached = in_turns(device.kernel_seconds, clip, lambda: None, repeats)
    return {
        "statistics GB/s": 2 * size / statistics / 1e9,
        "scale GB/s": 4 * size / scale / 1e9,
        "clip ms": whole * 1e3,
        "clip of 1/32 ms": cached * 1e3,
    }
