# SPDX-License-Identifier: BSD-3-Clause
"""Monitor(incidents=...) saves a failing step as it was before the update, and it replays bit for bit."""

import logging
import math
import os
import random
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import fastclip
from fastclip.monitor import Incidents, IncidentSaved, Monitor
from fastclip.monitor.incidents.files import StoreError
from fastclip.monitor.incidents.incident import list_incidents, read_incident

SAMPLES = 16


@pytest.fixture(autouse=True)
def quiet(threads):
    threads(1)
    logging.getLogger("fastclip.monitor").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IncidentSaved)
        yield
    logging.getLogger("fastclip.monitor").setLevel(logging.NOTSET)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, inputs):
        return self.head(self.blocks(self.embedding(inputs).unsqueeze(1)).squeeze(1))


def normalized():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


def spectral():
    return nn.Sequential(spectral_norm(nn.Linear(8, 32)), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


MODELS = {"transformer": Transformer, "batch_norm": normalized, "spectral_norm": spectral}


def loss_function(model, batch):
    """Use random numbers of all generators, as augmentations do."""
    inputs, labels = batch["inputs"], batch["labels"]
    noise = random.random() + numpy.random.rand() + torch.rand(())
    return nn.functional.cross_entropy(model(inputs + 0.01 * noise).float(), labels)


def builder(name, fused=True, lr=1e-3):
    def build():
        torch.manual_seed(7)
        model = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=fused)
        return model, optimizer, loss_function

    return build


def train(
    directory,
    name="transformer",
    steps=12,
    bad=10,
    *,
    fused=True,
    autocast=None,
    scaler=None,
    micro_batches=1,
    poison=math.nan,
    options=None,
    scale_at=(),
    lr=1e-3,
    rates=None,
):
    """Train with one NaN in the batch of step `bad`, or with a loss multiplied in some steps."""
    random.seed(3)
    numpy.random.seed(3)
    model, optimizer, function = builder(name, fused, lr)()
    incidents = options or Incidents(str(directory))
    monitor = Monitor(model, optimizer, max_norm=1.0, scaler=scaler, incidents=incidents)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for micro in range(micro_batches):
            batch = {
                "inputs": torch.randn(SAMPLES, 8, generator=generator),
                "labels": torch.randint(4, (SAMPLES,), generator=generator),
            }
            if step == bad and micro == micro_batches - 1:
                batch["inputs"][5, 3] = poison
            monitor.batch(batch, sample_ids=[f"{step}/{micro}/{i}" for i in range(SAMPLES)])
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                loss = function(model, batch)
            if step in scale_at:
                loss = loss * 1000
            monitor.loss(loss)
            loss = loss / micro_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates(step)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return model, monitor


def only_incident(directory):
    (incident,) = list_incidents(directory)
    return incident.path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_incident_replays_bit_for_bit_and_names_the_sample(name, fused, tmp_path):
    model, monitor = train(tmp_path, name, fused=fused)
    assert all(t.isfinite().all() for t in model.state_dict().values()) and monitor.handle.skipped_steps == 1
    result = fastclip.replay(only_incident(tmp_path), builder(name, fused))
    assert result.reproduced and "bit for bit" in str(result)
    assert "10/0/5" in " ".join(result.verdict), result


@pytest.mark.parametrize("name", MODELS)
def test_incident_with_finite_numbers_replays_bit_for_bit(name, tmp_path):
    """A loss spike, with accumulation: finite numbers, of which every bit is compared."""
    train(tmp_path, name, steps=80, bad=-1, scale_at=(75,), micro_batches=2)
    incident = read_incident(only_incident(tmp_path))
    assert incident.kind == "loss_spike" and incident.step == 75

    def build():
        model, optimizer, function = builder(name)()
        return model, optimizer, lambda model, batch: 1000 * function(model, batch)

    result = fastclip.replay(incident.path, build, variants=False)
    assert result.reproduced and "bit for bit" in str(result), result
    other = fastclip.replay(incident.path, builder(name), variants=False)
    assert not other.reproduced  # without the thing that made it


@pytest.mark.parametrize("scaler_class", [torch.amp.GradScaler, fastclip.GradScaler])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_incident_with_autocast_and_a_scaler(scaler_class, dtype, tmp_path):
    """A loss that is NaN is an incident also where a scaler handles the gradients."""
    scaler = scaler_class("cpu", init_scale=2.0**8)
    train(tmp_path, autocast=dtype, scaler=scaler)
    incident = read_incident(only_incident(tmp_path))
    assert incident.load(0, "state.pt")["scaler"]["scale"] == 2.0**8
    assert incident.manifest["setup"]["scaled"] is True

    def build():
        model, optimizer, function = builder("transformer")()

        class Setup:
            pass

        setup = Setup()
        setup.model, setup.optimizer, setup.loss_function = model, optimizer, function
        setup.scaler = scaler_class("cpu")
        return setup

    result = fastclip.replay(incident.path, build)
    assert result.reproduced, result
    assert "10/0/5" in " ".join(result.verdict)


def test_overflows_are_an_incident_only_once_the_scale_collapses(tmp_path):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model, optimizer, _ = builder("transformer")()
    monitor = Monitor(
        model, optimizer, max_norm=1.0, scaler=scaler, incidents=Incidents(str(tmp_path), overflows=6)
    )
    for step in range(12):
        loss = model(torch.ones(2, 8)).sum()
        monitor.batch(torch.ones(2, 8))
        monitor.loss(loss)
        scaler.scale(loss).backward()
        if step > 3:
            model.head.bias.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert len(list_incidents(tmp_path)) == (step >= 9)
    incident = read_incident(only_incident(tmp_path))
    assert (incident.kind, incident.step) == ("loss_scale", 9)
    assert incident.load(0, "state.pt")["scaler"]["scale"] == 2.0**11


def test_replay_blames_the_learning_rate_of_the_step_before(tmp_path):
    options = Incidents(str(tmp_path), snapshot_every=10, kinds=("loss_spike",))
    train(
        tmp_path,
        steps=90,
        bad=-1,
        options=options,
        rates=lambda step: 5.0 if step == 80 else 1e-3,
        name="transformer",
    )
    incident = read_incident(only_incident(tmp_path))
    assert incident.step == 81 and incident.has(0, "snapshot.pt")
    result = fastclip.replay(incident.path, builder("transformer"), steps="all")
    assert result.reproduced, result
    assert "learning rate" in " ".join(result.verdict) and "80" in " ".join(result.verdict), result


def test_incident_holds_the_state_before_the_update(tmp_path):
    """The saved state shares no memory with the training either."""
    model, monitor = train(tmp_path, "batch_norm", steps=11)
    incident = read_incident(only_incident(tmp_path))
    state = incident.load(0, "state.pt")
    for name, parameter in model.named_parameters():
        assert torch.equal(state["model"][name], parameter)  # the step was skipped
    twin, _ = train(tmp_path / "twin", "batch_norm", steps=10, bad=-1)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(state["model"][name], tensor), name
    assert incident.manifest["record"]["step"] == 10 and len(incident.manifest["records"]) == 11
    entries = incident.load(0, "batches.pt")["batches"]
    assert [entry["step"] for entry in entries] == [7, 8, 9, 10]
    assert incident.manifest["complete"], incident.incomplete
    assert monitor.records[-1].held


def test_incident_reports_what_was_not_saved(tmp_path):
    model, optimizer, _ = builder("transformer")()
    monitor = Monitor(model, optimizer, max_norm=1.0, incidents=str(tmp_path))
    inputs = torch.randn(4, 8)
    monitor.batch(inputs=inputs, tool=object())
    loss = model(inputs).sum() * math.nan
    monitor.loss(loss)
    loss.backward()
    inputs.zero_()
    optimizer.step()
    incident = read_incident(only_incident(tmp_path))
    missing = " ".join(incident.incomplete)
    assert "inputs was changed in place" in missing and "object" in missing
    assert not incident.manifest["complete"]


def test_nan_gradients_are_an_incident_even_if_the_loss_is_finite(tmp_path):
    model, optimizer, _ = builder("transformer")()
    monitor = Monitor(model, optimizer, max_norm=1.0, incidents=str(tmp_path))
    monitor.batch(torch.ones(2, 8))
    loss = model(torch.ones(2, 8)).sum()
    monitor.loss(loss)
    loss.backward()
    model.head.bias.grad[1] = math.nan
    optimizer.step()
    incident = read_incident(only_incident(tmp_path))
    assert incident.kind == "nonfinite" and math.isfinite(monitor.records[0].loss)
    assert [p["name"] for p in incident.manifest["parameters"]] == ["head.bias"]


def test_incidents_of_one_kind_are_at_least_100_steps_apart(tmp_path):
    model, optimizer, _ = builder("transformer")()
    monitor = Monitor(model, optimizer, max_norm=1.0, incidents=str(tmp_path))
    for _ in range(120):
        monitor.batch(torch.ones(2, 8))
        loss = model(torch.ones(2, 8)).sum() * math.nan
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(list_incidents(tmp_path)) == 1 and monitor.handle.skipped_steps == 120


def test_full_disk_does_not_stop_the_training(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise StoreError(28, "No space left on device")

    monkeypatch.setattr("fastclip.monitor.incidents.store.IncidentStore.save", full)
    with pytest.warns(UserWarning, match=r"No space left on device.*Training continues"):
        model, monitor = train(tmp_path)
    assert len(monitor.records) == 12 and all(p.isfinite().all() for p in model.parameters())
    assert monitor.records[-1].applied


def test_incidents_raises_on_invalid_arguments(tmp_path):
    model, optimizer, _ = builder("transformer")()
    for options, message in (
        ({"kinds": ("explosion",)}, "kinds of incidents.*explosion"),
        ({"batches": 0}, "batches to be at least 1"),
        ({"overflows": 0}, "overflows"),
        ({"snapshot_every": -1}, "snapshot_every"),
    ):
        with pytest.raises(ValueError, match=message):
            Incidents(str(tmp_path), **options)
    with pytest.raises(ValueError, match="observes only"):
        Monitor(model, optimizer, incidents=str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="incidents"):
        Monitor(model, optimizer, max_norm=1.0, incidents=str(tmp_path / "file"))
    assert fastclip.optim.handle_of(optimizer) is None and os.listdir(tmp_path) == ["file"]
