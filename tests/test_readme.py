# SPDX-License-Identifier: BSD-3-Clause
"""The recipes of the README run as they stand, one after the other, on a small model."""

import re
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
