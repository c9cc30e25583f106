# SPDX-License-Identifier: BSD-3-Clause
"""Attached optimizers and loss scalers: every combination gives torch's unscale_, clip and step."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW

import fastclip
from fastclip.optim import step_plan
from helpers import training
from helpers.cases import INF, NAN, assert_bitwise_equal
from helpers.training import MAX_NORM, OPTIMIZERS, TorchRun

STEPS = 50


WAYS = [
    "torch",  # plain scaler, attach is not given it
    "torch_given",  # attach(scaler=)
    "torch_unscale",  # unscale_ before step
    "fastclip",
    "fastclip_given",
    "fastclip_unscale",
    "clip_torch",  # no attach: clip_grad_norm_(scaler=, optimizer=)
    "clip_fastclip",
]


class ShadowScaler:
    """torch's scaler with torch's plain SGD, fed with the same gradients: what the scale has to be."""

    def __init__(self, **options):
        self.scaler = torch.amp.GradScaler("cpu", **{**training.SCALER_OPTIONS, **options})
        self.optimizer = SGD(training.parameters(), lr=0.0)

    def step(self, grads):
        self.scaler.scale(torch.zeros(()))
        training.set_gradients(self.optimizer.param_groups[0]["params"], grads, self.scaler.get_scale())
        self.scaler.step(self.optimizer)
        self.scaler.update()


# `make test` takes these, which cover every kind of step; the others are slow together.
QUICK = {"adamw_fused", "sgd_fused", "adamw_partly_fused", "sgd_foreach"}


def cases_of_steps() -> list:
    """Optimizer, way, and whether the host knows the flag: only a fused kernel can go without that."""
    cases = []
    for name in OPTIMIZERS:
        for way in WAYS:
            if way.startswith("clip") and name.startswith("sgd_fused"):
                continue  # not attached: torch's kernel leaves memory as it found it in a skipped first step
            slow = [pytest.mark.slow] * (name not in QUICK)
            cases.append(pytest.param(name, way, True, marks=slow))
            if name in training.FUSED and not way.startswith("clip"):
                cases.append(pytest.param(name, way, False, marks=slow))
    return cases


@pytest.mark.parametrize(("name", "way", "host"), cases_of_steps())
def test_scaler_step_matches_torch_unscale_clip_and_step(name, way, host, monkeypatch):
    if not host:
        monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    gold, shadow = TorchRun(name), ShadowScaler()
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = training.make_scaler(way)
    handle = None
    if not way.startswith("clip"):
        handle = fastclip.attach(optimizer, MAX_NORM, scaler=scaler if "given" in way else None)
    # Only a plain scaler that attach was not given can skip a step unseen, by not calling it.
    unseen = way in ("torch", "torch_unscale") and not hasattr(optimizer, "_step_supports_amp_scaling")
    for step, grads in enumerate(training.gradients(STEPS), 1):
        scaler.scale(torch.zeros(()))
        total_norm = gold.step(grads)
        training.set_gradients(params, grads, scaler.get_scale())
        if "unscale" in way:
            scaler.unscale_(optimizer)
        if handle is None:
            stats = fastclip.clip_(params, MAX_NORM, scaler=scaler, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        shadow.step(grads)
        applied = training.is_finite(grads)
        if handle is not None:
            stats = handle.stats
            assert handle.last_step_applied is (None if unseen else applied)
        if applied:
            assert stats.total_norm.item() == pytest.approx(total_norm.item(), rel=1e-6)
            assert stats.per_tensor.norm[0].item() == pytest.approx(grads[0].norm().item(), rel=1e-5)
            for p, q in zip(params, gold.params, strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=2.4e-7, atol=0)
        elif not unseen:
            assert stats.nan_count + stats.inf_count == 1
        if step in training.CHECKED:
            training.assert_same_parameters(params, gold, step)
            training.assert_same_state(optimizer, gold, step)
        assert scaler.get_scale() == shadow.scaler.get_scale()
        assert scaler._get_growth_tracker() == shadow.scaler._get_growth_tracker()
    assert scaler.state_dict() == shadow.scaler.state_dict()
    if handle is not None and not unseen:
        assert handle.skipped_steps == 5
    if "fastclip" in way:
        assert (scaler.overflows, scaler.consecutive_overflows) == (5, 0)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "error"])
@pytest.mark.parametrize("way", ["torch", "torch_given", "fastclip"])
@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_overflow_is_skipped_in_every_nonfinite_mode(name, way, nonfinite, host_knows):
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = training.make_scaler(way)
    handle = fastclip.attach(
        optimizer, MAX_NORM, nonfinite=nonfinite, scaler=scaler if "given" in way else None
    )
    scaler.scale(torch.zeros(()))
    training.set_gradients(params, next(training.gradients(1)), 64.0)
    before = [p.data.clone() for p in params]
    scaler.step(optimizer)
    scaler.update()
    assert_bitwise_equal([p.data for p in params], before)
    assert scaler.get_scale() == 32.0
    if (name, way) != ("adam_foreach", "torch"):
        assert handle.last_step_applied is False and handle.skipped_steps == 1


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused", "sgd_fused_dampened", "adagrad_fused"])
@pytest.mark.parametrize("way", ["torch", "fastclip"])
def test_fused_optimizer_steps_float16_parameters(name, way, host_knows):
    """torch refuses to unscale float16 gradients; a fused kernel divides in float32."""
    params, gold_params = (training.parameters(torch.float16) for _ in range(2))
    optimizer, gold = OPTIMIZERS[name](params), OPTIMIZERS[name](gold_params)
    if way == "torch" and not getattr(optimizer, "_step_supports_amp_scaling", False):
        pytest.skip(f"torch {torch.__version__} does not leave unscaling to this kernel")
    fastclip.attach(optimizer, MAX_NORM)
    scaler = training.make_scaler(way)
    for grads in training.gradients(10, torch.float16):
        scaler.scale(torch.zeros(()))
        scale = scaler.get_scale()
        training.set_gradients(params, grads)  # as they come, scaled
        scaler.step(optimizer)
        scaler.update()
        if training.is_finite(grads):
            training.set_gradients(gold_params, grads)
            total_norm = torch.cat([g.double().flatten() / scale for g in grads]).norm()
            gold.grad_scale = (scale / (MAX_NORM / (total_norm + 1e-6)).clamp(max=1.0)).float()
            gold.found_inf = torch.zeros(())
            gold.step()
        for p, q in zip(params, gold_params, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("call", ["attach", "clip", "unscale_"])
def test_unscaling_float16_gradients_in_place_raises(call):
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = SGD([p], lr=1.0, foreach=True)
    scaler = fastclip.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    p.grad = torch.ones_like(p)
    if call == "attach":
        fastclip.attach(optimizer, 1.0)
    with pytest.raises(
        ValueError, match=r"Attempting to unscale FP16 gradients.*gradient 0 with shape \[3\]"
    ):
        if call == "clip":
            fastclip.clip_grad_norm_([p], 1.0, scaler=scaler, optimizer=optimizer)
        elif call == "unscale_":
            scaler.unscale_(optimizer)
        else:
            scaler.step(optimizer)
    assert_bitwise_equal([p.data, p.grad], [torch.ones_like(p), torch.ones_like(p)])


def test_disabled_scaler_changes_nothing():
    for way in ("torch", "fastclip"):
        gold = TorchRun("adamw_fused")
        params = training.parameters()
        optimizer = OPTIMIZERS["adamw_fused"](params)
        scaler = training.make_scaler(way, enabled=False)
        handle = fastclip.attach(optimizer, MAX_NORM, scaler=scaler)
        for grads in training.gradients(10):
            gold.step(grads)
            training.set_gradients(params, grads)
            scaler.step(optimizer)
            scaler.update()
            assert handle.last_step_applied is training.is_finite(grads)
        training.assert_same_parameters(params, gold, 10)
        assert scaler.get_scale() == 1.0 and scaler.state_dict() == {}
        optimizer.step()  # without it, too
        params2, optimizer2, _ = training.scaled()
        fastclip.clip_grad_norm_(params2, 1.0, scaler=scaler, optimizer=optimizer2)
        fastclip.clip_grad_norm_(params2, 1.0, scaler=scaler, optimizer=optimizer2)


def test_several_optimizers_share_a_scaler():
    """One overflows, the other steps; the scale falls once."""
    for attach in (False, True):
        runs = []
        for kind in (torch.amp.GradScaler, fastclip.GradScaler):
            first, second = training.parameters(), training.parameters()
            optimizers = [AdamW(first, fused=True), SGD(second, lr=0.1)]
            scaler = kind("cpu", **training.SCALER_OPTIONS)
            handles = [fastclip.attach(o, 1e9, scaler=scaler) for o in optimizers] if attach else []
            scaler.scale(torch.zeros(()))
            training.set_gradients(first, [torch.full(s, NAN) for s in training.SHAPES])
            training.set_gradients(second, [torch.ones(s) for s in training.SHAPES], 64.0)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 32.0
            assert [h.last_step_applied for h in handles] == ([False, True] if attach else [])
            for handle in reversed(handles):
                handle.detach()
            assert "step" not in vars(scaler)
            runs.append([p.data for p in (*first, *second)])
        assert_bitwise_equal(*runs)


def test_overflow_of_one_optimizer_does_not_skip_another(monkeypatch):
    """torch adds the flags up in place, in the first of them."""
    monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    first, second = training.parameters(), training.parameters()
    optimizers = [AdamW(first, fused=True), AdamW(second, fused=True)]
    scaler = training.make_scaler("fastclip")
    handles = [fastclip.attach(o, 1e9, scaler=scaler) for o in optimizers]
    scaler.scale(torch.zeros(()))
    training.set_gradients(first, [torch.ones(s) for s in training.SHAPES])
    training.set_gradients(second, [torch.full(s, INF) for s in training.SHAPES])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [h.last_step_applied for h in handles] == [True, False]
    assert [h.skipped_steps for h in handles] == [0, 1]


def test_step_method_replaced_after_attach_raises():
    """Accelerate puts the method that it found at first in the place of the present one, at every step."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([p], lr=1.0)
    found_at_first = optimizer.step
    for kind in (torch.amp.GradScaler, fastclip.GradScaler):
        scaler = kind("cpu", init_scale=4.0)
        handle = fastclip.attach(optimizer, 1.0, scaler=scaler)
        optimizer.step = found_at_first
        scaler.scale(torch.zeros(()))
        p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match="SGD.step was replaced by a method.*Attach before"):
            scaler.step(optimizer)
        handle.detach()


@pytest.mark.parametrize("way", ["torch_given", "fastclip"])
def test_gradients_unscaled_in_place_are_not_unscaled_again(way):
    """The kernel takes a scale but cannot clip by group; its first step raises and is made again."""
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = SGD([p], lr=1.0, fused=True)
    scaler = training.make_scaler(way)
    fastclip.attach(optimizer, 1e9, groups="param_group", scaler=scaler)

    def fail(*_):
        raise KeyError("half-way")

    hook = optimizer.register_step_pre_hook(fail)
    scaler.scale(torch.zeros(()))
    p.grad = torch.full_like(p, 64.0)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    hook.remove()
    scaler.step(optimizer)
    assert p.item() == 0.0


def test_deepcopy_of_an_attached_scaler_is_independent():
    params, optimizer, scaler = training.scaled(1)
    handle = fastclip.attach(optimizer, 1.0, scaler=scaler)
    other = copy.deepcopy(scaler)
    handle.detach()
    other.scale(torch.zeros(()))
    other.step(optimizer)
    other.update()
    assert params[0][0] == -1.0


def test_detach_in_order_of_attachment_restores_the_scaler():
    params, optimizer, scaler = training.scaled(1)
    other = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    handles = [fastclip.attach(o, 1.0, scaler=scaler) for o in (optimizer, other)]
    for handle in handles:
        handle.detach()
    assert "step" not in vars(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert params[0][0] == -1.0 and handles[0].stats is None


def test_step_without_the_scaler_raises():
    params, optimizer, scaler = training.scaled()
    fastclip.attach(optimizer, 1.0, scaler=scaler)
    before = [p.data.clone() for p in params]
    with pytest.raises(
        RuntimeError, match=r"not called by the scaler.*call scaler.step\(optimizer\). No parameter was"
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match="not called by the scaler given to fastclip.attach"):
        other = torch.amp.GradScaler("cpu", init_scale=8.0)
        other.scale(torch.zeros(()))
        other.step(optimizer)
    assert_bitwise_equal([p.data for p in params], before)
    with pytest.raises(RuntimeError, match="attached with a different scaler"):
        other = fastclip.GradScaler("cpu", init_scale=8.0)
        other.scale(torch.zeros(()))
        other.step(optimizer)


def test_direct_step_after_unscale_is_allowed():
    params, optimizer, scaler = training.scaled()
    handle = fastclip.attach(optimizer, 1e9, scaler=scaler)
    scaler.unscale_(optimizer)
    optimizer.step()
    assert (params[0] == -1).all() and handle.last_step_applied is True


@pytest.mark.parametrize("way", ["torch_given", "fastclip"])
@pytest.mark.parametrize("name", ["adamw_fused", "adamw_partly_fused"])
def test_scaler_step_that_raises_can_be_repeated(name, way):
    """torch leaves grad_scale behind, and would multiply it with the scale at the next step."""
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = training.make_scaler(way)
    fastclip.attach(optimizer, MAX_NORM, scaler=scaler)
    gold = TorchRun(name)
    grads = [torch.ones(s) for s in training.SHAPES]

    def fail(*_):
        raise KeyError("half-way")

    hook = optimizer.register_step_pre_hook(fail)
    scaler.scale(torch.zeros(()))
    training.set_gradients(params, grads, 64.0)
    with pytest.raises(KeyError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()
    hook.remove()
    scaler.step(optimizer)
    scaler.update()
    gold.step(grads)
    training.assert_same_parameters(params, gold, 1)


def test_float16_autocast_training_matches_torch():
    """A real model, real overflows from a scale that starts too high: the losses of torch's loop."""
    losses = []
    for mine in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
        scaler = (fastclip.GradScaler if mine else torch.amp.GradScaler)("cpu", init_scale=2.0**24)
        if mine:
            handle = fastclip.attach(optimizer, 0.5, scaler=scaler, names=model.named_parameters())
        run = []
        for step in range(30):
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (model(x).squeeze() - x.sum(1)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if not mine:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            run.append(loss.item())
        losses.append(run)
    assert losses[0][-1] < 0.8 * losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-3)
    assert scaler.overflows == handle.skipped_steps > 2
    assert handle.stats.names[0] == "0.weight"
