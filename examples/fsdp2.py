# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 with fastclip: torchrun --standalone --nproc-per-node=2 examples/fsdp2.py.

A small model, sharded over all processes, on GPUs if there are any (NCCL), otherwise on the CPU (gloo). The
norm is that of the whole model and equal on every rank. Halfway through, one rank gets a batch with a NaN.
FSDP averages the gradients before they are clipped, so that the shards of all ranks hold NaN: the step is
skipped on every rank, and each rank can name parameters. The monitor reports on every rank whose batch it
was, and on that rank also the samples.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastclip


def make_model(device: str) -> nn.Module:
    """Shard each block separately, then the remaining parameters."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 with fastclip; start it with torchrun")
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())

    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    monitor = fastclip.Monitor(model, optimizer, max_norm=1.0)
    handle = monitor.handle  # the optimizer is attached

    generator = torch.Generator().manual_seed(rank)  # different batches on each rank
    for step in range(steps):
        inputs = torch.randn(32, 16, generator=generator)
        if step == steps // 2 and rank == dist.get_world_size() - 1:
            inputs[3, 5] = float("nan")
        inputs = inputs.to(device)
        monitor.batch(inputs, sample_ids=[f"rank{rank}/{32 * step + i}" for i in range(len(inputs))])
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        monitor.loss(loss)
        loss.backward()
        optimizer.step()  # clips by the norm of all ranks, or skips the step on all of them
        optimizer.zero_grad()
        if rank == 0:
            stats = handle.stats
            print(f"step {step}: loss {loss.item():.4f} on rank 0, total_norm {stats.total_norm.item():.4f}")
            if not handle.last_step_applied:
                worst = ", ".join(tensor.name for tensor in stats.worst(2))
                ranks = ", ".join(map(str, stats.nonfinite_ranks))
                print(f"  skipped: NaN or Inf in {worst} and others, on rank {ranks}", flush=True)
    for finding in monitor.diagnose().findings[:1]:  # the likeliest cause
        print(f"diagnosis on rank {rank}: {finding}", flush=True)
    monitor.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
