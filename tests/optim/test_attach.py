# SPDX-License-Identifier: BSD-3-Clause
"""attach: the step of every kind of optimizer is torch's clip and step, and leaves nothing behind."""

import copy
import gc
import math
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

import fastclip
from fastclip.optim import step_plan
from helpers import training
from helpers.cases import INF, NAN, assert_bitwise_equal
from helpers.training import MAX_NORM, OPTIMIZERS, TorchRun

STEPS = 50


@pytest.fixture(params=[True, False], ids=["host", "device"])
def host_knows(request, monkeypatch) -> bool:
    """With False the flag and the coefficient stay where they are, as on a GPU, and the kernel decides."""
    if not request.param:
        monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    return request.param


def attached(name: str, **options):
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    return params, optimizer, fastclip.attach(optimizer, MAX_NORM, **options)


def state_of(params, optimizer):
    """Everything that a step may change, copied."""
    return copy.deepcopy(([p.data for p in params], [p.grad for p in params], optimizer.state_dict()))


def assert_unchanged(before, params, optimizer):
    for old, new in zip(before[:2], ([p.data for p in params], [p.grad for p in params]), strict=True):
        assert_bitwise_equal(new, old)
    assert str(before[2]) == str(optimizer.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_torchs_clip_and_step(name, host_knows):
    gold = TorchRun(name)
    params, optimizer, handle = attached(name)
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
def test_other_dtypes(name, dtype, host_knows):
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


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad", "Derived"])
def test_fused_kernels_clip_by_themselves(kind):
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


def test_an_unclipped_step_on_the_cpu_hands_nothing_over_and_writes_no_gradient():
    params, optimizer, handle = attached("adamw_fused")
    training.set_gradients(params, [torch.full(s, 1e-4) for s in training.SHAPES])
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(vars(o).get("grad_scale")))
    optimizer.step()
    training.set_gradients(params, [torch.full(s, 10.0) for s in training.SHAPES])
    optimizer.step()
    assert seen[0] is None and seen[1].dtype == torch.float32 and seen[1].numel() == 1
    assert handle.stats.clip_coef < 1


def test_found_inf_is_exactly_one(monkeypatch):
    """A scaler of several devices adds theirs up; the kernels take 2 for a step backwards."""
    monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    params, optimizer, _ = attached("adam_fused")
    training.set_gradients(params, [torch.full(s, NAN) for s in training.SHAPES])
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(vars(o)["found_inf"]))
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(2.0)
    optimizer.step()
    assert seen[0].item() == 1.0 and seen[0].dtype == torch.float32
    assert optimizer.grad_scale.item() == 4.0 and optimizer.found_inf.item() == 2.0  # as they were
    assert all(state["step"] == 0 for state in optimizer.state.values())


@pytest.mark.parametrize("name", ["sgd_fused", "adam_foreach"])
def test_a_grad_scale_that_was_there_is_multiplied(name, host_knows):
    gold = TorchRun(name)
    params, optimizer, handle = attached(name)
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
def test_propagate_is_torchs(name, host_knows):
    params, optimizer, handle = attached(name, nonfinite="propagate")
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
def test_error_names_the_parameter_and_changes_nothing(name, host_knows):
    params = training.parameters()
    optimizer = OPTIMIZERS[name](params)
    names = [(f"layer{i}", p) for i, p in enumerate(params)]
    handle = fastclip.attach(optimizer, MAX_NORM, nonfinite="error", names=names)
    training.set_gradients(params, next(training.gradients(1)))
    before = state_of(params, optimizer)
    with pytest.raises(RuntimeError, match=r"layer3 \(1 NaN, 0 Inf\).*No gradient and no parameter"):
        optimizer.step()
    assert_unchanged(before, params, optimizer)
    assert handle.last_step_applied is None and handle.stats.nan_count == 1


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_zero(name, host_knows):
    params, optimizer, handle = attached(name, nonfinite="zero")
    gold = TorchRun(name)
    grads = next(training.gradients(1))
    training.set_gradients(params, grads)
    optimizer.step()
    gold.step([g.nan_to_num(0.0, 0.0, 0.0) for g in grads])
    training.assert_same_parameters(params, gold, 1)
    assert handle.last_step_applied is True and handle.stats.nan_count == 1


@pytest.mark.parametrize("name", ["adamw_fused_by_group", "sgd_foreach"])
@pytest.mark.parametrize("groups", ["param_group", "tensor", "function", "labels"])
def test_groups(name, groups, host_knows):
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


def test_limits_by_group_and_a_limit_changed_later():
    params, optimizer, handle = attached("adamw_fused_by_group")
    handle.detach()
    handle = fastclip.attach(optimizer, {0: 0.1, 1: 1e9}, groups="param_group")
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    optimizer.step()
    assert handle.stats.labels == [0, 1]
    assert handle.stats.clip_coef[0] < 1 and handle.stats.clip_coef[1] == 1
    handle.max_norm = 1e9
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    optimizer.step()
    assert handle.stats.clip_coef.tolist() == [1, 1]


def test_names(host_knows):
    params, optimizer, handle = attached("adamw_fused_by_group")
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    params[1].grad = None
    optimizer.step()
    assert handle.stats.names[:2] == ["param_groups[0].params[0]", "param_groups[1].params[0]"]
    handle.detach()
    handle = fastclip.attach(optimizer, 1.0, names=[("weight", params[0])])
    optimizer.step()
    assert handle.stats.names[:2] == ["weight", "param_groups[1].params[0]"]
    network = torch.nn.Linear(2, 2)
    optimizer = AdamW(network.named_parameters(), fused=True)
    handle = fastclip.attach(optimizer, 1.0)
    network(torch.ones(2)).sum().backward()
    optimizer.step()
    assert handle.stats.names == ["weight", "bias"]


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_closure(name, host_knows):
    gold = TorchRun(name)
    params, optimizer, handle = attached(name)
    for grads in training.gradients(10):
        gold.step(grads)

        def closure(grads=grads):
            assert torch.is_grad_enabled()
            training.set_gradients(params, grads)
            return torch.tensor(3.0)

        assert optimizer.step(closure) == 3.0
        assert handle.last_step_applied is training.is_finite(grads)
        assert optimizer.step(closure=lambda: None) is None  # the same gradients, clipped already
        if training.is_finite(grads):
            gold.optimizer.step()
        training.assert_same_parameters(params, gold, 10)


def test_a_closure_called_twice_raises():
    class Twice(SGD):
        def step(self, closure=None):
            closure()
            return closure()

    p = torch.nn.Parameter(torch.ones(2))
    optimizer = Twice([p], lr=1.0)
    fastclip.attach(optimizer, 1.0)
    p.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="Twice calls its closure several times"):
        optimizer.step(lambda: None)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


@pytest.mark.parametrize("first", ["scheduler", "attach"])
def test_lr_schedulers(first, recwarn):
    params = training.parameters()
    optimizer = OPTIMIZERS["adamw_fused"](params)
    before = vars(optimizer).get("step")
    if first == "scheduler":
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
        before = optimizer.step
        handle = fastclip.attach(optimizer, MAX_NORM)
    else:
        handle = fastclip.attach(optimizer, MAX_NORM)
        scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    gold = TorchRun("adamw_fused")
    gold_scheduler = LambdaLR(gold.optimizer, lambda step: 0.5**step)
    for grads in training.gradients(6):
        training.set_gradients(params, grads)
        optimizer.step()
        scheduler.step()
        gold.step(grads)
        gold_scheduler.step()
    training.assert_same_parameters(params, gold, 6)
    assert optimizer.param_groups[0]["lr"] == gold.optimizer.param_groups[0]["lr"]
    handle.detach()
    if first == "scheduler":
        assert vars(optimizer)["step"] is before
    training.set_gradients(params, grads)
    optimizer.step()  # the scheduler's wrapper of ours still works
    scheduler.step()
    assert handle.stats is not None and handle._calls == 6
    messages = [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]
    assert len(messages) <= 1  # torch's own, as the gold run left its first steps out


def test_several_optimizers_add_param_group_and_accumulation():
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    gold = copy.deepcopy(network)
    optimizers = [AdamW(network[0].parameters(), fused=True), SGD(network[1].parameters(), lr=0.1)]
    handles = [fastclip.attach(o, 0.01) for o in optimizers]
    golds = [AdamW(gold[0].parameters(), fused=True), SGD(gold[1].parameters(), lr=0.1)]
    for step in range(4):
        if step == 2:
            extra, gold_extra = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
            optimizers[1].add_param_group({"params": [extra]})
            golds[1].add_param_group({"params": [gold_extra]})
        for o in (*optimizers, *golds):
            o.zero_grad()
        for _ in range(3):  # accumulated: clipped and counted once, in the step
            x = torch.randn(5, 3)
            network(x).square().mean().backward()
            gold(x).square().mean().backward()
            if step >= 2:
                extra.sum().backward()
                gold_extra.sum().backward()
        before = [p.grad.clone() for p in network.parameters()]
        assert_bitwise_equal([p.grad for p in gold.parameters()], before)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in golds:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.01)
            optimizer.step()
        for p, q in zip(network.parameters(), gold.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(extra, gold_extra)
    assert [h._calls for h in handles] == [4, 4]
    assert len(handles[1].stats.names) == 3 and handles[1].stats.names[2] == "param_groups[1].params[0]"


def test_state_dict_pickle_and_copies_know_nothing_of_it():
    params, optimizer, _ = attached("adamw_fused")
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    optimizer.step()
    plain = OPTIMIZERS["adamw_fused"](training.parameters())
    plain.load_state_dict(optimizer.state_dict())
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert "step" not in vars(other) and "_fastclip_handle" not in vars(other)
        assert str(other.state_dict()) == str(optimizer.state_dict()) == str(plain.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step()  # still attached


def test_detach_gives_the_optimizer_back_and_attach_again_works():
    params = training.parameters()
    optimizer = OPTIMIZERS["adamw_fused"](params)
    before = dict(vars(optimizer))
    handle = fastclip.attach(optimizer, MAX_NORM)
    handle.detach()
    handle.detach()
    assert vars(optimizer) == before
    second = fastclip.attach(optimizer, MAX_NORM)
    assert second is not handle
    reference = weakref.ref(optimizer)
    del optimizer, handle, second
    gc.collect()
    assert reference() is None  # nothing keeps it alive


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_a_step_that_raises_leaves_nothing_behind(name, host_knows):
    params, optimizer, handle = attached(name)
    grads = next(training.gradients(1))

    def fail(*_):
        raise KeyError("half-way")

    hook = optimizer.register_step_post_hook(fail)
    optimizer.grad_scale = before = torch.tensor(2.0)
    training.set_gradients(params, grads)
    with pytest.raises(KeyError, match="half-way"):
        optimizer.step()
    assert vars(optimizer)["grad_scale"] is before and "found_inf" not in vars(optimizer)
    assert_bitwise_equal([p.grad for p in params], grads)
    assert handle.last_step_applied is None
    hook.remove()
    del optimizer.grad_scale
    optimizer.step()
    assert handle.last_step_applied is False


@pytest.mark.parametrize("name", ["adamw_fused", "adam_foreach"])
def test_gradients_that_the_step_itself_clears_do_not_come_back(name):
    """A NaN that came back would be added to by every later backward pass."""
    params, optimizer, handle = attached(name)
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad())
    for grads in (next(training.gradients(1)), [torch.ones(s) for s in training.SHAPES]):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone() if p.grad is None else p.grad + g
        optimizer.step()
    assert all(p.grad is None for p in params)
    assert handle.last_step_applied is True and handle.skipped_steps == 1
    assert "zero_grad" not in vars(optimizer)


@pytest.mark.parametrize(("norm_type", "value"), [(0.0, NAN), (0.0, INF), (-1.0, INF), (-INF, INF)])
def test_orders_whose_norm_is_finite_beside_nan_and_inf(norm_type, value, host_knows):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = Adam([p], fused=True)
    handle = fastclip.attach(optimizer, 1.0, norm_type=norm_type)
    p.grad = torch.tensor([1.0, value, 2.0])
    optimizer.step()
    assert (p == 1).all() and handle.last_step_applied is False


@pytest.mark.parametrize(("scale", "size", "max_norm"), [(1e-5, 1e35, 1.0), (65536.0, 1e33, 1e-3)])
def test_scales_beyond_float32(scale, size, max_norm, host_knows):
    """The true norm, or what the kernel is to divide by, has no float32: left out or clipped in place."""
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


def test_limits_for_all_groups_hold_for_those_that_have_a_gradient():
    params = training.parameters()
    optimizer = OPTIMIZERS["adamw_fused_by_group"](params)
    handle = fastclip.attach(optimizer, torch.tensor([0.5, 1e9]), groups="param_group")  # none has one yet
    for p in params[2:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert handle.stats.labels == [1] and handle.stats.clip_coef.tolist() == [1.0]
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    optimizer.step()
    assert handle.stats.labels == [0, 1] and handle.stats.clip_coef[0] < 1 == handle.stats.clip_coef[1]
    handle.detach()
    with pytest.raises(ValueError, match=r"every group's limit, but got none for \[1\]"):
        fastclip.attach(optimizer, {0: 1.0}, groups="param_group")
    with pytest.raises(ValueError, match="expected groups together with a mapping as max_norm"):
        fastclip.attach(optimizer, {0: 1.0})
    with pytest.raises(ValueError, match="expected groups together with a mapping as max_norm"):
        fastclip.clip_(params, {0: 1.0})


def test_what_is_known_after_a_closure_that_raises_or_is_not_called():
    class Ignores(SGD):
        def step(self, closure=None):
            return super().step()

    params, optimizer, handle = attached("adamw_fused")
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    optimizer.step()
    assert handle.last_step_applied is True
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert handle.last_step_applied is None
    p = torch.nn.Parameter(torch.ones(2))
    ignores = Ignores([p], lr=1.0)
    fastclip.attach(ignores, 1.0)
    with pytest.raises(RuntimeError, match=r"Ignores.step\(\) was given a closure but did not call it"):
        ignores.step(lambda: None)


@pytest.mark.parametrize("name", ["adamw_fused", "sgd_foreach"])
def test_no_gradients_and_max_norm_zero(name, host_knows):
    params, optimizer, handle = attached(name)
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


def test_a_negative_tensor_as_max_norm_is_a_skip(host_knows):
    params, optimizer, handle = attached("adamw_fused")
    handle.max_norm = torch.tensor(-1.0)
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    before = [p.data.clone() for p in params]
    optimizer.step()
    assert_bitwise_equal([p.data for p in params], before)
    assert handle.last_step_applied is False


@pytest.mark.parametrize("norm_type", [1.0, math.inf, 3.0])
def test_norm_types(norm_type, host_knows):
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


def test_sparse_gradients():
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=1.0)
    handle = fastclip.attach(optimizer, 0.1)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    assert (embedding.weight - before).norm().item() == pytest.approx(0.1, rel=1e-4)
    assert handle.last_step_applied is True


def test_a_captured_graph_is_told_about_the_flag(monkeypatch):
    class OnCuda:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="fused optimizer or nonfinite='propagate'"):
        step_plan.require_readable(OnCuda())


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda p: p, {}, TypeError, "expected optimizer to be a torch.optim.Optimizer, but got list"),
        (lambda p: torch.optim.LBFGS(p), {}, TypeError, "LBFGS evaluates its closure several times"),
        (SGD, {"max_norm": -1.0}, ValueError, "expected max_norm to be a number >= 0, but got -1.0"),
        (SGD, {"max_norm": NAN}, ValueError, "expected max_norm to be a number >= 0, but got nan"),
        (SGD, {"nonfinite": "ignore"}, ValueError, "expected nonfinite to be one of"),
        (SGD, {"groups": "layer"}, ValueError, "expected groups to be 'tensor'.*got 'layer'"),
        (SGD, {"groups": [0, 1]}, ValueError, "label each of the 6 parameters, but got 2"),
        (SGD, {"scaler": 3}, TypeError, "expected scaler to be a torch.amp.GradScaler, but got int"),
        (SGD, {"names": ["weight"]}, TypeError, "expected names to be .*but got str at index 0"),
        (Adam, {"norm_type": "fro"}, ValueError, "could not convert"),
    ],
)
def test_mistaken_arguments(make, options, error, message):
    optimizer = make(training.parameters())
    with pytest.raises(error, match=message):
        fastclip.attach(optimizer, options.pop("max_norm", 1.0), **options)
    assert "step" not in vars(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else True


def test_optimizers_that_cannot_be_clipped_from_outside():
    class Wrapper(SGD):
        def __init__(self, optimizer):
            self.optimizer = optimizer
            super().__init__(optimizer.param_groups, lr=1.0)

    class TakesScaler(SGD):
        def step(self, closure=None, *, grad_scaler=None):
            return super().step(closure)

    optimizer = SGD(training.parameters(), lr=1.0)
    with pytest.raises(TypeError, match="Wrapper wraps another optimizer"):
        fastclip.attach(Wrapper(optimizer), 1.0)
    with pytest.raises(TypeError, match=r"TakesScaler\.step takes the scaler"):
        fastclip.attach(TakesScaler(training.parameters(), lr=1.0), 1.0)
    fastclip.attach(optimizer, 1.0)
    with pytest.raises(RuntimeError, match=r"this SGD is already attached; call detach\(\)"):
        fastclip.attach(optimizer, 1.0)
