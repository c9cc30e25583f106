# SPDX-License-Identifier: BSD-3-Clause
"""What FastclipCallback refuses before a training with Lightning, and what to do instead."""

import importlib
import sys

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

import fastclip
from fastclip.integrations.lightning import FastclipCallback
from fastclip.optim import handle_of
from helpers.lightning_runs import (
    BATCHES,
    EXPECTED_WARNINGS,
    PACKAGES,
    Module,
    Steps,
    adamw,
    fit,
    loader,
    mixed,
    parameters,
    poisoned,
    trainer,
)

pytestmark = EXPECTED_WARNINGS


def refused(module, callback=None, match="", error=ValueError, **options):
    before = parameters(module)
    made = trainer(callback or FastclipCallback(max_norm=0.5), **options)
    with pytest.raises(error, match=match):
        made.fit(module, loader())
    assert all(map(torch.equal, parameters(module), before))
    assert all(handle_of(optimizer) is None for optimizer in made.optimizers)


def test_gradient_clip_val_beside_the_callback_raises():
    advice = r"both Trainer.* would clip.* Remove gradient_clip_val and use FastclipCallback\(max_norm={}\)"
    refused(Module(), match=advice.format(0.5), gradient_clip_val=2.0)
    refused(Module(), FastclipCallback(), advice.format(2.0), gradient_clip_val=2.0)
    by_value = {"gradient_clip_val": 2.0, "gradient_clip_algorithm": "value"}
    refused(Module(), match="Remove gradient_clip_val", **by_value)
    assert len(fit(Module(), gradient_clip_val=0.0).records) == BATCHES  # is none


class OwnClipping(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "norm")


def test_module_with_own_clipping_raises():
    refused(OwnClipping(), match=r"OwnClipping\.configure_gradient_clipping and FastclipCallback would clip")


def test_own_clipping_is_allowed_with_manual_optimization():
    class Manual(OwnClipping):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            optimizer.step()

    assert len(fit(Manual()).records) == BATCHES


class Adversarial(Module):
    automatic_optimization = False
    attached = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            optimizer.step()

    def configure_optimizers(self):
        optimizers = [adamw(self.net[0].parameters(), True), adamw(self.net[2].parameters(), False)]
        if self.attached:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            self.handles = [fastclip.attach(optimizer, 0.5, scaler=scaler) for optimizer in optimizers]
        return optimizers


def test_several_optimizers_raise_and_can_be_attached_instead():
    refused(Adversarial(), match="got 2.*call fastclip.attach for each of them in configure_optimizers")
    for precision in ({}, mixed(torch.amp.GradScaler("cpu", init_scale=1024.0))):
        module = Adversarial()
        module.attached = True
        trainer(**precision).fit(module, loader(poisoned()))
        assert [handle.skipped_steps for handle in module.handles] == [1, 1]
        assert all(p.isfinite().all() for p in module.parameters())


def test_optimizer_attached_by_the_module_keeps_its_handle():
    class Attaching(Module):
        def configure_optimizers(self):
            [optimizer], schedulers = super().configure_optimizers()
            self.handle = fastclip.attach(optimizer, 0.5)
            return [optimizer], schedulers

    module, other = Attaching(), Module()
    monitor = fit(module, callback=FastclipCallback())
    assert monitor.handle is module.handle is handle_of(module.handle.optimizer)
    assert module.handle.observers == []
    fit(other)
    assert module.losses == other.losses
    refused_later = trainer(FastclipCallback(max_norm=1.0))
    with pytest.raises(RuntimeError, match="already attached, with max_norm 0.5"):
        refused_later.fit(Attaching(), loader())


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_hide_the_gradients_raise(strategy, monkeypatch):
    made = trainer(callback := FastclipCallback(max_norm=0.5))
    # Lightning has them on GPUs only, and DeepSpeed only where it is installed.
    monkeypatch.setattr(type(made), "strategy", strategy.__new__(type("Own", (strategy,), {})))
    with pytest.raises(ValueError, match=f"does not work with {strategy.__name__}: "):
        callback.setup(made, Module(), "fit")
    callback.setup(made, Module(), "test")


def test_trainer_of_the_other_package_raises():
    import pytorch_lightning

    module = type("Other", (Steps, pytorch_lightning.LightningModule), {})()
    callback = FastclipCallback(max_norm=0.5)
    expected = r"expected a LightningModule and a Trainer of lightning\.pytorch"
    with pytest.raises(ValueError, match=f"{expected}|Expected a parent"):  # Lightning 2.4 does by itself
        trainer(callback, kind=pytorch_lightning.Trainer).fit(module, loader())


def test_callback_raises_on_unknown_options():
    with pytest.raises(TypeError, match="'max_nrom': expected one of .*activations.*sample_ids"):
        FastclipCallback(max_nrom=1.0)
    with pytest.raises(TypeError, match="'scaler': the Trainer provides it"):
        FastclipCallback(scaler=None)
    with pytest.raises(TypeError, match="sample_ids to be a function of a batch, but got list"):
        FastclipCallback(sample_ids=[1])
    refused(Module(), FastclipCallback(max_norm=-1.0), match="max_norm")


@pytest.mark.parametrize("package", PACKAGES)
def test_import_without_lightning_names_what_to_install(package, monkeypatch):
    name = f"fastclip.integrations.{package}"
    for missing in (package, PACKAGES[package]):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    wanted = "torch-fastclip" if package == "lightning" else "pip install pytorch-lightning"
    with pytest.raises(ImportError, match=wanted):
        importlib.import_module(name)
