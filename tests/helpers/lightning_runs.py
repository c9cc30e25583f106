# SPDX-License-Identifier: BSD-3-Clause
"""Small trainings with Lightning, and how to run them."""

import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

from fastclip.integrations.lightning import FastclipCallback

# Warnings of Lightning about trainings as small as these, and about its own dependencies.
EXPECTED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),  # in Lightning
    pytest.mark.filterwarnings("ignore:.*defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # after a step left out
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:Error detected in .*Backward"),  # detect_anomaly
]

BATCHES, SIZE = 10, 4
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


class Samples(Dataset):
    def __init__(self, batches=BATCHES):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(batches * SIZE, 8, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "targets": self.targets[index], "id": 100 + index}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def adamw(parameters, fused):
    return torch.optim.AdamW(parameters, lr=0.01, fused=fused)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


class Steps:
    """The methods of the modules of both packages."""

    def __init__(self, fused=False):
        super().__init__()
        self.net, self.fused, self.losses = network(), fused, []

    def loss_of(self, batch):
        return mse_loss(self.net(batch["inputs"]), batch["targets"])

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss_of(batch))

    def configure_optimizers(self):
        optimizer = adamw(self.parameters(), self.fused)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]


class Module(Steps, LightningModule):
    pass


def trainer(*callbacks, kind=Trainer, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return kind(
        callbacks=list(callbacks),
        **{"accelerator": "cpu", "max_epochs": 1, "logger": False, **quiet, **options},
    )


def loader(samples=None):
    return DataLoader(Samples() if samples is None else samples, batch_size=SIZE)


def fit(module, *, samples=None, callback=None, ckpt_path=None, validation=None, **options):
    callback = FastclipCallback(max_norm=0.5) if callback is None else callback
    made = trainer(callback, *options.pop("callbacks", []), **options)
    made.fit(module, loader(samples), validation, ckpt_path=ckpt_path)
    return callback.monitor


def column(monitor, name):
    return [getattr(record, name) for record in monitor.records]


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


def mixed(scaler):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def poisoned(batch=6):
    samples = Samples()
    samples.inputs[SIZE * batch + 1, 5] = math.nan
    return samples
