# SPDX-License-Identifier: BSD-3-Clause
"""fastclip.GradScaler: torch's scaler with norms, counts and a watch over the scale."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
from torch.optim import SGD

import fastclip
from fastclip.grad_scaler import _AsyncScalar
from helpers import training
from helpers.cases import INF, NAN, assert_bitwise_equal
from helpers.training import OPTIMIZERS


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_grad_scaler_without_attach_matches_torch(name):
    """Bit for bit: parameters, gradients, scale, also with unscale_ and on overflow."""
    runs = []
    for kind in (torch.amp.GradScaler, fastclip.GradScaler):
        params = training.parameters()
        optimizer = OPTIMIZERS[name](params)
        scaler = kind("cpu", **training.SCALER_OPTIONS)
        for step, grads in enumerate(training.gradients(30)):
            scaler.scale(torch.zeros(()))
            training.set_gradients(params, grads, scaler.get_scale())
            if step % 3 == 0:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            if kind is fastclip.GradScaler:
                stats = scaler.stats
                assert stats.nan_count + stats.inf_count == (0 if training.is_finite(grads) else 1)
                if training.is_finite(grads):
                    norm = torch.nn.utils.get_total_norm(grads).item()
                    assert stats.total_norm.item() == pytest.approx(norm, rel=1e-5)
            scaler.update()
        runs.append(([p.data for p in params], [p.grad for p in params], scaler.state_dict()))
    assert_bitwise_equal(runs[0][0], runs[1][0])
    assert_bitwise_equal(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]


def test_finite_gradients_with_infinite_scaled_norm_are_applied():
    """100 elements of 1e38: torch finds them finite, and so does the scale that may grow on."""
    for kind in (torch.amp.GradScaler, fastclip.GradScaler):
        p = torch.nn.Parameter(torch.zeros(100))
        optimizer = SGD([p], lr=1.0)
        scaler = kind("cpu", init_scale=2.0**16)
        scaler.scale(torch.zeros(()))
        p.grad = torch.full_like(p, 1e38)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**16
        assert p[0].item() == pytest.approx(-(1e38 / 2**16))
    assert scaler.stats.total_norm.item() == pytest.approx(1e39 / 2**16)


def test_grad_scaler_stats_name_the_parameters():
    params = {name: torch.nn.Parameter(torch.ones(2)) for name in "abc"}
    scaler = fastclip.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    for given, wanted in ((params.items(), "c"), (params.values(), "param_groups[0].params[2]")):
        optimizer = SGD(given, lr=0.1)
        for p in params.values():
            p.grad = None
        params["c"].grad = torch.full((2,), NAN)
        scaler.step(optimizer)
        assert [t.name for t in scaler.stats.worst()] == [wanted]


def test_grad_scaler_growth_backoff_and_new_scale_match_torch():
    scalers = [kind("cpu", init_scale=2.0**8) for kind in (torch.amp.GradScaler, fastclip.GradScaler)]
    for scaler in scalers:
        params = [torch.nn.Parameter(torch.ones(2))]
        optimizer = SGD(params, lr=0.1)
        scaler.set_growth_interval(2)
        scaler.set_backoff_factor(0.25)
        for value in (1.0, 1.0, INF, 1.0, NAN):
            loss = scaler.scale(params[0].sum())
            loss.backward()
            params[0].grad.fill_(value)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        scaler.scale(params[0].sum()).backward()
        scaler.step(optimizer)
        scaler.update(new_scale=16.0)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert scalers[1].overflows == 2
    loaded = fastclip.GradScaler("cpu")
    loaded.load_state_dict(scalers[0].state_dict())
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(loaded.state_dict())
    assert back.state_dict() == scalers[0].state_dict()


def test_grad_scaler_raises_errors_of_torch():
    params, optimizer, scaler = training.scaled(kind=fastclip.GradScaler)
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: None)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer)
    scaler.update()
    for p in params:
        p.grad = None
    with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
        scaler.step(optimizer)


def test_grad_scaler_counts_consecutive_overflows():
    params, optimizer, scaler = training.scaled(scale=1024.0, kind=fastclip.GradScaler)
    assert (scaler.overflows, scaler.consecutive_overflows, scaler.stats) == (0, 0, None)
    seen = []
    for value in (INF, INF, 1.0, NAN, INF, NAN):
        for p in params:
            p.grad = torch.full_like(p, value)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.overflows, scaler.consecutive_overflows))
        scaler.scale(torch.zeros(()))
    assert seen == [(1, 1), (2, 2), (2, 0), (3, 1), (4, 2), (5, 3)]
    assert pickle.loads(pickle.dumps(scaler)).overflows == 5
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


def test_grad_scaler_warns_once_below_one_and_raises_at_zero():
    params, optimizer, scaler = training.scaled(scale=4.0, kind=fastclip.GradScaler)
    scales = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(
            RuntimeError, match=r"loss scale has fallen to 0 after (\d+) overflows, \1 of them"
        ):
            for _ in range(200):
                for p in params:
                    p.grad = torch.full_like(p, NAN)
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
    assert scales[:4] == [2.0, 1.0, 0.5, 0.25] and min(scales) > 0
    messages = [str(w.message) for w in caught if "loss scale" in str(w.message)]
    assert len(messages) == 1 and "has fallen to 0.5, below 1, after 3 overflows" in messages[0]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_scale_of_zero_not_yet_read_skips_steps(attached, fused, monkeypatch):
    """As on a GPU, where it is seen one update late. 0 * (1 / 0) is NaN; torch's scaler applies it."""
    monkeypatch.setattr(_AsyncScalar, "read", lambda self, number: None)
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([p], lr=1.0, fused=fused)
    scaler = fastclip.GradScaler("cpu", init_scale=2.0**-149)
    if attached:
        fastclip.attach(optimizer, 1.0, scaler=scaler)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(p.sum()).backward()
        if step == 0:
            p.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0 and (p == 1).all()


def test_async_scalar_reads_a_gpu_number_one_call_late(monkeypatch):
    """The order of events; no GPU is here."""

    class Event:
        arrived = False

        def query(self):
            return Event.arrived

        def record(self):
            pass

    class OnCuda:
        def __init__(self, value):
            self.value, self.dtype = torch.tensor(value), torch.float32
            self.device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: torch.zeros(*a, **k))
    late = _AsyncScalar()
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, non_blocking: self.fill_(other.value))
    assert late.read(OnCuda(3.0)) is None
    assert late.read(OnCuda(2.0)) is None  # not arrived: not waited for
    Event.arrived = True
    assert late.read(OnCuda(1.0)) == 3.0
    assert late.read(OnCuda(0.0)) == 1.0
