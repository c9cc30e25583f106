# SPDX-License-Identifier: BSD-3-Clause
"""Replay is exact, reports differences, and restores the state of the caller."""

import hashlib
import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fastclip
from fastclip.monitor.incidents.determinism import deterministic_settings
from fastclip.monitor.incidents.rng import rng_state
from fastclip.monitor.incidents.store import IncidentStore
from helpers.replay_models import (
    Transformer,
    Warming,
    convolutional,
    next_token,
    record_incident,
    sgd,
    spectral,
    tokens,
    training_of,
)

STEP = 5
half, brain = torch.float16, torch.bfloat16


def scaled(make, scaler=torch.amp.GradScaler, scale=2.0**12, **options):
    return make(scaler=scaler("cpu", init_scale=scale, growth_interval=2), **options)


def noisy(model, batch):
    """Return a loss that depends on random numbers of Python and NumPy."""
    return next_token(model, batch) * (1 + random.random() + float(np.random.rand()))


def drops_batch(model, batch):
    """Return a loss, and remove an item from the batch."""
    return next_token(model, batch.pop("tokens")) + batch["weight"]


def cosine(make):
    training = make(optimizer=sgd)
    training.scheduler = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, 0.1, total_steps=20)
    return training


def transformer(**options):
    return training_of(Transformer(), **options)


fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)

EXACT = {
    "transformer_adamw": transformer,
    "batch_norm_sgd": lambda: training_of(convolutional(), optimizer=sgd),
    "spectral_norm": lambda: training_of(spectral()),
    "old_spectral_norm": lambda: training_of(spectral(old=True)),
    "non_persistent_buffers": lambda: training_of(nn.Sequential(Warming(), spectral())),
    "random_numbers_of_all": lambda: transformer(loss_function=noisy),
    "scheduler": lambda: cosine(transformer),
    "fused": lambda: transformer(optimizer=lambda model: fused(model.parameters())),
    "bfloat16": lambda: transformer(autocast=brain),
    "bfloat16_scaled": lambda: scaled(transformer, autocast=brain),
    "float16_torch_scaler": lambda: scaled(transformer, autocast=half),
    "float16_fastclip_scaler": lambda: scaled(transformer, fastclip.GradScaler, autocast=half),
    "float16_batch_norm": lambda: scaled(partial(training_of, convolutional()), autocast=half),
    "no_power_of_two": lambda: scaled(transformer, scale=3000.0, autocast=half),
    "no_power_of_two_fastclip": lambda: scaled(transformer, fastclip.GradScaler, 3000.0, autocast=half),
    "accumulated": lambda: training_of(convolutional(), micro_batches=3),
    "accumulated_sum": lambda: transformer(micro_batches=3, divides=False),
    "accumulated_scaled": lambda: scaled(transformer, micro_batches=3, autocast=half),
    "no_clipping": lambda: transformer(max_norm=None),
    "eval_mode_parts": lambda: training_of(partly_eval()),
    "batch_taken_apart": lambda: transformer(
        loss_function=drops_batch,
        data=lambda step, micro: {"tokens": tokens(step, micro), "weight": torch.ones(())},
    ),
}


def partly_eval():
    model = convolutional()
    model[1].eval()
    return model


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("steps", [1, "all"])
def test_replay_is_exact(tmp_path, name, steps):
    make = EXACT[name]
    path = record_incident(tmp_path, make(), STEP, snapshot=3 if steps == "all" else None)
    torch.manual_seed(3)  # the caller's own generators
    random.seed(4)
    np.random.seed(5)
    before, hashes = rng_state(), hashes_of(path)
    result = fastclip.replay(path, make, steps=steps, variants=False)
    assert result.reproduced, result.differences
    assert result.tolerance == 0 and {c.name for c in result.compared} >= {"loss", "total_norm", "nan_count"}
    assert hashes_of(path) == hashes
    assert_same_numbers(before, rng_state())
    if steps == "all":
        assert result.history["reaches_the_incident"]


def hashes_of(path: Path) -> dict[str, str]:
    return {
        str(f): hashlib.sha256(f.read_bytes()).hexdigest() + str(f.stat().st_mtime_ns)
        for f in path.rglob("*")
        if f.is_file()
    }


def assert_same_numbers(before, after):
    assert before["python"] == after["python"] and torch.equal(before["torch"], after["torch"])
    assert (before["numpy"][1] == after["numpy"][1]).all() and before["numpy"][2:] == after["numpy"][2:]


def test_replay_uses_recorded_settings_and_restores_the_callers(tmp_path, threads):
    make = transformer
    threads(1)
    path = record_incident(tmp_path, make(), STEP)
    assert deterministic_settings()["algorithms"]
    torch.use_deterministic_algorithms(False)
    threads(2)
    seen = []

    def loss_function(model, batch):
        seen.append(deterministic_settings())
        return next_token(model, batch)

    with torch.no_grad():
        assert fastclip.replay(path, lambda: make(loss_function=loss_function)).reproduced
        assert not torch.is_grad_enabled()
    assert all(settings["algorithms"] and settings["threads"] == 1 for settings in seen)
    assert not deterministic_settings()["algorithms"] and torch.get_num_threads() == 2


def test_replay_ignores_the_state_of_build(tmp_path):
    """Weights, optimizer state and learning rate come from the incident."""
    path = record_incident(tmp_path, scaled(transformer, autocast=half), STEP)
    other = scaled(transformer, scale=8.0, autocast=half)
    record_incident(tmp_path / "other", other, 3)
    other.optimizer.param_groups[0]["lr"] = 7.0
    assert fastclip.replay(path, lambda: other).reproduced
    # A missing scaler is created.
    made = transformer()
    assert fastclip.replay(path, lambda: (made.model, made.optimizer, next_token)).reproduced


# Differences.


def test_replay_reports_another_loss_function(tmp_path):
    path = record_incident(tmp_path, transformer(), STEP)
    make = partial(transformer, loss_function=lambda m, b: next_token(m, b) * 1.0001)
    result = fastclip.replay(path, make)
    assert not result.reproduced and result.differences[0].startswith("loss: ")
    assert result.verdict[0].startswith("does not reproduce: loss: ")
    assert "NOT reproduced" in str(result)
    assert fastclip.replay(path, make, tolerance=1e-3).reproduced
    assert not fastclip.replay(path, make, tolerance=1e-5).reproduced


def test_replay_reports_another_dropout(tmp_path):
    path = record_incident(tmp_path, transformer(), STEP)
    result = fastclip.replay(path, lambda: training_of(Transformer(dropout=0.2)), variants=False)
    assert not result.reproduced and {d.split(":")[0] for d in result.differences} >= {"loss", "total_norm"}


def test_replay_reports_other_gradients_of_the_same_loss(tmp_path):
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    path = record_incident(tmp_path, transformer(), STEP)
    result = fastclip.replay(
        path, lambda: transformer(loss_function=lambda m, b: Half.apply(next_token(m, b)))
    )
    assert "total_norm" in result.differences[0] and not any(d.startswith("loss") for d in result.differences)


def saved(tmp_path, training, change, **options):
    """Save an incident with a change, and valid hashes."""
    path = record_incident(tmp_path / "as_it_was", training, STEP, **options)
    files = {f.name: torch.load(f, weights_only=True) for f in path.glob("rank00000/*.pt")}
    manifest = json.loads((path / "rank00000" / "manifest.json").read_text())
    change(manifest, files)
    return IncidentStore(tmp_path / "changed").save(STEP, "nonfinite", 0, 1, manifest, files).parent


@pytest.mark.parametrize("name", ["data", "weights", "random_numbers", "buffers", "scale", "record", "worst"])
def test_replay_reports_a_changed_incident(tmp_path, name):
    def change(manifest, files):
        entry = files["batches.pt"]["batches"][-1]
        if name == "data":
            entry["batch"][1][0][0, 0, 0, 0] += 0.5
        elif name == "weights":
            files["state.pt"]["model"]["0.weight"][0, 0, 0, 0] += 0.01
        elif name == "random_numbers":
            torch.manual_seed(1)
            entry["rng"] = files["batches.pt"]["batches"][0]["rng"]
        elif name == "buffers":
            entry["buffers"]["1.running_mean"] += 1
            manifest["setup"]["comparable"] = False
        elif name == "scale":
            files["state.pt"]["scaler"]["scale"] = 1e30
        elif name == "record":
            manifest["record"]["nan_count"] = 3
        else:
            manifest["record"]["worst"][0]["norm"] *= 1 + 1e-9

    def make():
        # In eval mode batch normalization uses its buffers.
        model = partly_eval() if name == "buffers" else convolutional()
        return scaled(partial(training_of, model), autocast=half)

    path = saved(tmp_path, make(), change)
    result = fastclip.replay(path, make, variants=False)
    assert not result.reproduced and result.differences
