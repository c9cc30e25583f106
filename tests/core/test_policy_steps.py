# SPDX-License-Identifier: BSD-3-Clause
"""Policies as max_norm: in clip_grad_norm_, clip_ and attach and with groups."""

import math

import pytest
import torch
from torch.optim import SGD, AdamW

import fastclip
from fastclip.backends import native
from fastclip.optim import step_plan
from fastclip.policies import AdaGC, Policy, SpikeSkip, TrailingPercentile, ZClip
from helpers import policy_oracles as oracles
from helpers import training
from helpers.cases import INF, NAN, assert_bitwise_equal

STEPS = 300
SHAPES = ((20, 10), (), (300,))
OPTIMIZERS = {
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9),
}
GLOBAL = {
    "percentile": (
        lambda: TrailingPercentile(90, 50, 10),
        lambda n: oracles.percentile_limits(n, 90, 50, 10),
    ),
    "zclip": (lambda: ZClip(), oracles.zclip_limits),
    "zclip_unbounded": (
        lambda: ZClip(max_grad_norm=None),
        lambda n: oracles.zclip_limits(n, max_grad_norm=None),
    ),
}


@pytest.fixture(params=[True, False], ids=["host", "device"])
def host_knows(request, monkeypatch) -> bool:
    """With False the flag and the coefficient stay where they are, as on a GPU, and the kernel decides."""
    if not request.param:
        monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    return request.param


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]


def gradients_of(norm: float, step: int, shapes=SHAPES) -> list[torch.Tensor]:
    """Gradients with this norm; for NaN and Inf with one such element."""
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    total = torch.stack([g.norm() for g in grads]).norm()
    if math.isfinite(norm):
        return [(g / total * norm).float() for g in grads]
    grads[1].fill_(norm)
    return [g.float() for g in grads]


def norm_of(grads) -> float:
    return torch.stack([g.double().norm() for g in grads]).norm().float().item()


def assert_close(params, others):
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("rule", GLOBAL)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attached_policy_matches_its_formula(name, rule, host_knows):
    """Every step is torch's with the coefficient of the published rule."""
    make, oracle = GLOBAL[rule]
    params, others = parameters(), parameters()
    optimizer, gold = OPTIMIZERS[name](params), OPTIMIZERS[name](others)
    policy = make()
    handle = fastclip.attach(optimizer, 1.0)
    handle.max_norm = policy
    lists = [gradients_of(norm, step) for step, norm in enumerate(oracles.series(STEPS))]
    norms = [norm_of(grads) for grads in lists]
    clipped = 0
    for grads, norm, limit in zip(lists, norms, oracle(norms), strict=True):
        training.set_gradients(params, grads)
        optimizer.step()
        assert handle.last_step_applied is math.isfinite(norm)
        if math.isfinite(norm):
            coefficient = oracles.coefficient(norm, limit)
            clipped += coefficient < 1
            training.set_gradients(others, grads, coefficient)
            gold.step()
            assert handle.stats.clip_coef.item() == pytest.approx(coefficient, rel=1e-5)
            assert handle.stats.total_norm.item() == pytest.approx(norm, rel=1e-6)
        assert policy.threshold.item() == pytest.approx(limit, rel=1e-5)
    assert clipped > 2
    assert handle.skipped_steps == sum(not math.isfinite(norm) for norm in norms)
    assert_close(params, others)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_attached_adagc_matches_its_formula(name, host_knows):
    """One factor a gradient, of norms down to 1e-8, which torch's 1e-6 would clip a hundredfold each time."""
    params, others = parameters(), parameters()
    optimizer, gold = OPTIMIZERS[name](params), OPTIMIZERS[name](others)
    handle = fastclip.attach(optimizer, AdaGC(warmup_steps=20), names=list(zip("abc", params, strict=True)))
    sizes = (1.0, 1e-8, 30.0)
    lists = []
    for step, norm in enumerate(oracles.series(STEPS, 1)):
        grads = [g * s for g, s in zip(gradients_of(norm, step), sizes, strict=True)]
        lists.append(grads)
    rows = [[g.double().norm().item() for g in grads] for grads in lists]
    for grads, row, limits in zip(lists, rows, oracles.adagc_limits(rows, warmup_steps=20), strict=True):
        training.set_gradients(params, grads)
        optimizer.step()
        finite = all(map(math.isfinite, row))
        assert handle.last_step_applied is finite
        if finite:
            coefficients = [oracles.coefficient(n, limit) for n, limit in zip(row, limits, strict=True)]
            for p, q, g, c in zip(params, others, grads, coefficients, strict=True):
                q.grad = g * c
                torch.testing.assert_close(p.grad, q.grad, rtol=3e-6, atol=0)
            gold.step()
            assert handle.stats.clip_coef.tolist() == pytest.approx(coefficients, rel=3e-6)
            assert handle.stats.total_norm.shape == ()
    assert_close(params, others)
    assert handle.stats.names == ["a", "b", "c"]


def test_adagc_does_not_shrink_a_steady_tiny_gradient():
    """With torch's 1e-6 in the coefficient its limit would fall to 0, and the parameter would stand still."""
    p = torch.nn.Parameter(torch.ones(4))
    policy = AdaGC(warmup_steps=1)
    for _ in range(60):
        p.grad = torch.full((4,), 5e-9)
        stats = fastclip.clip_([p], policy)
        assert stats.clip_coef.tolist() == [1.0] and p.grad.tolist() == [torch.tensor(5e-9).item()] * 4
    assert policy.threshold.item() == pytest.approx(1e-8, rel=1e-6)


@pytest.mark.parametrize("way", ["clip_grad_norm_", "clip_", "clip_groups", "attach_groups"])
def test_policy_gives_the_same_coefficient_in_every_function(way):
    params = parameters()
    policy = ZClip(max_grad_norm=None, warmup_steps=5)
    optimizer = SGD(params, lr=0.0)
    groups = [0, 1, 1] if "groups" in way else None
    if way == "attach_groups":
        handle = fastclip.attach(optimizer, policy, groups=groups)
    lists = [gradients_of(norm, step) for step, norm in enumerate(oracles.series(100, 2))]
    parts = [[0], [1, 2]] if groups else [[0, 1, 2]]
    columns = [[norm_of([grads[i] for i in part]) for grads in lists] for part in parts]
    limits = [oracles.zclip_limits(column, max_grad_norm=None, warmup_steps=5) for column in columns]
    for step, grads in enumerate(lists):
        training.set_gradients(params, grads)
        given = [p.grad.clone() for p in params]
        if way == "attach_groups":
            optimizer.step()
            assert handle.stats.total_norm.shape == (2,)
        elif way == "clip_grad_norm_":
            fastclip.clip_grad_norm_(params, policy, nonfinite="skip")
        else:
            fastclip.clip_(params, policy, nonfinite="skip", groups=groups)
        if not all(math.isfinite(column[step]) for column in columns):
            assert_bitwise_equal([p.grad for p in params], given)
            continue
        for part, column, limit in zip(parts, columns, limits, strict=True):
            for i in part:
                wanted = grads[i] * oracles.coefficient(column[step], limit[step])
                torch.testing.assert_close(params[i].grad, wanted, rtol=1e-5, atol=0)


class Fixed(Policy):
    """A class of a user, with the least that it needs."""

    def __init__(self, answer, per_tensor=False):
        self.answer = answer
        self.per_tensor = per_tensor

    def limit(self, total_norm, norms):
        self.seen = total_norm.clone(), norms.clone()
        return self.answer


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "error", "skip"])
def test_policy_applies_the_nonfinite_modes(nonfinite, per_tensor):
    for bad in (0.0, INF, NAN):
        p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))
        p.grad, q.grad = torch.tensor([3.0, bad]), torch.tensor([4.0])
        before = [p.grad.clone(), q.grad.clone()]
        policy = Fixed(torch.tensor([1.0]), per_tensor)
        if nonfinite == "error" and bad != 0:
            with pytest.raises(
                RuntimeError, match=r"parameters\[0\] \(. NaN, . Inf\)\. No gradient was changed"
            ):
                fastclip.clip_([p, q], policy, nonfinite=nonfinite)
        else:
            stats = fastclip.clip_([p, q], policy, nonfinite=nonfinite)
            assert stats.found_inf.item() == (bad != 0)
        if nonfinite in ("skip", "error") and bad != 0:
            assert_bitwise_equal([p.grad, q.grad], before)
        elif nonfinite == "zero" or bad == 0:
            wanted = ([1.0, 0.0], [1.0]) if per_tensor else ([0.6, 0.0], [0.8])
            torch.testing.assert_close((p.grad, q.grad), tuple(map(torch.tensor, wanted)))
            assert policy.seen[0].tolist() == [5.0] and policy.seen[1].tolist() == [3.0, 4.0]
        elif bad != bad:
            assert p.grad.isnan().all() and q.grad.isnan().all() != per_tensor
        else:
            assert p.grad[0] == 0 and p.grad[1].isnan() and q.grad.item() == float(per_tensor)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_policy_reads_gradients_once_and_writes_only_if_it_clips(name, native_only, monkeypatch):
    calls = []
    for function in ("grad_stats", "scale_", "clip_"):
        real = getattr(native, function)
        monkeypatch.setattr(
            native, function, lambda *a, f=function, r=real, **k: calls.append(f) or r(*a, **k)
        )
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    handle = fastclip.attach(optimizer, Fixed(torch.tensor([5.0])))
    for norm, wanted in ((1.0, ["grad_stats"]), (9.0, ["grad_stats", "scale_"])):
        training.set_gradients(params, gradients_of(norm, 0))
        versions = [p.grad._version for p in params]
        calls.clear()
        optimizer.step()
        assert handle.stats.total_norm.item() == pytest.approx(norm)
        assert calls == (wanted[:1] if name == "adamw_fused" else wanted)
        if norm < 5:
            assert [p.grad._version for p in params] == versions


@pytest.mark.parametrize("make", [ZClip, AdaGC, TrailingPercentile, SpikeSkip])
def test_policy_works_in_a_compiled_function(native_only, make):
    """In one graph, with the state changed by it."""
    torch._dynamo.reset()  # torch gives up on a function that other tests have compiled eight times
    params, policy, gold = parameters(), make(), make()
    compiled = torch.compile(fastclip.clip_grad_norm_, backend="eager", fullgraph=True)
    for step in range(5):
        for call, used in ((compiled, policy), (fastclip.clip_grad_norm_, gold)):
            training.set_gradients(params, gradients_of(3.0 * step, step))
            total_norm = call(params, used, nonfinite="skip")
            assert total_norm.item() == pytest.approx(3.0 * step)
        assert_bitwise_equal(policy.threshold, gold.threshold)


def test_policy_raises_on_mistakes():
    params = parameters()
    training.set_gradients(params, gradients_of(1.0, 0))
    optimizer = SGD(params, lr=0.1)
    for call in (
        lambda: fastclip.clip_(params, AdaGC(), groups="tensor"),
        lambda: fastclip.attach(optimizer, AdaGC(), groups="param_group"),
    ):
        with pytest.raises(ValueError, match="expected groups=None together with AdaGC"):
            call()
    for call in (
        lambda: fastclip.clip_grad_norm_(params, SpikeSkip()),
        lambda: fastclip.clip_(params, SpikeSkip(), nonfinite="propagate"),
        lambda: fastclip.attach(optimizer, SpikeSkip(), nonfinite="propagate"),
    ):
        with pytest.raises(ValueError, match="nonfinite='skip' together with SpikeSkip, .* got 'propagate'"):
            call()
    for answer, error, message in (
        (1.0, TypeError, r"expected Fixed\.limit\(\) to return a Tensor, but got float"),
        (torch.ones(2), ValueError, r"one element or 1, one a group, but got shape \[2\]"),
    ):
        with pytest.raises(error, match=message):
            fastclip.clip_(params, Fixed(answer))
    handle = fastclip.attach(optimizer, ZClip(), nonfinite="zero")
    handle.max_norm = SpikeSkip()
    with pytest.raises(ValueError, match="nonfinite='skip' together with SpikeSkip, .* got 'zero'"):
        optimizer.step()
