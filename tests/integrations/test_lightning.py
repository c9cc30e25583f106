# SPDX-License-Identifier: BSD-3-Clause
"""FastclipCallback in Lightning's Trainer and in Fabric: the same training in every precision."""

import importlib
import math

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

import fastclip
from fastclip.integrations.lightning import FastclipCallback
from fastclip.monitor import sinks
from helpers import rank_jobs_lightning as jobs
from helpers.lightning_runs import (
    BATCHES,
    EXPECTED_WARNINGS,
    PACKAGES,
    Module,
    Steps,
    adamw,
    column,
    fit,
    halving,
    loader,
    mixed,
    network,
    parameters,
    trainer,
)
from helpers.ranks import Ranks

pytestmark = EXPECTED_WARNINGS


# Lightning's clipping takes torch's norm, in float32; the rounding of the last bit grows over ten steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def by_hand(clip, *, fused=False, scaler=None):
    """The losses of a loop in plain PyTorch, and the module."""
    net, losses = network(), []
    optimizer = adamw(net.parameters(), fused)
    scheduler = halving(optimizer)
    for batch in loader():
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = mse_loss(net(batch["inputs"]), batch["targets"])
        losses.append(loss.item())
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            clip(net.parameters(), 0.5)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    return losses, net


@pytest.mark.parametrize("package", PACKAGES)
def test_losses_match_a_loop_with_clip_grad_norm_bit_for_bit(package):
    lightning = importlib.import_module(PACKAGES[package])
    callback = importlib.import_module(f"fastclip.integrations.{package}").FastclipCallback(max_norm=0.5)
    module = type("Module", (Steps, lightning.LightningModule), {})()
    assert isinstance(callback, lightning.Callback)
    trainer(callback, kind=lightning.Trainer).fit(module, loader())
    losses, net = by_hand(fastclip.clip_grad_norm_)
    assert module.losses == losses == column(callback.monitor, "loss")
    assert all(map(torch.equal, module.net.parameters(), net.parameters()))
    assert all(record.clipped for record in callback.monitor.records)


@pytest.mark.parametrize("fused", [False, True])
def test_losses_match_the_clipping_of_lightning(fused):
    own, module = Module(fused), Module(fused)
    trainer(gradient_clip_val=0.5).fit(own, loader())
    fit(module)
    torch.testing.assert_close(module.losses, own.losses, **CLOSE)
    torch.testing.assert_close(parameters(module), parameters(own), **CLOSE)


def test_callback_without_max_norm_changes_nothing():
    own, module = Module(), Module()
    trainer().fit(own, loader())
    callback = FastclipCallback()
    (made := trainer(callback)).fit(module, loader())
    monitor = callback.monitor
    assert "fastclip/clip_coef" not in made.callback_metrics
    assert made.callback_metrics["fastclip/total_norm"] == monitor.records[-1].total_norm
    assert module.losses == own.losses
    assert all(map(torch.equal, parameters(module), parameters(own)))
    assert set(column(monitor, "clip_coef")) == {None}
    assert all(norm > 0 for norm in column(monitor, "total_norm"))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fastclip.GradScaler])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**19])  # the second overflows float16 in the first steps
def test_scaled_gradients_are_unscaled_once(fused, scaler, scale):
    made = scaler("cpu", init_scale=scale)
    module = Module(fused)
    monitor = fit(module, **mixed(made))
    norms = []

    def clip(params, max_norm):
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm).item())

    reference = torch.amp.GradScaler("cpu", init_scale=scale)
    losses, net = by_hand(clip, scaler=reference)
    overflows = [norm for norm in norms if not math.isfinite(norm)]
    assert bool(overflows) == (scale > 2**12)
    torch.testing.assert_close(module.losses, losses, rtol=1e-3, atol=1e-4)  # float16 under autocast
    torch.testing.assert_close(column(monitor, "loss"), module.losses, rtol=0, atol=0)
    for record, norm in zip(monitor.records, norms, strict=True):
        assert record.applied is math.isfinite(norm)
        if record.applied:
            assert record.total_norm == pytest.approx(norm, rel=1e-3)
    torch.testing.assert_close(parameters(module.net), parameters(net), rtol=1e-3, atol=1e-4)
    assert made.get_scale() == reference.get_scale()
    assert monitor.records[0].loss_scale == scale


def test_fused_optimizer_under_amp_trains_where_lightning_refuses_to_clip():
    for precision in (mixed(torch.amp.GradScaler("cpu")), {"precision": "bf16-mixed"}):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer(gradient_clip_val=0.5, **precision).fit(Module(fused=True), loader())
    fused, other = Module(fused=True), Module()
    fit(fused, **mixed(torch.amp.GradScaler("cpu", init_scale=1024.0)))
    trainer(gradient_clip_val=0.5, **mixed(torch.amp.GradScaler("cpu", init_scale=1024.0))).fit(
        other, loader()
    )
    torch.testing.assert_close(parameters(fused), parameters(other), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_needs_no_scaler(fused):
    own, module = Module(), Module(fused)
    trainer(gradient_clip_val=0.5, precision="bf16-mixed").fit(own, loader())
    monitor = fit(module, precision="bf16-mixed")
    torch.testing.assert_close(module.losses, own.losses, rtol=1e-2, atol=1e-3)  # bfloat16 under autocast
    assert set(column(monitor, "loss_scale")) == {None}


def test_policy_with_a_limit_for_each_gradient():
    monitor = fit(Module(), callback=FastclipCallback(fastclip.policies.AdaGC()))
    assert len(monitor.records) == BATCHES


def test_fabric_clips_with_fastclip_under_patch_torch():
    fabric = Fabric(accelerator="cpu")
    net = network()
    model, optimizer = fabric.setup(net, adamw(net.parameters(), False))
    fabric.backward(model(torch.ones(4, 8)).sum())
    grads = [p.grad.clone() for p in net.parameters()]
    expected = fastclip.get_total_norm(grads)
    with fastclip.patch_torch():
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        with pytest.raises(ValueError, match="max_norm"):  # torch takes it
            fabric.clip_gradients(model, optimizer, max_norm=-1.0)
    assert torch.equal(norm, expected) and norm > 0.5
    assert float(fastclip.get_total_norm([p.grad for p in net.parameters()])) == pytest.approx(0.5, rel=1e-5)


def test_fabric_with_a_fused_optimizer_under_amp_clips_only_if_attached():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fabric = Fabric(accelerator="cpu", plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)])
    net = network()
    before = parameters(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=True)
    handle = fastclip.attach(optimizer, max_norm=0.5, scaler=scaler)
    model, wrapped = fabric.setup(net, optimizer)
    fabric.backward(model(torch.ones(4, 8)).sum())
    with pytest.raises(NotImplementedError), fastclip.patch_torch():
        fabric.clip_gradients(model, wrapped, max_norm=0.5)
    wrapped.step()
    change = torch.cat([(p - q).flatten() for p, q in zip(net.parameters(), before, strict=True)])
    assert change.norm().item() == pytest.approx(0.5, rel=1e-3)
    assert 0.5 < handle.stats.total_norm < 100  # of true gradients: scaled ones are 1024 times as long


@pytest.fixture(scope="module")
def two():
    processes = Ranks(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same training on one process, with both ranks' batches in one."""
    module = jobs.Module()
    callback = FastclipCallback(max_norm=0.5)
    trainer(callback).fit(module, DataLoader(jobs.data(), batch_size=8))
    return column(callback.monitor, "total_norm"), module


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_two_processes_train_as_one(two, single, strategy, tmp_path):
    first, second = two.run(jobs.train, str(tmp_path), strategy)
    norms, module = single
    assert first["norms"] == second["norms"] == pytest.approx(norms, rel=1e-5)
    for parameter, mine in zip(first["parameters"], module.parameters(), strict=True):
        assert parameter == pytest.approx(mine.flatten().tolist(), rel=1e-4, abs=1e-5)
    assert first["parameters"] == second["parameters"]
    assert first["logged"] == second["logged"] == first["norms"][-1]
    assert first["rank_losses"] == [
        list(pair) for pair in zip(first["losses"], second["losses"], strict=True)
    ]
    log = sinks.read_log(str(tmp_path / "log"))
    assert sorted(log.records) == [0, 1] and {len(records) for records in log.records.values()} == {4}


def test_nan_on_one_process_skips_and_stops_both(two, tmp_path):
    first, second = two.run(jobs.train, str(tmp_path), "ddp", 13)
    assert first["applied"] == second["applied"] == [True, False, True]
    assert (1, "rank", 1) in first["events"] and (1, "bad_batch", 1) in second["events"]
    assert first["steps"] == second["steps"] == 3
