# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of tests/helpers/ranks.py execute with Accelerate."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn

from fastclip.integrations.accelerate import AcceleratorMonitor


def train(kind: str, directory: str) -> list[float]:
    """The norms of four steps, of the whole gradients, checked against those of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if kind == "fsdp2":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model, alone = (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    monitor = AcceleratorMonitor(accelerator, model, optimizer, max_norm=0.2, log_dir=directory)
    norms = []
    for _ in range(4):
        batch = torch.randn(8, 6)
        monitor.batch(batch[4 * rank : 4 * rank + 4])
        loss = model(batch[4 * rank : 4 * rank + 4]).square().mean()
        monitor.loss(loss)
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
        alone(batch).square().mean().backward()
        expected = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.2))
        assert abs(norms[-1] - expected) < 1e-5 * expected, (norms[-1], expected)
        expected_optimizer.step()
        expected_optimizer.zero_grad()
    assert [r.total_norm for r in monitor.records] == norms
    assert monitor.records[0].worst[0]["name"] in dict(alone.named_parameters())
    assert len(monitor.records[0].ranks["loss"]) == world
    monitor.close()
    return norms
