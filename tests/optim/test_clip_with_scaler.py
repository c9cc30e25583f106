# SPDX-License-Identifier: BSD-3-Clause
"""clip_grad_norm_ and clip_ with scaler= and optimizer=."""

import math

import pytest
import torch

import fastclip
from helpers import training
from helpers.cases import INF, assert_bitwise_equal


def test_clip_grad_norm_with_scaler_unscales_and_clips(backend):
    params, optimizer, scaler = training.scaled()
    total_norm = fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)
    assert total_norm.item() == pytest.approx(2 * math.sqrt(6))
    torch.testing.assert_close(torch.cat([p.grad for p in params]).norm(), torch.tensor(1.0))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_clip_grad_norm_after_unscale_only_clips():
    params, optimizer, scaler = training.scaled()
    scaler.unscale_(optimizer)
    total_norm = fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer)
    assert total_norm.item() == pytest.approx(2 * math.sqrt(6))


def test_two_clips_after_unscale_are_allowed():
    params, optimizer, scaler = training.scaled()
    scaler.unscale_(optimizer)
    for p in params:  # each with a norm of its own
        fastclip.clip_grad_norm_([p], 1.0, scaler=scaler, optimizer=optimizer)
        assert p.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_clip_twice_in_one_step_raises():
    params, optimizer, scaler = training.scaled()
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


def test_clip_reports_overflow_to_the_scaler():
    for nonfinite in ("propagate", "skip", "zero"):
        params, optimizer, scaler = training.scaled()
        params[1].grad[0] = INF
        fastclip.clip_grad_norm_(params, 1.0, nonfinite=nonfinite, scaler=scaler, optimizer=optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        assert all((p == 1).all() for p in params)


def test_clip_that_raises_leaves_the_scaler_as_it_was():
    params, optimizer, scaler = training.scaled()
    params[1].grad[0] = INF
    for options in ({"nonfinite": "error"}, {"error_if_nonfinite": True}):
        with pytest.raises(RuntimeError, match="No gradient was changed|no gradient was changed"):
            fastclip.clip_grad_norm_(params, 1.0, scaler=scaler, optimizer=optimizer, **options)
    assert params[0].grad[0] == 16.0
    scaler.step(optimizer)  # unscales and finds it by itself
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_clip_raises_on_mistaken_scaler_and_optimizer():
    params, optimizer, scaler = training.scaled()
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
