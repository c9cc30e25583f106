# SPDX-License-Identifier: BSD-3-Clause
"""Trainings that go wrong: the right warning, at or before the loss shows it, and the right cause."""

import logging
import math
from collections.abc import Callable

import pytest
import torch

import fastclip
from helpers.failing_runs import (
    Outcome,
    Recurrent,
    Transformer,
    classifier,
    float16_regression,
    float16_square_root,
    language_model,
)

# What goes wrong, the kind of the first event that tells it, and the cause that the diagnosis names first.
RUNS: dict[str, tuple[Callable[[], Outcome], str, str]] = {
    "transformer, rate of 0.1": (
        lambda: language_model(Transformer, 0.1, 30),
        "update_ratio",
        "learning_rate",
    ),
    "transformer, rate of 0.03": (
        lambda: language_model(Transformer, 0.03, 30),
        "update_ratio",
        "learning_rate",
    ),
    "LSTM, rate of 1": (lambda: language_model(Recurrent, 1.0, 30), "update_ratio", "learning_rate"),
    "LSTM, long passages": (lambda: language_model(Recurrent, 0.003, 42, 40), "batch_shift", "length"),
    "NaN feature": (lambda: classifier(42, nan_at=40), "bad_batch", "nonfinite_batch"),
    "label out of range": (lambda: classifier(42, label_at=40), "bad_batch", "labels"),
    "label, unknown number of classes": (
        lambda: classifier(42, label_at=40, num_classes=None),
        "batch_shift",
        "labels",
    ),
    "sorted labels": (lambda: classifier(100, "sorted"), "batch_shift", "label_shift"),
    "float16, large targets": (float16_regression, "activations", "float16_range"),
    "float16, torch's scaler": (
        lambda: float16_regression(scaler_class=torch.amp.GradScaler),
        "activations",
        "float16_range",
    ),
    "float16, root of zero": (float16_square_root, "loss_scale", "loss_scale"),
}
SHOWN_BY_THE_LOSS = [name for name in RUNS if "long passages" not in name and "root of zero" not in name]


@pytest.fixture(scope="module")
def outcomes():
    """Each run once."""
    known: dict[str, Outcome] = {}

    def outcome(name: str) -> Outcome:
        if name not in known:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # other threads would change the last bits
            known[name] = RUNS[name][0]()
            torch.set_num_threads(threads)
        return known[name]

    logging.getLogger("fastclip.monitor").setLevel(logging.CRITICAL)
    with pytest.MonkeyPatch.context():
        yield outcome
    logging.getLogger("fastclip.monitor").setLevel(logging.NOTSET)


@pytest.mark.filterwarnings("ignore:the loss scale has fallen")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("name", RUNS)
def test_failing_run_has_a_timely_warning_and_the_right_cause(name, outcomes):
    outcome, (_, kind, cause) = outcomes(name), RUNS[name]
    exploded, warned = outcome.exploded, outcome.first(kind)
    assert warned is not None and warned == outcome.first()
    diagnosis = outcome.monitor.diagnose()
    print(f"{name} | {warned} ({kind}) | {exploded} | {cause}\n{diagnosis}")
    if name in SHOWN_BY_THE_LOSS:
        assert exploded is not None and warned <= exploded
    else:
        assert exploded is None  # nobody who looks at the loss alone would know
    assert diagnosis.cause == cause
    assert outcome.monitor.summary().count("\n") < 24


@pytest.mark.parametrize(
    "run",
    [
        lambda: language_model(Transformer, 0.001, 60),
        lambda: language_model(Recurrent, 0.003, 60),
        lambda: classifier(200),
    ],
    ids=["transformer", "LSTM", "classifier"],
)
def test_healthy_run_of_the_same_training_has_no_events(run):
    outcome = run()
    assert [str(e) for e in outcome.monitor.events] == []
    assert outcome.losses[-1] < outcome.losses[0]


def test_diagnosis_names_the_samples_of_the_bad_batch(outcomes):
    finding = outcomes("NaN feature").monitor.diagnose().findings[0]
    assert finding.step == 40 and finding.sample_ids == list(range(1280, 1312))
    assert "holds 1 NaN and 0 Inf" in finding.text
    long = outcomes("LSTM, long passages").monitor.diagnose().findings[0]
    assert long.step == 40 and "has length 256" in long.text and len(long.sample_ids) == 32


def test_batch_with_nan_does_not_change_the_model(outcomes):
    outcome = outcomes("NaN feature")
    assert outcome.monitor.records[40].applied is False
    assert all(p.isfinite().all() for g in outcome.monitor.handle.optimizer.param_groups for p in g["params"])
    assert math.isfinite(outcome.losses[-1])


def test_collapsing_loss_scale_is_reported_before_it_is_below_1(outcomes):
    events = [e for e in outcomes("float16, root of zero").monitor.events if e.kind == "loss_scale"]
    assert events[0].severity == "warning" and events[0].values["loss_scale"] > 1000
    assert events[1].severity == "error" and events[1].values["loss_scale"] < 1
    assert isinstance(outcomes("float16, large targets").monitor.handle.scaler, fastclip.GradScaler)
