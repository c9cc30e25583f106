# SPDX-License-Identifier: BSD-3-Clause
"""attach and the loss scaler on a GPU: nothing waits for it, a step is skipped by the kernel itself."""

import pytest
import torch
from torch.optim import SGD, AdamW

import fastclip
from helpers.cases import NAN

pytestmark = pytest.mark.gpu

GPU = "cuda"


@pytest.fixture
def no_waiting():
    """From here on a synchronisation that torch knows of raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(n, generator=generator).to(GPU)) for n in (1000, 3, 70_000)]


def set_gradients(params, step: int, scale: float) -> bool:
    """Whether they are finite."""
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(GPU)
    if step in (0, 1, 5):
        params[2].grad[12_345] = NAN
    return step not in (0, 1, 5)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adamw_foreach"])
@pytest.mark.parametrize("way", ["none", "torch", "fastclip"])
def test_attached_steps_match_torch(kind, way):
    make = {
        "adamw": lambda p: AdamW(p, lr=1e-2, fused=True),
        "sgd": lambda p: SGD(p, lr=1e-2, momentum=0.9, fused=True),
        "adamw_foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    }[kind]
    mine, theirs = parameters(), parameters()
    optimizer, gold = make(mine), make(theirs)
    scaler = None
    if way != "none":
        kind_of_scaler = torch.amp.GradScaler if way == "torch" else fastclip.GradScaler
        scaler = kind_of_scaler(GPU, init_scale=256.0, growth_interval=3)
        scaler.scale(torch.zeros((), device=GPU))
    handle = fastclip.attach(optimizer, 1.0, scaler=scaler)
    for step in range(10):
        finite = set_gradients(mine, step, scaler.get_scale() if scaler else 1.0)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        set_gradients(theirs, step, 1.0)
        if finite:
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            gold.step()
        assert handle.last_step_applied is finite
        for p, q in zip(mine, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert handle.skipped_steps == 3
    if way == "fastclip":
        assert scaler.overflows == 3


@pytest.mark.parametrize("kind", [AdamW, SGD])
@pytest.mark.parametrize("scaled", [False, True])
def test_attached_step_does_not_wait_for_the_gpu(kind, scaled, no_waiting):
    params = parameters()
    optimizer = kind(params, lr=1e-2, fused=True, **({"momentum": 0.9} if kind is SGD else {}))
    scaler = fastclip.GradScaler(GPU, init_scale=256.0, enabled=scaled)
    handle = fastclip.attach(optimizer, 1.0, scaler=scaler)
    for step in range(4):
        scaler.scale(torch.zeros((), device=GPU))
        set_gradients(params, step, 256.0 if scaled else 1.0)
        torch.cuda.synchronize()
        no_waiting()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.set_sync_debug_mode("default")
    assert handle.skipped_steps == 2
    assert all(p.isfinite().all() for p in params)
    assert all(s["momentum_buffer"].isfinite().all() for s in optimizer.state.values() if kind is SGD)


def test_captured_step_skips_on_each_replay():
    """Replays that skip and replays that do not, decided on the GPU each time."""
    params = parameters()
    optimizer = AdamW(params, lr=1e-2, fused=True, capturable=True)
    handle = fastclip.attach(optimizer, 1.0)
    grads = [torch.ones_like(p) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    grads[0][7] = NAN
    before = [p.detach().clone() for p in params]
    graph.replay()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert handle.last_step_applied is False
    for g in grads:
        g.fill_(1.0)
    graph.replay()
    assert not any(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    assert handle.last_step_applied is True


def test_capturing_a_foreach_step_raises():
    params = parameters()
    optimizer = AdamW(params, lr=1e-2, foreach=True, capturable=True)
    fastclip.attach(optimizer, 1.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="fused optimizer or nonfinite='propagate'"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()


def test_scale_below_one_warns_one_update_late():
    params = parameters()
    optimizer = SGD(params, lr=1e-2, fused=True)
    scaler = fastclip.GradScaler(GPU, init_scale=2.0)
    fastclip.attach(optimizer, 1.0, scaler=scaler)
    with pytest.warns(UserWarning, match="below 1"):
        for _ in range(4):
            scaler.scale(torch.zeros((), device=GPU))
            set_gradients(params, 0, 1.0)
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.synchronize()
