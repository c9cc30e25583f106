# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of tests/ranks.py execute. Every job returns plain numbers that a test compares."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastclip

INF, NAN = math.inf, math.nan


def whole_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same on every rank: uneven for two and four ranks, with fewer rows than ranks, and empty."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(7, 6), (1, 5), (8, 3), (4, 4), (33,), (9, 2)]
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def parameter_of(value: Tensor, mesh, placements) -> nn.Parameter:
    """A DTensor parameter whose gradient is `value`; Partial: the ranks of a mesh dimension share it out."""
    plain = [Replicate() if isinstance(p, Partial) else p for p in placements]
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, plain))
    grad = distribute_tensor(value.clone(), mesh, plain)
    if any(isinstance(p, Partial) for p in placements):
        local = grad.to_local()
        for dim, placement in enumerate(placements):
            if isinstance(placement, Partial):
                local = local * (0.75 if mesh.get_local_rank(dim) == 0 else 0.25 / (mesh.size(dim) - 1))
        grad = DTensor.from_local(local, mesh, placements, shape=value.shape, stride=value.stride())
    parameter.grad = grad
    return parameter


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


LAYOUTS_1D = {
    "shard": [[Shard(0)]] * 6,
    "shard_1": [[Shard(1)], [Shard(1)], [Shard(0)], [Shard(1)], [Shard(0)], [Shard(1)]],
    "replicate": [[Replicate()]] * 6,
    "partial": [[Partial()], [Shard(0)], [Partial()], [Replicate()], [Partial()], [Shard(1)]],
    "mixed": [[Shard(0)], None, [Replicate()], [Shard(1)], None, [Shard(0)]],
}
LAYOUTS_2D = {
    "fsdp_tp": [
        [Shard(0), Shard(1)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
        None,
    ],
    "hsdp": [[Replicate(), Shard(0)]] * 6,
    "partial": [
        [Partial(), Shard(0)],
        [Shard(0), Partial()],
        [Partial(), Partial()],
        [Replicate(), Partial()],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ],
}


def make(layouts, mesh, values) -> list[nn.Parameter]:
    made = []
    for value, placements in zip(values, layouts, strict=True):
        if placements is None:
            parameter = nn.Parameter(torch.zeros_like(value))
            parameter.grad = value.clone()
        else:
            parameter = parameter_of(value, mesh, placements)
        made.append(parameter)
    return made


def mesh_of(shape: tuple[int, ...]):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def clip_layouts(shape: tuple[int, ...], norm_types: list[float]) -> list[tuple]:
    """Norm before, gradients after, of every layout and order, against those of the whole gradients."""
    mesh = mesh_of(shape)
    results = []
    for name, layouts in (LAYOUTS_1D if len(shape) == 1 else LAYOUTS_2D).items():
        for norm_type in norm_types:
            values = whole_gradients()
            gold = [nn.Parameter(torch.zeros_like(v)) for v in values]
            for p, v in zip(gold, values, strict=True):
                p.grad = v.clone()
            parameters = make(layouts, mesh, values)
            versions = [p.grad._version for p in parameters]
            expected = torch.nn.utils.clip_grad_norm_(gold, 0.1, norm_type)
            total_norm = fastclip.clip_grad_norm_(parameters, 0.1, norm_type)
            assert type(total_norm) is Tensor, type(total_norm)
            torch.testing.assert_close(total_norm, expected, rtol=1e-6, atol=0)
            for p, q in zip(parameters, gold, strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-9)
            if expected > 0.1:
                assert all(p.grad._version > v for p, v in zip(parameters, versions, strict=True)), name
            results.append((name, norm_type, total_norm.item()))
    return results
