# SPDX-License-Identifier: BSD-3-Clause
"""A small training for tests of the monitor: its model, its batches and its loop."""

import math

import torch
from torch import nn


def make(seed: int = 0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=options.get("fused", True))


def batches(count: int, samples: int = 8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def run(monitor, model, optimizer, steps, scale_at=(), nan_at=(), start=0):
    """Make steps; at some of them the loss is multiplied by 1000, or the batch holds NaN."""
    for step, (inputs, labels) in enumerate(batches(start + steps)):
        if step < start:
            continue
        if step in nan_at:
            inputs[0, 0] = math.nan
        monitor.batch(inputs, labels)
        loss = loss_of(model, (inputs, labels))
        if step in scale_at:
            loss = loss * 1000
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
