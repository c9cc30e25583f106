# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of tests/helpers/ranks.py execute with Lightning."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fastclip.integrations.lightning import FastclipCallback


def data(rows: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, 8, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) * 3)


class Module(LightningModule):
    def __init__(self, sharded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.sharded = sharded

    def configure_model(self) -> None:
        if self.sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=not self.sharded)


def train(directory: str, strategy: str, poisoned: int | None = None) -> dict[str, Any]:
    """As torchrun would start it: the environment tells Lightning who it is.

    Args:
        poisoned: the sample that holds NaN, which stops the training.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    os.environ.update(zip(names, map(str, (rank, rank, 0, world, world)), strict=True))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test")
    dataset = data()
    if poisoned is not None:
        dataset.tensors[0][poisoned, 2] = torch.nan
    actions = {} if poisoned is None else {"bad_batch": "stop"}
    callback = FastclipCallback(max_norm=0.5, log_dir=os.path.join(directory, "log"), actions=actions)
    sharded = strategy == "fsdp2"
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        if sharded
        else strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
        default_root_dir=directory,
    )
    module = Module(sharded)
    sampler = DistributedSampler(dataset, world, rank, shuffle=False)
    trainer.fit(module, DataLoader(dataset, batch_size=4, sampler=sampler))
    trainer.save_checkpoint(os.path.join(directory, "end.ckpt"))
    records = callback.monitor.records
    return {
        "norms": [record.total_norm for record in records],
        "losses": [record.loss for record in records],
        "applied": [record.applied for record in records],
        "rank_losses": [record.ranks.get("loss") for record in records],
        "events": [(event.step, event.kind, event.rank) for event in callback.monitor.events],
        "logged": float(trainer.callback_metrics["fastclip/total_norm"]),
        "steps": trainer.global_step,
        "parameters": [_whole(parameter) for parameter in module.parameters()],
    }


def _whole(parameter: torch.Tensor) -> list[float]:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().flatten().tolist()
