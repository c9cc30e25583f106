# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate with its clipping served by fastclip, held against Accelerate alone; its loops watched."""

import inspect
import math
import os
from unittest import mock

import pytest
import torch
from torch import nn

import fastclip
from fastclip.monitor.sinks import read_log
from helpers.ranks import Ranks

pytest.importorskip("accelerate", reason="Accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from fastclip.integrations.accelerate import AcceleratorMonitor, patch_accelerator
from helpers import rank_jobs_accelerate

HAS_FSDP2 = "fsdp_version" in inspect.signature(FullyShardedDataParallelPlugin).parameters


@pytest.fixture(autouse=True)
def nothing_left_behind():
    with mock.patch.dict(os.environ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(*, scaled=False, fused=True, mixed_precision="no", accumulated=2, seed=0):
    """An accelerator with model, optimizer, loader and scheduler; `scaled`: float16 as on a GPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulated
    )
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(6, generator=generator), torch.randint(3, (), generator=generator)) for _ in range(96)
    ]
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    return accelerator, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(things, *, max_norm=0.2, monitor=None, clip_value=None, nan_at=(), start=0, stop=12):
    """Returns losses of the batches and norms of the steps."""
    accelerator, model, optimizer, loader, scheduler = things
    losses, norms = [], []
    for number, (inputs, labels) in enumerate(loader):
        if not start <= number < stop:
            continue
        if number in nan_at:
            inputs = inputs.clone()
            inputs[0, 0] = math.nan
        with accelerator.accumulate(model):
            if monitor is not None:
                monitor.batch(inputs=inputs, labels=labels, sample_ids=range(8 * number, 8 * number + 8))
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
            losses.append(loss.item())
            if monitor is not None:
                monitor.loss(loss)
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip_value is not None:
                accelerator.clip_grad_value_(model.parameters(), clip_value)
            elif accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, norms


def parameters_of(things) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in things[1].parameters()])


CASES = {
    "plain": {},
    "bf16": dict(mixed_precision="bf16"),
    "fp16": dict(scaled=True),
    "fp16_not_fused": dict(scaled=True, fused=False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["patch", "patch_torch", "monitor", "by_value"])
def test_losses_and_norms_match_accelerate_alone(case, way):
    options = CASES[case]
    clip_value = 0.01 if way == "by_value" else None
    expected = prepared(**options)
    expected_losses, expected_norms = train(expected, clip_value=clip_value)
    things = prepared(**options)
    before = dict(vars(things[0]))
    monitor = undo = None
    if way == "monitor":
        monitor = AcceleratorMonitor(*things[:3], max_norm=0.2, scheduler=things[4])
        undo = monitor.close
    else:
        undo = (fastclip.patch_torch() if way == "patch_torch" else patch_accelerator(things[0])).undo
    with mock.patch("torch.nn.utils.clip_grad._get_total_norm", side_effect=AssertionError) as torchs:
        if way == "patch_torch":
            torchs.side_effect = fastclip.get_total_norm
        losses, norms = train(things, clip_value=clip_value, monitor=monitor)
    undo()
    # Norms are summed in another order, and a clip within the optimizer's kernel rounds once less.
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    torch.testing.assert_close(parameters_of(things), parameters_of(expected), rtol=1e-4, atol=1e-5)
    assert {k: v for k, v in vars(things[0]).items() if k in before} == before
    assert not {"clip_grad_norm_", "clip_grad_value_", "backward"} & set(vars(things[0]))
    if monitor is None:
        return
    records = list(monitor.records)
    assert [r.step for r in records] == list(range(6)) and all(r.micro_batches == 2 for r in records)
    assert [r.total_norm for r in records] == pytest.approx(norms, rel=1e-6)
    assert [r.loss for r in records] == pytest.approx([sum(losses[i : i + 2]) / 2 for i in range(0, 12, 2)])
    assert [r.lr[0] for r in records] == pytest.approx([0.01 * 0.9**step for step in range(6)])
    assert all(r.applied and r.clipped for r in records)
    scales = [r.loss_scale for r in records]
    assert scales == ([2.0**10] * 3 + [2.0**11] * 3 if "fp16" in case else [None] * 6)
    assert fastclip.optim.handle_of(things[2].optimizer) is None


@pytest.mark.parametrize("options", [{}, dict(scaled=True), dict(scaled=True, fused=False)])
def test_batch_with_nan_is_skipped_and_named(options, tmp_path):
    things = prepared(**options)
    monitor = AcceleratorMonitor(*things[:3], max_norm=0.2, log_dir=str(tmp_path))
    train(things, monitor=monitor, nan_at=(5,))
    monitor.close()
    assert parameters_of(things).isfinite().all()
    bad = monitor.records[2]
    assert bad.applied is False and bad.nan_count > 0 and math.isnan(bad.total_norm)
    assert bad.sample_ids == list(range(32, 48))
    assert bad.worst[0]["name"] == "0.weight" and bad.worst[0]["nan_count"] == 96  # those with most first
    assert [r.applied for r in monitor.records] == [True, True, False, True, True, True]
    [written] = read_log(str(tmp_path)).records.values()
    assert len(written) == 6
    if options:
        assert monitor.records[3].loss_scale == 2.0**9 and things[0].scaler.get_scale() == 2.0**10


def test_monitor_is_part_of_a_saved_state(tmp_path):
    def run(start, load):
        things = prepared()
        monitor = AcceleratorMonitor(*things[:3], max_norm=fastclip.policies.TrailingPercentile(50, 4, 2))
        things[0].register_for_checkpointing(monitor)
        if load:
            things[0].load_state(str(tmp_path))
        train(
            things, max_norm=math.inf, monitor=monitor, start=start, stop=6 if not load and not start else 12
        )
        return things, monitor

    things, monitor = run(0, False)
    things[0].save_state(str(tmp_path))
    train(things, max_norm=math.inf, monitor=monitor, start=6)
    expected = list(monitor.records)
    resumed, monitor = run(6, True)
    assert torch.equal(parameters_of(resumed), parameters_of(things))
    records = list(monitor.records)
    numbers = ("step", "loss", "total_norm", "max_norm", "clip_coef", "lr", "sample_ids", "skipped_steps")
    for name in numbers:
        assert [getattr(r, name) for r in records] == [getattr(r, name) for r in expected[3:]], name


def test_clip_grad_norm_between_batches_and_without_a_step():
    things = prepared(accumulated=1)
    accelerator, model, optimizer, loader, _ = things
    batches = iter(loader)
    with patch_accelerator(accelerator):
        pass
    monitor = AcceleratorMonitor(accelerator, model, optimizer, max_norm=0.2)

    def backward():
        inputs, labels = next(batches)
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    norm = backward()
    accelerator.gradient_state._set_sync_gradients(False)
    assert float(accelerator.clip_grad_norm_(model.parameters(), 0.2)) == pytest.approx(norm, rel=1e-6)
    accelerator.gradient_state._set_sync_gradients(True)
    assert float(accelerator.clip_grad_norm_(model.parameters(), math.inf)) == pytest.approx(norm, rel=1e-6)
    later = backward()  # no step was made: the gradients are those of both batches now
    optimizer.step()
    monitor.batch(0)
    assert monitor.records[-1].total_norm == pytest.approx(later, rel=1e-6)

    with pytest.raises(ValueError, match="expected max_norm to be 0.2 as for the attached optimizer"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match="norm_type to be 2.0 as for the attached optimizer, but got 1"):
        accelerator.clip_grad_norm_(model.parameters(), 0.2, norm_type=1)
    monitor.close()
    observer = AcceleratorMonitor(accelerator, model, optimizer)
    with pytest.raises(ValueError, match="attached without max_norm, to observe only"):
        accelerator.clip_grad_norm_(model.parameters(), 0.2)
    observer.close()


def test_two_optimizers_with_one_scaler_are_clipped_separately():
    accelerator, model, optimizer, loader, _ = prepared(scaled=True, accumulated=1)
    other = nn.Linear(3, 1)
    other, second = accelerator.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    patch = patch_accelerator(accelerator)
    inputs, labels = next(iter(loader))
    outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), labels) + other(outputs).float().square().mean()
    accelerator.backward(loss)
    for part in (model, other):
        grads = [p.grad.double() / 2**10 for p in part.parameters()]
        expected = math.sqrt(sum(float(g.square().sum()) for g in grads))
        assert float(accelerator.clip_grad_norm_(part.parameters(), 0.1)) == pytest.approx(expected, rel=1e-5)
        after = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
        assert float(after) == pytest.approx(min(0.1, expected), rel=1e-4)
    optimizer.step()
    second.step()
    patch.undo()


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"])
def test_backends_that_clip_themselves_raise(monkeypatch, kind):
    accelerator, model, optimizer, *_ = prepared()
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType[kind]))
    monkeypatch.setattr(Accelerator, "is_fsdp2", property(lambda self: False), raising=False)
    before = set(vars(accelerator))
    for function in (patch_accelerator, lambda a: AcceleratorMonitor(a, model, optimizer, max_norm=1.0)):
        with pytest.raises(RuntimeError, match="fastclip does not work with .*" + kind[:4]):
            function(accelerator)
    assert set(vars(accelerator)) == before


def test_mistaken_arguments_raise_and_change_nothing():
    accelerator, model, optimizer, *_ = prepared()
    before = set(vars(accelerator))
    with pytest.raises(TypeError, match="expected accelerator to be an accelerate.Accelerator, but got int"):
        patch_accelerator(3)
    with pytest.raises(ValueError, match="max_norm"):
        AcceleratorMonitor(accelerator, model, optimizer, max_norm=-1.0)
    optimizer.optimizer.__class__ = type("Lomo", (torch.optim.AdamW,), {})
    with pytest.raises(TypeError, match="Lomo updates the parameters in the backward pass"):
        AcceleratorMonitor(accelerator, model, optimizer, max_norm=1.0)
    assert set(vars(accelerator)) == before
    assert fastclip.optim.handle_of(optimizer.optimizer) is None


def test_two_processes_with_ddp_and_with_fsdp2(tmp_path):
    ranks = Ranks(2)
    try:
        for kind in ("ddp", "fsdp2") if HAS_FSDP2 else ("ddp",):
            first, second = ranks.run(rank_jobs_accelerate.train, kind, str(tmp_path / kind))
            assert first == second and len(first) == 4
    finally:
        ranks.stop()
