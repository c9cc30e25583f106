# SPDX-License-Identifier: BSD-3-Clause
"""Unusual loops, batches and models, which the monitor must not disturb."""

import collections
import copy
import math
import pickle
import warnings
import weakref
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

from fastclip.monitor import Monitor, suppress_errors
from fastclip.monitor.detectors import Detector
from fastclip.monitor.sinks import read_log
from helpers.small_training import batches, loss_of, make, run


@dataclass
class Slotted:
    __slots__ = ("inputs", "other")
    inputs: torch.Tensor
    other: None


class Cyclic:
    def __init__(self):
        self.me, self.tensor = self, torch.ones(2)


def ragged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


BATCHES = {
    "strings": ({"text": ["a", "b"], "ids": torch.arange(4).reshape(2, 2)}, {"ids": "int64"}),
    "user_dict": (collections.UserDict(inputs=torch.ones(2, 3)), {"inputs": "float32"}),
    "slots": (Slotted(torch.ones(2, 3), None), {"inputs": "float32"}),
    "cyclic": (Cyclic(), None),
    "ragged": ({"x": ragged(), "y": torch.ones(2)}, {"x": "nested", "y": "float32"}),
    "kinds": (
        [
            *(torch.ones(3, dtype=d) for d in (torch.bool, torch.uint8, torch.uint16, torch.complex64)),
            torch.ones(3).to(torch.float8_e4m3fn),
            torch.ones(2, 2).to_sparse(),
            torch.ones(2, device="meta"),
            torch.empty(0, 4),
            torch.tensor(3.0),
            torch.tensor([2**62, -(2**62)]),
        ],
        None,
    ),
    "numpy": ({"a": numpy.ones(3)}, {}),
    "none": (None, {}),
    "requires_grad": (torch.ones(2, 2, requires_grad=True), {"batch": "float32"}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_monitor_takes_unusual_batches(name):
    batch, expected = BATCHES[name]
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    monitor.batch(batch)
    loss = loss_of(model, next(batches(1)))
    monitor.loss(loss)
    loss.backward()
    optimizer.step()
    (record,) = monitor.records
    if expected is not None:
        assert {key: tensor["dtype"] for key, tensor in record.batch.items()} == expected


@pytest.mark.parametrize(
    "ids", [numpy.arange(3), [torch.tensor(1), numpy.int64(2)], range(3), 5, "seven", [(1, 2)]]
)
def test_log_has_sample_ids_of_all_kinds(ids, tmp_path):
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, log_dir=str(tmp_path))
    monitor.batch(*next(batches(1)), sample_ids=ids)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    monitor.close()
    (record,) = read_log(tmp_path).records[0]
    assert record["sample_ids"] == monitor.records[0].sample_ids and len(record["sample_ids"]) >= 1


@pytest.mark.parametrize(
    "loss", [1, 2.5, numpy.float32(0.5), numpy.array(3.0), torch.tensor([4.0]), math.nan]
)
def test_monitor_loss_takes_numbers_of_all_kinds(loss):
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    monitor.loss(loss)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    assert monitor.records[0].loss == pytest.approx(float(loss), nan_ok=True)
    for bad, error in (
        (1j, TypeError),
        (torch.tensor(1j), TypeError),
        (10**400, ValueError),
        (None, TypeError),
    ):
        with pytest.raises(error, match="expected loss to"):
            monitor.loss(bad)


def test_record_has_the_loss_before_it_was_changed_in_place():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    loss = loss_of(model, next(batches(1)))
    given = loss.item()
    monitor.loss(loss)
    loss.backward()
    with torch.no_grad():
        loss *= 1000
    optimizer.step()
    assert monitor.records[0].loss == given


def test_monitor_keeps_no_gradients_of_earlier_steps():
    """zero_grad() frees them, also while the handle and the monitor remember the step."""
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=0.01)
    run(monitor, model, optimizer, 1)
    loss_of(model, next(batches(1))).backward()
    gradients = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    assert [g() for g in gradients] == [None] * 4
    assert monitor.handle.stats.worst(1)[0].norm > 0  # the statistics are still there
    assert monitor.handle.stats.total_norm > 0


def test_monitor_names_parameters_that_are_added_later():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, weights_every=1)
    run(monitor, model, optimizer, 2)
    extra = nn.Linear(3, 3)
    model.register_module("late", extra)
    optimizer.add_param_group({"params": [extra.weight]})
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        extra.weight.grad *= 1000
        optimizer.step()
    monitor.close()
    assert monitor.records[-1].worst[0]["name"] == "late.weight"
    assert "late.weight" in monitor.records[-1].update_ratio and len(monitor.records[-1].lr) == 2


def test_monitor_takes_an_optimizer_without_a_learning_rate():
    model, _ = make()

    class Plain(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.data -= 0.1 * (0 if p.grad is None else p.grad)

    optimizer = Plain(model.parameters(), {"lr": None})
    monitor = Monitor(model, optimizer, max_norm=1.0, actions={"nonfinite": "lower_lr"})
    run(monitor, model, optimizer, 3, nan_at=(1,))
    assert [r.lr for r in monitor.records] == [[], [], []]


def test_action_skip_skips_nothing_without_max_norm():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, actions={"nonfinite": "skip"})
    monitor.handle.max_norm = None
    loss = loss_of(model, next(batches(1)))
    monitor.loss(math.inf)
    before = model[0].weight.detach().clone()
    loss.backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert monitor.records[0].applied and not monitor.records[0].held


def embedding_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_hooks_ignore_copies_of_the_model_and_evaluation():
    """And a monitored model can be copied and pickled."""
    model, optimizer = embedding_model()
    monitor = Monitor(model, optimizer, activations="leaf", activations_every=1)
    average = torch.optim.swa_utils.AveragedModel(model)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    average(torch.tensor([[9, 9]]))
    again(torch.tensor([[8, 8]]))
    with torch.no_grad():
        model.eval()(torch.tensor([[7, 7]]))
    loss = model.train()(torch.tensor([[1, 2]])).sum()
    monitor.loss(loss)
    loss.backward()
    optimizer.step()
    assert monitor.records[0].token_ids["0"] == {"min": 1, "max": 2, "outside": 0, "size": 10}
    monitor.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    torch.func.vmap(model)(torch.tensor([[[1, 2]]]))


def test_monitored_model_runs_under_vmap():
    model, optimizer = embedding_model()
    monitor = Monitor(model, optimizer, activations="leaf", activations_every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what cannot be measured may be reported
        torch.func.vmap(model)(torch.tensor([[[1, 2]], [[3, 4]]]))
    monitor.batch(torch.tensor([[1, 2]]))
    loss = model(torch.tensor([[1, 2]])).sum()
    monitor.loss(loss)
    loss.backward()
    optimizer.step()
    assert monitor.records[0].loss == pytest.approx(loss.item())


def test_monitor_warns_of_an_unknown_scaler():
    model, optimizer = make(fused=False)
    scaler = torch.amp.GradScaler("cpu")
    Monitor(model, optimizer, max_norm=1.0)
    scaler.scale(loss_of(model, next(batches(1)))).backward()
    with pytest.warns(UserWarning, match="pass it to fastclip.Monitor or fastclip.attach as scaler="):
        scaler.step(optimizer)


def test_monitor_discards_an_interrupted_step():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    with pytest.raises(KeyboardInterrupt), monitor.batch(*next(batches(1)), sample_ids=[1]):
        monitor.loss(1.0)
        raise KeyboardInterrupt
    run(monitor, model, optimizer, 2)
    assert [(r.step, r.micro_batches, r.sample_ids) for r in monitor.records] == [(0, 1, []), (1, 1, [])]


def test_closed_monitor_collects_nothing():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    run(monitor, model, optimizer, 2)
    monitor.close()
    run(monitor, model, optimizer, 20)
    assert len(monitor.records) == 2 and monitor.recorder.step.loss_count == 0


def test_defect_of_a_detector_warns_once_and_training_continues(monkeypatch):
    class Broken(Detector):
        kind = "broken"

        def check(self, record):
            raise ZeroDivisionError("no divisor")

    monkeypatch.setattr(suppress_errors, "_warned", set())
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, detectors=[Broken()])
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        run(monitor, model, optimizer, 5)
    (message,) = [str(warning.message) for warning in shown]
    assert message.startswith(
        "fastclip.Monitor: failed to run the detector 'broken': ZeroDivisionError: no divisor (in check, line"
    )
    assert len(monitor.records) == 5


def test_action_raises_what_a_users_function_raises():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, actions={"nonfinite": lambda event: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        run(monitor, model, optimizer, 3, nan_at=(1,))


def test_clipped_before_reports_a_second_clip_in_the_loop():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=0.05)
    for inputs, labels in batches(30):
        loss = loss_of(model, (inputs, labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    (event,) = [e for e in monitor.events if e.kind == "clipped_before"]
    assert event.step == 19 and "20 of the last 20 gradient norms equal max_norm 0.05" in event.message
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=0.05)
    run(monitor, model, optimizer, 30)
    assert all(r.clipped for r in monitor.records) and not monitor.events


def test_monitor_warns_of_an_optimizer_of_another_model():
    model, _ = make()
    _, optimizer = make()
    with pytest.warns(UserWarning, match="the optimizer has no parameter of the model") as caught:
        Monitor(model, optimizer, max_norm=1.0).close()
    assert caught[0].filename == __file__


def test_record_names_gradients_with_most_nan_first():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    for p, count in zip(model.parameters(), (1, 3, 0, 2), strict=True):
        p.grad = torch.ones_like(p)
        p.grad.flatten()[:count] = math.nan
    optimizer.step()
    monitor.close()
    assert [w["nan_count"] for w in monitor.records[-1].worst] == [3, 2, 1]
