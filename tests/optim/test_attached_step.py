# SPDX-License-Identifier: BSD-3-Clause
"""The step of an attached optimizer equals torch's clip and step, for every kind of optimizer."""

import math
import subprocess
import sys

import pytest
import torch
from torch.optim import SGD, Adam

import fastclip
from fastclip.optim import step_plan
from helpers import training
from helpers.cases import INF, NAN, assert_bitwise_equal
from helpers.training import MAX_NORM, OPTIMIZERS, TorchRun

STEPS = 50


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_matches_torch_clip_and_step(name, host_knows):
    gold = TorchRun(name)
    params, optimizer, handle = training.attached(name)
    skipped = 0
    for step, grads in enumerate(training.gradients(STEPS), 1):
        total_norm = gold.step(grads)
        training.set_gradients(params, grads)
        optimizer.step()
        applied = training.is_finite(grads)
        skipped += not applied
        assert handle.last_step_applied is applied
        if applied:
            assert handle.stats.total_norm.item() == pytest.approx(total_norm.item(), rel=1e-6)
            for p, q in zip(params, gold.params, strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=2.4e-7, atol=0)
        else:
            assert_bitwise_equal([p.grad for p in params], grads)
            assert handle.stats.nan_count + handle.stats.inf_count == 1
        if step in training.CHECKED:
            training.assert_same_parameters(params, gold, step)
            training.assert_same_state(optimizer, gold, step)
    assert handle.skipped_steps == skipped == 5
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused", "adam_foreach"])
def test_step_matches_clip_grad_norm_in_other_dtypes(name, dtype, host_knows):
    """Held against fastclip's own clip, whose coefficient is not rounded to 16 bits."""
    params, gold_params = training.parameters(dtype), training.parameters(dtype)
    optimizer, gold = OPTIMIZERS[name](params), OPTIMIZERS[name](gold_params)
    fastclip.attach(optimizer, MAX_NORM)
    for grads in training.gradients(10, dtype):
        training.set_gradients(params, grads)
        optimizer.step()
        if training.is_finite(grads):
            training.set_gradients(gold_params, grads)
            fastclip.clip_grad_norm_(gold_params, MAX_NORM)
            gold.step()
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-13}[dtype]
    for p, q in zip(params, gold_params, strict=True):
        # torch's Adam divides 0 by 0 where the square of a small float16 gradient underflows.
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, equal_nan=True)
        torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)


# Each is a process that imports torch; `make test` runs two.
@pytest.mark.parametrize(
    "kind",
    ["Adam", "Derived", *(pytest.param(k, marks=pytest.mark.slow) for k in ("AdamW", "SGD", "Adagrad"))],
)
def test_fused_kernels_clip_unless_a_subclass_overrides_step(kind):
    """In a fresh process: torch wraps the step of a class anew when it first makes an optimizer of it."""
    code = (
        "import torch, fastclip\n"
        "class Derived(torch.optim.AdamW): pass\n"
        "class Own(torch.optim.AdamW):\n"
        "    def step(self, closure=None): return super().step(closure)\n"
        "p = torch.nn.Parameter(torch.ones(3))\n"
        "p.grad = torch.ones(3)\n"
        f"for kind in ({kind if kind == 'Derived' else 'torch.optim.' + kind}, Own):\n"
        "    optimizer = kind([p], lr=0.1, fused=True)\n"
        "    handle = fastclip.attach(optimizer, 1.0)\n"
        "    optimizer.step()\n"
        "    print(handle._plan.fused, handle._plan.in_place)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    # A step that somebody else wrote may do anything with what it finds: its gradients are clipped for it.
    assert done.stdout == "True False\nFalse True\n", done.stderr


def test_fused_kernel_gets_grad_scale_only_if_it_clips():
    params, optimizer, handle = training.attached("adamw_fused")
    training.set_gradients(params, [torch.full(s, 1e-4) for s in training.SHAPES])
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(vars(o).get("grad_scale")))
    optimizer.step()
    training.set_gradients(params, [torch.full(s, 10.0) for s in training.SHAPES])
    optimizer.step()
    assert seen[0] is None and seen[1].dtype == torch.float32 and seen[1].numel() == 1
    assert handle.stats.clip_coef < 1


def test_fused_kernel_gets_found_inf_of_exactly_one(monkeypatch):
    """A scaler of several devices adds theirs up; the kernels take 2 for a step backwards."""
    monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    params, optimizer, _ = training.attached("adam_fused")
    training.set_gradients(params, [torch.full(s, NAN) for s in training.SHAPES])
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(vars(o)["found_inf"]))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(2.0)
    optimizer.step()
    assert seen[0].item() == 1.0 and seen[0].dtype == torch.float32
    assert optimizer.grad_scale.item() == 4.0 and optimizer.found_inf.item() == 2.0  # as they were
    assert all(state["step"] == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("name", ["sgd_fused", "adam_foreach"])
def test_existing_grad_scale_is_multiplied(name, host_knows):
    gold = TorchRun(name)
    params, optimizer, handle = training.attached(name)
    grads = [torch.full(s, 0.5) for s in training.SHAPES]
    total_norm = gold.step(grads)
    training.set_gradients(params, grads, 8.0)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.step()
    assert handle.stats.total_norm.item() == pytest.approx(total_norm.item(), rel=1e-6)
    assert handle.stats.per_tensor.norm[1].item() == pytest.approx(0.5 * math.sqrt(30))
    training.assert_same_parameters(params, gold, 1)
    assert optimizer.grad_scale.item() == 8.0


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_fused", "adam_foreach"])
def test_nonfinite_propagate_matches_torch(name, host_knows):
    params, optimizer, handle = training.attached(name, nonfinite="propagate")
    gold_params = training.parameters()
    gold = OPTIMIZERS[name](gold_params)
    for value in (INF, NAN):
        for p in (*params, *gold_params):
            p.grad = torch.ones_like(p)
        params[1].grad[3] = gold_params[1].grad[3] = value
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(gold_params, MAX_NORM)
        gold.step()
        for p, q in zip(params, gold_params, strict=True):
            torch.testing.assert_close(p, q, equal_nan=True)
            torch.testing.assert_close(p.grad, q.grad, equal_nan=True)
    assert handle.last_step_applied is True and handle.skipped_steps == 0


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_nonfinite_zero_matches_torch_on_zeroed_gradients(name, host_knows):
    params, optimizer, handle = training.attached(name, nonfinite="zero")
    gold = TorchRun(name)
    grads = next(training.gradients(1))
    training.set_gradients(params, grads)
    optimizer.step()
    gold.step([g.nan_to_num(0.0, 0.0, 0.0) for g in grads])
    training.assert_same_parameters(params, gold, 1)
    assert handle.last_step_applied is True and handle.stats.nan_count == 1


@pytest.mark.parametrize("name", ["adamw_fused_by_group", "sgd_foreach"])
@pytest.mark.parametrize("groups", ["param_group", "tensor", "function", "labels"])
def test_groups_match_torch_clip_of_each_group(name, groups, host_knows):
    params, gold_params = training.parameters(), training.parameters()
    optimizer, gold = OPTIMIZERS[name](params), OPTIMIZERS[name](gold_params)
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    first = len(optimizer.param_groups[0]["params"])
    parts = {
        "param_group": [range(first), range(first, 6)][: len(optimizer.param_groups)],
        "tensor": [[i] for i in range(6)],
        "function": [[0, 2, 4], [1, 3, 5]],
        "labels": [[0, 1], [2, 3, 4, 5]],
    }[groups]
    argument = {
        "function": lambda name: int(name[1:]) % 2,
        "labels": ["a", "a", "b", "b", "b", "b"],
    }.get(groups, groups)
    handle = fastclip.attach(optimizer, 0.5, groups=argument, names=names)
    for grads in training.gradients(12):
        training.set_gradients(params, grads)
        optimizer.step()
        assert handle.last_step_applied is training.is_finite(grads)
        if training.is_finite(grads):
            training.set_gradients(gold_params, grads)
            for part in parts:
                torch.nn.utils.clip_grad_norm_([gold_params[i] for i in part], 0.5)
            gold.step()
            assert handle.stats.total_norm.shape == (len(parts),)
    for p, q in zip(params, gold_params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("norm_type", "value"), [(0.0, NAN), (0.0, INF), (-1.0, INF), (-INF, INF)])
def test_nonfinite_gradients_are_skipped_though_the_norm_is_finite(norm_type, value, host_knows):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Adam([p], fused=True)
    handle = fastclip.attach(optimizer, 1.0, norm_type=norm_type)
    p.grad = torch.tensor([1.0, value, 2.0])
    optimizer.step()
    assert (p == 1).all() and handle.last_step_applied is False


@pytest.mark.parametrize(("scale", "size", "max_norm"), [(1e-5, 1e35, 1.0), (65536.0, 1e33, 1e-3)])
def test_scale_beyond_float32_is_skipped_or_clipped_in_place(scale, size, max_norm, host_knows):
    """The true norm, or what the kernel is to divide by, has no float32: skipped or clipped in place."""
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = SGD([p], lr=1.0, fused=True)
    handle = fastclip.attach(optimizer, max_norm)
    p.grad = torch.full((4,), size) * scale if scale > 1 else torch.full((4,), size)
    optimizer.grad_scale = torch.tensor(scale)
    optimizer.step()
    if scale < 1 or not host_knows:
        assert (p == 1).all() and handle.last_step_applied is False and handle.stats is not None
    else:
        assert (p - 1).norm().item() == pytest.approx(max_norm, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_foreach"])
def test_step_without_gradients_and_with_max_norm_zero(name, host_knows):
    params, optimizer, handle = training.attached(name)
    assert handle.stats is None and handle.last_step_applied is None
    optimizer.step()
    assert handle.stats is None and handle.last_step_applied is True and not optimizer.state_dict()["state"]
    handle.max_norm = 0.0
    gold = TorchRun(name)
    grads = [torch.ones(s) for s in training.SHAPES]
    training.set_gradients(params, grads)
    optimizer.step()
    gold.step(grads, 0.0)
    training.assert_same_parameters(params, gold, 1)
    assert all(not p.grad.any() for p in params)


def test_negative_tensor_as_max_norm_skips_the_step(host_knows):
    params, optimizer, handle = training.attached("adamw_fused")
    handle.max_norm = torch.tensor(-1.0)
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    before = [p.data.clone() for p in params]
    optimizer.step()
    assert_bitwise_equal([p.data for p in params], before)
    assert handle.last_step_applied is False


@pytest.mark.parametrize("norm_type", [1.0, math.inf, 3.0])
def test_step_with_other_norm_types(norm_type, host_knows):
    params = training.parameters()[:4]
    optimizer = SGD(params, lr=1.0, fused=True)
    handle = fastclip.attach(optimizer, 0.5, norm_type=norm_type)
    for p in params:
        p.grad = torch.randn_like(p)
    coef = min(1.0, 0.5 / torch.nn.utils.get_total_norm([p.grad for p in params], norm_type).item())
    gold = [p.detach() - p.grad * coef for p in params]
    optimizer.step()
    for p, q in zip(params, gold, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-5)
    assert handle.stats.norm_type == norm_type


def test_step_clips_sparse_gradients():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=1.0)
    handle = fastclip.attach(optimizer, 0.1)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert (embedding.weight - before).norm().item() == pytest.approx(0.1, rel=1e-4)
    assert handle.last_step_applied is True
