# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of tests/helpers/ranks.py execute for policies."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastclip
from fastclip.policies import AdaGC, SpikeSkip, TrailingPercentile, ZClip

POLICIES = {
    "zclip": lambda: ZClip(warmup_steps=5, max_grad_norm=None),
    "percentile": lambda: TrailingPercentile(80, 20, 5),
    "adagc": lambda: AdaGC(warmup_steps=10),
    "spike_skip": lambda: SpikeSkip(window=20, minimum=5),
}
# The second has a row on one rank only; the third is plain.
LAYOUTS = [[Shard(0)], [Shard(0)], None, [Replicate()], [Shard(1)]]
SHAPES = [(6, 3), (1, 4), (7,), (5,), (2, 8)]


def limits(kind: str, way: str, sharded: bool = True) -> list[list[float]]:
    """For each step the limits, whether it was skipped, and the norms of what the clip has left.

    Some steps hold NaN, sharded on one rank only.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if sharded else None

    def place(value, placements):
        return value if mesh is None or placements is None else distribute_tensor(value, mesh, placements)

    params = [nn.Parameter(place(torch.zeros(s), p)) for s, p in zip(SHAPES, LAYOUTS, strict=True)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    policy = POLICIES[kind]()
    handle = fastclip.attach(optimizer, policy) if way == "attach" else None
    generator = torch.Generator().manual_seed(1)
    results = []
    for step in range(40):
        size = (1 + 0.1 * torch.rand((), generator=generator).item()) * (30 if step % 9 == 8 else 1)
        grads = [torch.randn(s, generator=generator) * size for s in SHAPES]
        if step in (0, 12):
            grads[0][-1, 0] = math.nan
        for p, g, placements in zip(params, grads, LAYOUTS, strict=True):
            p.grad = place(g, placements)
        policy.observe_loss(float(size))
        if handle is not None:
            optimizer.step()
            found = handle.last_step_applied is False
        else:
            nonfinite = "zero" if way == "zero" else "skip"
            groups = [1, 0, 0, 1, 0] if way == "groups" else None
            found = bool(fastclip.clip_(params, policy, nonfinite=nonfinite, groups=groups).found_inf)
        left = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params]
        norms = [g.double().norm().nan_to_num(-1.0).item() for g in left]
        # Rows of shards stand by layout; their limits are returned as one sorted list.
        results.append([*sorted(policy.threshold.tolist()), float(found), *norms])
    return results


def stages(split: bool = True) -> list[list[float]]:
    """Each rank holds one of two stages of a model; the limits are those of the whole."""
    world = dist.get_world_size() if split else 1
    params = [nn.Parameter(torch.zeros(3, i + 1)) for i in range(2)]
    mine = params[dist.get_rank() :: world] if split else params
    policy = ZClip(warmup_steps=5)
    generator = torch.Generator().manual_seed(2)
    results = []
    for step in range(30):
        for p in params:
            p.grad = torch.rand(p.shape, generator=generator) * (20 if step == 20 else 0.1)
        group = dist.group.WORLD if split else None
        total_norm = fastclip.clip_grad_norm_(mine, policy, process_group=group)
        results.append([total_norm.item(), policy.threshold.item()])
    return results
