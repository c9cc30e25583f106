# SPDX-License-Identifier: BSD-3-Clause
"""The monitor on a CUDA device: nothing waits, the numbers come late and are those of the CPU."""

import math

import pytest
import torch
from torch import nn

import fastclip
from fastclip.monitor import Monitor

pytestmark = pytest.mark.gpu


def train(device: str, steps: int, strict: bool = False, nan_at: int | None = None, **options):
    """A small training; with `strict`, whatever waits for the device in it is an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(128, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    monitor = Monitor(model, optimizer, max_norm=0.5, activations="leaf", **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        tokens = torch.randint(50, (16, 8), generator=generator).to(device)
        labels = torch.randint(3, (16,), generator=generator).to(device)
        if strict and step == 3:
            torch.cuda.set_sync_debug_mode("error")
        try:
            monitor.batch(tokens=tokens, labels=labels, sample_ids=labels)
            loss = nn.functional.cross_entropy(model(tokens), labels)
            if step == nan_at:
                loss = loss * math.nan
            monitor.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            if strict and step == steps - 1:
                torch.cuda.set_sync_debug_mode("default")
    late = len(monitor.records)
    torch.cuda.synchronize()
    monitor.close()
    return model, monitor, late


def test_monitor_does_not_synchronize_and_records_every_step():
    _, monitor, _ = train("cuda", 60, strict=True)
    assert [r.step for r in monitor.records] == list(range(60))


def test_records_on_a_gpu_are_those_of_the_cpu():
    _, on_gpu, _ = train("cuda", 40)
    _, on_cpu, _ = train("cpu", 40)
    for gpu, cpu in zip(on_gpu.records, on_cpu.records, strict=True):
        assert gpu.loss == pytest.approx(cpu.loss, rel=1e-3)
        assert gpu.total_norm == pytest.approx(cpu.total_norm, rel=1e-2)
        assert gpu.batch == cpu.batch and gpu.sample_ids == cpu.sample_ids
        assert {k: v for k, v in gpu.token_ids["0"].items()} == cpu.token_ids["0"]
        assert set(gpu.update_ratio) == set(cpu.update_ratio)


@pytest.mark.parametrize("kind", ["handle", "gate"])
def test_bad_step_is_skipped_on_the_device(kind):
    """And with the action "skip" those after it, until the host has seen it; then the training goes on."""
    options = {"actions": {"nonfinite": "skip"}} if kind == "gate" else {}
    model, monitor, _ = train("cuda", 30, strict=True, nan_at=20, **options)
    applied = [r.applied for r in monitor.records]
    assert not applied[20] and all(applied[:20]) and all(applied[26:])
    assert all(p.isfinite().all() for p in model.parameters())
    assert monitor.events[0].step == 20
    assert isinstance(monitor.handle, fastclip.Handle)
