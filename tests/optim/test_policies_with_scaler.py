# SPDX-License-Identifier: BSD-3-Clause
"""Policies beside a loss scaler: true norms, and a skip by a policy is no overflow."""

import math

import pytest
import torch
from torch.optim import SGD, AdamW

import fastclip
from fastclip.policies import AdaGC, SpikeSkip, TrailingPercentile, ZClip
from helpers import training
from helpers.cases import NAN, assert_bitwise_equal

OPTIMIZERS = {
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd_fused": lambda p: SGD(p, lr=0.01, momentum=0.9, dampening=0.5, fused=True),
    "sgd": lambda p: SGD(p, lr=0.01, momentum=0.9),
}
SCALERS = {
    "torch": lambda **options: torch.amp.GradScaler("cpu", **options),
    "fastclip": lambda **options: fastclip.GradScaler("cpu", **options),
}


def made(name):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in ((8, 4), (5,))]
    return params, OPTIMIZERS[name](params)


def gradients(step: int, size: float = 1.0):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(s, generator=generator) * size for s in ((8, 4), (5,))]


def run(scaler, optimizer, params, grads, unscale=False):
    training.set_gradients(params, grads, scaler.scale(torch.ones(())).item())
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("way", SCALERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_policy_skip_leaves_the_scale_as_it_is(name, way, unscale, host_knows):
    params, optimizer = made(name)
    scaler = SCALERS[way](init_scale=1024.0, growth_interval=1000)
    policy = SpikeSkip(window=20, minimum=10)
    handle = fastclip.attach(optimizer, policy, scaler=scaler)
    applied = []
    for step in range(40):
        size = {15: 50.0, 16: 50.0, 30: NAN, 31: 50.0}.get(step, 1.0)
        before = [p.detach().clone() for p in params]
        state = {key: t.clone() for p in params for key, t in optimizer.state.get(p, {}).items()}
        run(scaler, optimizer, params, gradients(step, size), unscale)
        changed = any(not torch.equal(p, q) for p, q in zip(params, before, strict=True))
        assert handle.last_step_applied is changed
        if not changed and state:
            after = {key: t for p in params for key, t in optimizer.state[p].items()}
            assert_bitwise_equal(list(after.values()), list(state.values()))
        applied.append(changed)
        assert scaler.get_scale() == (1024.0 if step < 30 else 512.0)
    skipped = [step for step, changed in enumerate(applied) if not changed]
    assert skipped[0] == 15 and 30 in skipped and len(skipped) <= 4
    assert handle.skipped_steps == len(skipped)
    if way == "fastclip":
        assert scaler.overflows == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_spike_skip_skips_by_the_loss(name, host_knows):
    params, optimizer = made(name)
    scaler = fastclip.GradScaler("cpu", init_scale=16.0)
    handle = fastclip.attach(optimizer, SpikeSkip(window=20, minimum=10), scaler=scaler)
    for step in range(12):
        handle.max_norm.observe_loss(torch.tensor(2.0 + 0.01 * step + (step == 11)))
        run(scaler, optimizer, params, gradients(0))
        assert handle.last_step_applied is (step != 11)
    assert scaler.get_scale() == 16.0 and handle.stats.found_inf == 1 and handle.stats.clip_coef.isnan()


@pytest.mark.parametrize("make", [lambda: ZClip(warmup_steps=3), lambda: TrailingPercentile(50, 9, 3), AdaGC])
@pytest.mark.parametrize("way", [*SCALERS, "clip_grad_norm_", "clip_"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_policies_get_true_norms(name, way, make):
    """The run with a scaler is the run without, but for the rounding of a power of two: none."""
    params, optimizer = made(name)
    others, gold = made(name)
    policy, alone = make(), make()
    scaler = SCALERS.get(way, SCALERS["torch"])(init_scale=256.0, growth_interval=4)
    in_step = way in SCALERS
    if in_step:
        fastclip.attach(optimizer, policy, scaler=scaler)
    fastclip.attach(gold, alone)
    for step in range(15):
        grads = gradients(step, 0.5 + 0.3 * step)
        if step == 6:
            grads[0][0, 0] = math.inf
        training.set_gradients(others, grads)
        gold.step()
        if in_step:
            run(scaler, optimizer, params, grads)
            continue
        training.set_gradients(params, grads, scaler.scale(torch.ones(())).item())
        getattr(fastclip, way)(params, policy, scaler=scaler, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(policy.threshold, alone.threshold, rtol=1e-6, atol=0)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_clip_with_scaler_and_spike_skip_raises():
    """The scaler knows a skip only as an overflow, and would lower its scale."""
    params, optimizer = made("sgd")
    scaler = torch.amp.GradScaler("cpu")
    training.set_gradients(params, gradients(0), scaler.scale(torch.ones(())).item())
    for call in (fastclip.clip_grad_norm_, fastclip.clip_):
        with pytest.raises(ValueError, match=r"SpikeSkip skips steps, .* use fastclip\.attach"):
            call(params, SpikeSkip(), nonfinite="skip", scaler=scaler, optimizer=optimizer)
    off = torch.amp.GradScaler("cpu", enabled=False)
    fastclip.clip_(params, SpikeSkip(), nonfinite="skip", scaler=off, optimizer=optimizer)


def test_clip_that_skips_leaves_the_gradients():
    params, _ = made("sgd")
    policy = SpikeSkip(window=10, minimum=5, max_norm=0.5)
    for step in range(10):
        training.set_gradients(params, gradients(0, 30.0 if step == 9 else 1.0))
        before = [p.grad.clone() for p in params]
        stats = fastclip.clip_(params, policy, nonfinite="skip", groups="tensor")
        norms = torch.stack([p.grad.norm() for p in params])
        if step < 9:
            assert stats.found_inf == 0
            torch.testing.assert_close(norms, torch.full((2,), 0.5))
    assert stats.found_inf == 1 and stats.nan_count == 0
    assert_bitwise_equal([p.grad for p in params], before)
