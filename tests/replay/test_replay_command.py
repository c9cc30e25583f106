# SPDX-License-Identifier: BSD-3-Clause
"""ReplayError names the reason in one line; `fastclip replay` and its exit status."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fastclip
from fastclip.cli import main
from fastclip.replay.replay import ReplayError
from helpers.replay_models import Transformer, classification, perceptron, record_incident, sgd, training_of

STEP = 3


def transformer(**options):
    return training_of(Transformer(), **options)


def without(name):
    made = vars(transformer())
    return SimpleNamespace(**{key: value for key, value in made.items() if key != name})


def adding(training, module):
    training.model.extra = module
    return training


BAD_BUILDS = {
    "2 objects": (lambda: (transformer().model, 1), "but got 2 objects"),
    "none": (lambda: None, "NoneType without model, optimizer, loss_function"),
    "no optimizer": (lambda: without("optimizer"), "without optimizer"),
    "no model": (lambda: (1, 2, 3), "expected build() to return a Module as model, but got int"),
    "no function": (lambda: (*transformer_parts()[:2], 3), "callable loss_function, but got int"),
    "scaler": (lambda: transformer(scaler=3), "torch.amp.GradScaler as scaler, but got int"),
    "raises": (lambda: 1 / 0, "build() raised ZeroDivisionError: division by zero"),
    "lacks": (
        lambda: adding(transformer(), nn.Linear(2, 2)),
        "the recorded model lacks extra.bias, extra.weight",
    ),
    "has": (lambda: training_of(perceptron()), "the recorded model lacks 0.bias"),
    "shape": (
        lambda: shaped(),
        "the recorded head.weight is float32 [40, 16], but in the model of build() it is",
    ),
    "dtype": (lambda: training_of(Transformer().double()), "but in the model of build() it is float64"),
    "optimizer": (
        lambda: transformer(optimizer=sgd),
        "the saved optimizer state is not from SGD, which build() returned: it has ",
    ),
    "groups": (lambda: transformer(optimizer=grouped), "has groups of [1, "),
    "loss raises": (lambda: transformer(loss_function=classification), "loss_function(model, batch) raised"),
    "loss shape": (
        lambda: transformer(loss_function=lambda m, b: m(b)),
        "a loss of one element, but got shape",
    ),
    "loss type": (
        lambda: transformer(loss_function=lambda m, b: 3.0),
        "a loss of one element, but got float",
    ),
    "constant": (
        lambda: transformer(loss_function=lambda m, b: torch.ones(())),
        "does not depend on the parameters",
    ),
}


def transformer_parts():
    made = transformer()
    return made.model, made.optimizer, made.loss_function


def shaped():
    training = transformer()
    training.model.head = nn.Linear(16, 41)
    return training


def grouped(model):
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first]}, {"params": others}])


@pytest.mark.parametrize("name", BAD_BUILDS)
def test_replay_raises_on_an_unsuitable_build(tmp_path, name):
    build, message = BAD_BUILDS[name]
    path = record_incident(tmp_path, transformer(), STEP)
    with pytest.raises(ReplayError) as caught:
        fastclip.replay(path, build)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replay_raises_on_invalid_arguments(tmp_path):
    path = record_incident(tmp_path, transformer(), STEP)
    with pytest.raises(ValueError, match="expected steps to be 1 or 'all', but got 2"):
        fastclip.replay(path, transformer, steps=2)
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="expected tolerance to be >= 0"):
            fastclip.replay(path, transformer, tolerance=tolerance)
    with pytest.raises(ReplayError, match="has no snapshot, so only its own step can be replayed"):
        fastclip.replay(path, transformer, steps="all")
    with pytest.raises(ReplayError, match="has no rank 1, only the ranks"):
        fastclip.replay(path, transformer, rank=1)
    with pytest.raises(ReplayError, match="No such file"):
        fastclip.replay(tmp_path / "none", transformer)
    file = path / "rank00000" / "batches.pt"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ReplayError, match="damaged"):
        fastclip.replay(path, transformer)


def test_replay_takes_the_loss_from_a_tuple_or_dict(tmp_path):
    path = record_incident(tmp_path, transformer(), STEP)
    loss = transformer().loss_function
    for pack in (lambda value: (value, 1), lambda value: {"loss": value}, lambda value: {"x": value}):
        made = lambda pack=pack: transformer(loss_function=lambda m, b: pack(loss(m, b)))  # noqa: E731
        assert fastclip.replay(path, made, variants=False).reproduced


MODULE = """
import torch
from helpers.replay_models import Transformer, training_of

class Made:
    @staticmethod
    def build():
        return training_of(Transformer())

def other():
    made = training_of(Transformer(dropout=0.3))
    return made.model, made.optimizer, made.loss_function

def broken():
    return 3

number = 3
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return a function that runs `fastclip replay` in a directory with a module and an incident."""
    path = record_incident(tmp_path / "incidents", transformer(), STEP, snapshot=1)
    (tmp_path / "made_here.py").write_text(MODULE)
    (tmp_path / "does_not_import.py").write_text("raise OSError('no\\nlines')")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield lambda *arguments: main(["replay", str(path), *arguments])
    sys.modules.pop("made_here", None)
    assert sys.path == before


def test_command_reproduces_and_writes_json(command, capsys, tmp_path):
    assert command("made_here:Made.build", "--json", "result.json") == 0
    assert "reproduced, bit for bit" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["reproduced"] is True and result["step"] == STEP and result["samples"]["count"] == 16
    assert result["history"]["reaches_the_incident"] is True
    assert command("made_here:other", "--no-variants", "--json", "result.json") == 1
    assert "NOT reproduced" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["reproduced"] is False and result["samples"] is None and result["history"] is None
    assert command("made_here:Made.build", "--steps", "--no-variants", "--rank", "0") == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["made_here"], "expected MODULE:FUNCTION such as train:build, but got 'made_here'"),
        (["absent:build"], "absent:build: no module named 'absent'"),
        (["made_here:absent"], "has no attribute 'absent'"),
        (["made_here:number"], "expected a function, but got int"),
        (["made_here:broken"], "but got int without model"),
        (["does_not_import:build"], "importing it raised OSError: no"),
        (["made_here:Made.build", "--rank", "7"], "has no rank 7"),
        (["made_here:Made.build", "--json", "absent/result.json"], "No such file"),
    ],
)
def test_command_exits_with_2_if_it_cannot_run(command, capsys, arguments, message):
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastclip: ") and message in error and error.count("\n") == 1
