# SPDX-License-Identifier: BSD-3-Clause
"""Loss scaling: every way to combine a scaler with the clip gives torch's unscale_, clip and step."""

import contextlib
import copy
import math
import pickle
import warnings

import pytest
import torch
from torch.optim import SGD, AdamW

import fastclip
from fastclip.grad_scaler import _AsyncScalar
from fastclip.optim import step_plan
from helpers import training
from helpers.cases import INF, NAN, assert_bitwise_equal
from helpers.training import MAX_NORM, OPTIMIZERS, TorchRun

STEPS = 50
INIT = {"init_scale": 64.0, "growth_interval": 3, "growth_factor": 4.0}
WAYS = [
    "torch",  # plain scaler, attach is not told
    "torch_told",  # attach(scaler=)
    "torch_unscale",  # unscale_ before step
    "fastclip",
    "fastclip_told",
    "fastclip_unscale",
    "clip_torch",  # no attach: clip_grad_norm_(scaler=, optimizer=)
    "clip_fastclip",
]


@pytest.fixture(params=[True, False], ids=["host", "device"])
def host_knows(request, monkeypatch) -> bool:
    if not request.param:
        monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    return request.param


def make_scaler(way: str, **options):
    kind = fastclip.GradScaler if "fastclip" in way else torch.amp.GradScaler
    return kind("cpu", **{**INIT, **options})


class ShadowScaler:
    """torch's scaler with torch's plain SGD, fed with the same gradients: what the scale has to be."""

    def __init__(self, **options):
        self.scaler = torch.amp.GradScaler("cpu", **{**INIT, **options})
        self.optimizer = SGD(training.parameters(), lr=0.0)

    def step(self, grads):
        self.scaler.scale(torch.zeros(()))
        training.set_gradients(self.optimizer.param_groups[0]["params"], grads, self.scaler.get_scale())
        self.scaler.step(self.optimizer)
        self.scaler.update()


def cases_of_steps() -> list[tuple[str, str, bool]]:
    """Optimizer, way, and whether the host knows the flag: only a fused kernel can go without that."""
    cases = []
    for name in OPTIMIZERS:
        for way in WAYS:
            if way.startswith("clip") and name.startswith("sgd_fused"):
                continue  # not attached: torch's kernel leaves memory as it found it in a skipped first step
            cases.append((name, way, True))
            if name in training.FUSED and not way.startswith("clip"):
                cases.append((name, way, False))
    return cases


@pytest.mark.parametrize(("name", "way", "host"), cases_of_steps())
def test_step_is_torchs_unscale_clip_and_step(name, way, host, monkeypatch):
    if not host:
        monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    gold, shadow = TorchRun(name), ShadowScaler()
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = make_scaler(way)
    handle = None
    if not way.startswith("clip"):
        handle = fastclip.attach(optimizer, MAX_NORM, scaler=scaler if "told" in way else None)
    # Only a plain scaler that attach was not told of can leave a step out unseen, by not calling it.
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
@pytest.mark.parametrize("way", ["torch", "torch_told", "fastclip"])
@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_what_a_scaler_finds_is_skipped_in_every_mode(name, way, nonfinite, host_knows):
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = make_scaler(way)
    handle = fastclip.attach(
        optimizer, MAX_NORM, nonfinite=nonfinite, scaler=scaler if "told" in way else None
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
def test_float16_parameters_with_a_fused_optimizer(name, way, host_knows):
    """torch refuses to unscale float16 gradients; a fused kernel divides in float32."""
    params, gold_params = (training.parameters(torch.float16) for _ in range(2))
    optimizer, gold = OPTIMIZERS[name](params), OPTIMIZERS[name](gold_params)
    if way == "torch" and not getattr(optimizer, "_step_supports_amp_scaling", False):
        pytest.skip(f"torch {torch.__version__} does not leave unscaling to this kernel")
    fastclip.attach(optimizer, MAX_NORM)
    scaler = make_scaler(way)
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
def test_float16_gradients_are_not_unscaled_in_place(call):
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


# The functions with scaler=.


def scaled(n=2, scale=8.0, kind=torch.amp.GradScaler):
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(n)]
    optimizer = SGD(params, lr=1.0)
    scaler = kind("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    for p in params:
        p.grad = torch.full_like(p, 2.0 * scale)
    return params, optimizer, scaler


def test_the_drop_in_unscales_and_clips(backend):
    params, optimizer, scaler = scaled()
    total_norm = fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)
    assert total_norm.item() == pytest.approx(2 * math.sqrt(6))
    torch.testing.assert_close(torch.cat([p.grad for p in params]).norm(), torch.tensor(1.0))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_after_unscale_it_only_clips():
    params, optimizer, scaler = scaled()
    scaler.unscale_(optimizer)
    total_norm = fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)
    assert total_norm.item() == pytest.approx(2 * math.sqrt(6))


def test_twice_in_one_step_raises():
    params, optimizer, scaler = scaled()
    fastclip.clip_(params, 1.0, scaler=scaler, optimizer=optimizer)
    before = [p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match="already been unscaled and clipped in this step"):
        fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)
    with pytest.raises(RuntimeError, match="unscale_.. has already been called"):
        scaler.unscale_(optimizer)  # torch's own
    assert_bitwise_equal([p.grad for p in params], before)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"clipped after scaler.step\(optimizer\)"):
        fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)
    scaler.update()
    for p in params:
        p.grad = torch.ones_like(p)
    fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)  # the next step


def test_overflow_reaches_the_scaler():
    for nonfinite in ("propagate", "skip", "zero"):
        params, optimizer, scaler = scaled()
        params[1].grad[0] = INF
        fastclip.clip_grad_norm_(params, 1.0, nonfinite=nonfinite, scaler=scaler, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert all((p == 1).all() for p in params)


def test_an_error_leaves_the_scaler_as_it_was():
    params, optimizer, scaler = scaled()
    params[1].grad[0] = INF
    for options in ({"nonfinite": "error"}, {"error_if_nonfinite": True}):
        with pytest.raises(RuntimeError, match="No gradient was changed|no gradient was changed"):
            fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer, **options)
    assert params[0].grad[0] == 16.0
    scaler.step(optimizer)  # unscales and finds it by itself
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_mistaken_combinations():
    params, optimizer, scaler = scaled()
    with pytest.raises(TypeError, match="expected scaler and optimizer together.*got only scaler"):
        fastclip.clip_grad_norm_(params, 1.0, scaler=scaler)
    with pytest.raises(TypeError, match="got only optimizer"):
        fastclip.clip_(params, 1.0, optimizer=optimizer)
    with pytest.raises(TypeError, match="expected scaler to be a torch.amp.GradScaler, but got float"):
        fastclip.clip_grad_norm_(params, 1.0, scaler=2.0, optimizer=optimizer)
    with pytest.raises(ValueError, match="1 of its 2 gradients are missing and 0 are not its"):
        fastclip.clip_grad_norm_(params[:1], 1.0, scaler=scaler, optimizer=optimizer)
    never_scaled = torch.amp.GradScaler("cpu")
    with pytest.raises(AssertionError, match="_scale is None"):
        fastclip.clip_grad_norm_(params, 1.0, scaler=never_scaled, optimizer=optimizer)
    assert all((p.grad == 16).all() for p in params)


def test_a_disabled_scaler_changes_nothing():
    for way in ("torch", "fastclip"):
        gold = TorchRun("adamw_fused")
        params = training.parameters()
        optimizer = OPTIMIZERS["adamw_fused"](params)
        scaler = make_scaler(way, enabled=False)
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
        params2, optimizer2, _ = scaled()
        fastclip.clip_grad_norm_(params2, 1.0, scaler=scaler, optimizer=optimizer2)
        fastclip.clip_grad_norm_(params2, 1.0, scaler=scaler, optimizer=optimizer2)


# The scaler itself.


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_without_attach_it_is_torchs_scaler(name):
    """Bit for bit: parameters, gradients, scale, also with unscale_ and on overflow."""
    runs = []
    for kind in (torch.amp.GradScaler, fastclip.GradScaler):
        params = training.parameters()
        optimizer = OPTIMIZERS[name](params)
        scaler = kind("cpu", **INIT)
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


def test_several_optimizers_share_a_scaler():
    """One overflows, the other steps; the scale falls once."""
    for attach in (False, True):
        runs = []
        for kind in (torch.amp.GradScaler, fastclip.GradScaler):
            first, second = training.parameters(), training.parameters()
            optimizers = [AdamW(first, fused=True), SGD(second, lr=0.1)]
            scaler = kind("cpu", **INIT)
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


def test_the_flag_of_one_optimizer_is_not_that_of_another(monkeypatch):
    """torch adds the flags up in place, in the first of them."""
    monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    first, second = training.parameters(), training.parameters()
    optimizers = [AdamW(first, fused=True), AdamW(second, fused=True)]
    scaler = make_scaler("fastclip")
    handles = [fastclip.attach(o, 1e9, scaler=scaler) for o in optimizers]
    scaler.scale(torch.zeros(()))
    training.set_gradients(first, [torch.ones(s) for s in training.SHAPES])
    training.set_gradients(second, [torch.full(s, INF) for s in training.SHAPES])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert [h.last_step_applied for h in handles] == [True, False]
    assert [h.skipped_steps for h in handles] == [0, 1]


def test_finite_gradients_whose_scaled_norm_is_not():
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


def test_a_step_replaced_after_attach_is_told():
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


@pytest.mark.parametrize("way", ["torch_told", "fastclip"])
def test_gradients_unscaled_in_place_are_not_unscaled_again(way):
    """The kernel takes a scale but cannot clip by group; its first step raises and is made again."""
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = SGD([p], lr=1.0, fused=True)
    scaler = make_scaler(way)
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


def test_the_scaler_names_parameters_by_their_optimizer():
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


def test_two_clips_after_unscale_are_the_users_affair():
    params, optimizer, scaler = scaled()
    scaler.unscale_(optimizer)
    for p in params:  # each with a norm of its own
        fastclip.clip_grad_norm_([p], 1.0, scaler=scaler, optimizer=optimizer)
        assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_copies_of_a_scaler_are_on_their_own():
    params, optimizer, scaler = scaled(1)
    handle = fastclip.attach(optimizer, 1.0, scaler=scaler)
    other = copy.deepcopy(scaler)
    handle.detach()
    other.scale(torch.zeros(()))
    other.step(optimizer)
    other.update()
    assert params[0][0] == -1.0


def test_detaching_in_the_other_order_leaves_working_scalers():
    params, optimizer, scaler = scaled(1)
    other = SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    handles = [fastclip.attach(o, 1.0, scaler=scaler) for o in (optimizer, other)]
    for handle in handles:
        handle.detach()
    assert "step" not in vars(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert params[0][0] == -1.0 and handles[0].stats is None


def test_growth_backoff_and_set_scale_are_torchs():
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


def test_torchs_own_errors_stay():
    params, optimizer, scaler = scaled(kind=fastclip.GradScaler)
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


def test_consecutive_overflows():
    params, optimizer, scaler = scaled(scale=1024.0, kind=fastclip.GradScaler)
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


def test_a_scale_below_one_warns_once_and_zero_raises():
    params, optimizer, scaler = scaled(scale=4.0, kind=fastclip.GradScaler)
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
def test_a_scale_of_zero_not_yet_noticed_applies_nothing(attached, fused, monkeypatch):
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


def test_a_number_from_a_gpu_is_read_one_call_late(monkeypatch):
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


# Scalers and attach, used wrongly.


def test_a_step_that_passes_the_scaler_by():
    params, optimizer, scaler = scaled()
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


def test_after_unscale_a_direct_step_is_no_mistake():
    params, optimizer, scaler = scaled()
    handle = fastclip.attach(optimizer, 1e9, scaler=scaler)
    scaler.unscale_(optimizer)
    optimizer.step()
    assert (params[0] == -1).all() and handle.last_step_applied is True


@pytest.mark.parametrize("way", ["torch_told", "fastclip"])
@pytest.mark.parametrize("name", ["adamw_fused", "adamw_partly_fused"])
def test_a_step_that_raises_under_a_scaler(name, way):
    """torch leaves grad_scale behind, and would multiply it with the scale at the next step."""
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    scaler = make_scaler(way)
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


def test_float16_autocast_end_to_end():
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
