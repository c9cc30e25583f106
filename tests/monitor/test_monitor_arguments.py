# SPDX-License-Identifier: BSD-3-Clause
"""Sampling, resuming, invalid arguments and closing of the monitor."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import fastclip
from fastclip.monitor import Monitor
from fastclip.monitor.measure.activations import ActivationStatistics
from fastclip.monitor.measure.sampling import is_due
from fastclip.monitor.measure.weights import WeightStatistics
from helpers.small_training import batches, loss_of, make, run

# Sampling.


def test_is_due_samples_early_and_regular_steps():
    due = [step for step in range(120) if is_due(step, 50)]
    assert due == [0, 1, 2, 4, 8, 16, 32, 50, 100]
    assert not any(is_due(step, 0) for step in range(10))


def test_activation_hooks_exist_only_in_sampled_steps():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, activations=["1"], activations_every=10, weights_every=0)
    hooks = []
    for batch in batches(13):
        hooks.append(len(model[1]._forward_hooks))
        loss = loss_of(model, batch)
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
    sampled = [bool(r.activations) for r in monitor.records]
    assert [bool(h) for h in hooks] == sampled == [is_due(step, 10) for step in range(13)]
    assert not any(r.update_ratio or r.param_norm for r in monitor.records)
    monitor.close()
    assert not model[1]._forward_hooks


def test_activation_statistics_are_of_finite_elements():
    module = nn.Identity()
    statistics = ActivationStatistics({"x": module}, every=1)
    statistics.begin(0)
    module(torch.tensor([[3.0, -4.0, math.nan, math.inf]]))
    mean, rms, largest, nonfinite = statistics.end()["activations/x"].tolist()
    assert (mean, largest, nonfinite) == (-0.5, 4.0, 2.0) and rms == pytest.approx(math.sqrt(12.5))


def test_weight_statistics_copy_at_most_max_bytes():
    """And every parameter has its turn, but for one that is too large."""
    shapes = [(10, 10), (20, 10), (300, 10), (5, 10), (30, 10)]
    named = [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]
    names = {p: name for name, p in named}
    optimizer = torch.optim.SGD([p for _, p in named], lr=0.1)
    weights = WeightStatistics(optimizer, names, every=1, max_bytes=1400)
    seen: list[list[str]] = []
    for _ in range(6):
        norm = weights.before_step()["param_norm"]
        assert norm.item() == pytest.approx(math.hypot(*[p.norm() for _, p in named]), rel=1e-5)
        assert sum(copy.nbytes for _, _, copy in weights._copies) <= 1400
        for _, p in named:
            p.data *= 1.5
        ratios = weights.after_step()
        seen.append([key.removeprefix("update_ratio/") for key in ratios])
        assert all(r.item() == pytest.approx(0.5, rel=1e-5) for r in ratios.values())
    assert {name for names in seen for name in names} == {"p0", "p1", "p3", "p4"}
    assert seen[0] == ["p0", "p1", "p3"] and seen[1] == ["p4"]


def test_token_ids_out_of_range_are_recorded_before_the_lookup_fails():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 3))
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(50, (4, 4))
    tokens[2, 1], tokens[3, 3] = 50, -1
    with pytest.raises(IndexError), monitor.batch(tokens):
        model(tokens)
    (record,) = monitor.records
    assert record.token_ids == {"0": {"min": -1, "max": 50, "outside": 2, "size": 50}}
    assert monitor.diagnose().cause == "token_ids"
    assert "2 token ids of 0 are outside 0 to 49" in str(monitor.diagnose())
    monitor.close()
    assert not model[0]._forward_pre_hooks


def test_monitor_does_not_hook_a_compiled_model():
    model, optimizer = make()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"activations=None with a compiled model"):
        Monitor(compiled, optimizer, activations="leaf")
    monitor = Monitor(compiled, optimizer, max_norm=1.0)
    torch._dynamo.reset()
    run(monitor, compiled, optimizer, 3)
    assert len(monitor.records) == 3 and monitor.records[-1].worst[0]["name"].startswith("_orig_mod.")


# Resuming.


@pytest.mark.parametrize("at", [5, 18, 31, 57])
def test_resumed_run_has_the_same_events(at, tmp_path):
    trouble = {"scale_at": (17, 40, 59), "nan_at": (30, 31, 58)}

    def monitored(policy):
        model, optimizer = make()
        monitor = Monitor(model, optimizer, max_norm=policy, actions={"loss_spike": "skip"})
        return model, optimizer, monitor

    whole = monitored(fastclip.policies.ZClip())
    run(whole[2], *whole[:2], 70, **trouble)
    first = monitored(fastclip.policies.ZClip())
    run(first[2], *first[:2], at, **trouble)
    states = {"model": first[0], "optimizer": first[1], "monitor": first[2]}
    torch.save({name: part.state_dict() for name, part in states.items()}, tmp_path / "state.pt")
    second = monitored(fastclip.policies.ZClip())
    for part, state in zip(
        second, torch.load(tmp_path / "state.pt", weights_only=True).values(), strict=True
    ):
        part.load_state_dict(state)
    run(second[2], *second[:2], 70 - at, start=at, **trouble)
    assert [str(e) for e in first[2].events + second[2].events] == [str(e) for e in whole[2].events]
    assert len(whole[2].events) > 6
    records = [*first[2].records, *second[2].records]
    for record, expected in zip(records, whole[2].records, strict=True):
        assert (record.step, record.max_norm, record.skipped_steps) == (
            expected.step,
            expected.max_norm,
            expected.skipped_steps,
        )


def test_load_state_dict_raises_on_the_state_of_another_monitor():
    state = Monitor(*make(), max_norm=1.0).state_dict()
    with pytest.raises(ValueError, match=r"missing \['policy'\], unexpected \[\]"):
        Monitor(*make(), max_norm=fastclip.policies.ZClip()).load_state_dict(state)
    with pytest.raises(ValueError, match=r"missing \['skip_latch'\]"):
        Monitor(*make(), max_norm=1.0, actions={"nonfinite": "skip"}).load_state_dict(state)
    with pytest.raises(ValueError, match="unexpected .*'detector nonfinite'"):
        Monitor(*make(), detectors=[]).load_state_dict(state)


def test_load_state_dict_takes_the_state_of_version_0_1():
    """There the skip latch was called "gate", and its window had no streak beside it."""
    saved, resumed = (Monitor(*make(), max_norm=1.0, actions={"loss_spike": "skip"}) for _ in range(2))
    state = saved.state_dict()
    rule = fastclip.policies.SpikeSkip().state_dict()
    state["parts"]["gate"] = {"loss": {"window": [1.0, 2.0], "rule": rule}}
    del state["parts"]["skip_latch"]
    resumed.load_state_dict(state)
    latch = {"loss": {"window": [1.0, 2.0]}, "overflow_streak": 0}
    assert resumed.state_dict()["parts"]["skip_latch"] == latch


# Invalid arguments.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activations": "all"}, ValueError, "expected activations to be 'leaf'.*got 'all'"),
        ({"activations": ["0", "nix"]}, ValueError, r"it has no \['nix'\]"),
        ({"actions": {"loss": "stop"}}, ValueError, "kinds of events.*'loss_spike'.*got 'loss'"),
        ({"actions": {"loss_spike": "halt"}}, ValueError, "one of 'log'.*got 'halt'"),
        ({"actions": {"loss_spike": 3}}, TypeError, "string or callable, but got int"),
        ({"actions": {"memory_growth": "skip"}}, ValueError, "before the update.*'memory_growth'"),
        ({"actions": {"loss_spike": "skip"}, "max_norm": None}, ValueError, "observes only"),
        ({"compare_ranks": True}, ValueError, "torch.distributed"),
        ({"max_norm": -1.0}, ValueError, "number >= 0"),
        ({"sinks": [3]}, TypeError, "sink.*int"),
        ({"detectors": [fastclip.monitor.detectors.NonFinite()] * 2}, ValueError, "several of"),
        ({"scaler": 3}, TypeError, "scaler"),
        ({"weights_every": -1}, ValueError, "weights_every.*-1"),
    ],
)
def test_monitor_raises_on_invalid_arguments(options, error, message):
    """Refused before the optimizer is touched."""
    model, optimizer = make()
    with pytest.raises(error, match=message):
        Monitor(model, optimizer, **{"max_norm": 1.0, **options})
    assert fastclip.optim.handle_of(optimizer) is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_monitor_raises_on_invalid_models_optimizers_and_losses():
    model, optimizer = make()
    with pytest.raises(TypeError, match=r"model to be a torch\.nn\.Module, but got AdamW"):
        Monitor(optimizer, model)
    with pytest.raises(TypeError, match=r"optimizer to be a torch\.optim\.Optimizer, but got Sequential"):
        Monitor(model, model)
    monitor = Monitor(model, optimizer)
    with pytest.raises(TypeError, match="loss to be a number, but got str"):
        monitor.loss("low")
    with pytest.raises(ValueError, match=r"aux to have one element, but got shape \[2\]"):
        monitor.loss(1.0, aux=torch.ones(2))


# Closing.


def test_closed_monitor_releases_the_model():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, activations="leaf")
    run(monitor, model, optimizer, 2)
    monitor.close()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
