# SPDX-License-Identifier: BSD-3-Clause
"""The recipes of the README run as they stand, one after the other, on a small model."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import fastclip

README = Path(__file__).parent.parent / "README.md"
RECIPES = (
    "Which parameter went wrong",
    "Clipping inside `optimizer.step()`",
    "Mixed precision",
    "Choosing max_norm",
    "Watching a training",
)


def blocks(section: str) -> list[str]:
    """The Python blocks below a heading, up to the next."""
    text = README.read_text(encoding="utf-8")
    assert f"\n## {section}\n" in text
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", body, re.DOTALL)


@pytest.fixture
def names(tmp_path) -> dict:
    """What the recipes take for granted."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    batches = [(x, x.sum(1, keepdim=True)) for x in torch.randn(12, 32, 8)]
    loss_function = torch.nn.MSELoss()
    loss_function(model(batches[0][0]), batches[0][1]).backward()
    return {
        "torch": torch,
        "fastclip": fastclip,
        "model": model,
        "batches": batches,
        "loss_function": loss_function,
        "device": "cpu",
        "directory": str(tmp_path),
    }


@pytest.mark.parametrize("section", RECIPES)
def test_recipe(section, names):
    start = [p.detach().clone() for p in names["model"].parameters()]
    found = blocks(section)
    assert found
    for block in found:
        exec(compile(block, f"README, {section}", "exec"), names)
        if section == "Mixed precision" and "handle" in names:
            # The blocks are alternatives: the first one attaches, the other does not.
            assert names["handle"].last_step_applied is True
            names.pop("handle").detach()
            names["scaler"] = torch.amp.GradScaler("cpu")
    if section != RECIPES[0]:
        changed = [not torch.equal(p, q) for p, q in zip(names["model"].parameters(), start, strict=True)]
        assert all(changed)


def test_every_public_name_is_in_the_readme():
    text = README.read_text(encoding="utf-8")
    missing = [n for n in fastclip.__all__ if n not in text and n not in ("GradStats", "Handle")]
    assert not missing


TRAINING = """
import torch
import fastclip
def loss_function(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
def make_model():
    torch.manual_seed(5)
    layers = [torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.2)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))
{build}
def train(directory):
    model, optimizer, loss_of = build()
{monitor}
    for step in range(45):
        inputs, targets = torch.randn(64, 8), torch.randint(0, 4, (64,))
        if step == 40:
            inputs[37, 2] = float("nan")
        monitor.batch(inputs, targets, sample_ids=range(step * 64, step * 64 + 64))
        loss = loss_of(model, (inputs, targets))
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_crash_can_be_followed_to_its_cause(tmp_path):
    """The commands of the README, with the output that it shows."""
    monitor, build = blocks("A crash that can be replayed")
    source = TRAINING.format(build=build, monitor=textwrap.indent(monitor, "    "))
    (tmp_path / "training.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(README.parent), "OMP_NUM_THREADS": "1"}

    def run(*command):
        line = [sys.executable, *command]
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-c", "import training; training.train('runs/1')")
    shown = README.read_text(encoding="utf-8").split("$ fastclip incidents runs/1\n")[1].split("```")[0]
    listed, replayed = shown.split("$ fastclip replay runs/1/00000040-nonfinite training:build\n")
    assert run("-m", "fastclip", "incidents", "runs/1").split()[:8] == listed.split()[:8]
    output = run("-m", "fastclip", "replay", "runs/1/00000040-nonfinite", "training:build").splitlines()
    for line in replayed.splitlines()[1:6]:
        assert line in output
    assert output[0].startswith(replayed.splitlines()[0].removesuffix(" ..."))
