# SPDX-License-Identifier: BSD-3-Clause
"""attach and its handle: arguments, closures, schedulers, copies, detach and errors."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

import fastclip
from fastclip.optim import step_plan
from helpers import training
from helpers.cases import NAN, assert_bitwise_equal
from helpers.training import MAX_NORM, OPTIMIZERS, TorchRun


def state_of(params, optimizer):
    """Everything that a step may change, copied."""
    return copy.deepcopy(([p.data for p in params], [p.grad for p in params], optimizer.state_dict()))


def assert_unchanged(before, params, optimizer):
    for old, new in zip(before[:2], ([p.data for p in params], [p.grad for p in params]), strict=True):
        assert_bitwise_equal(new, old)
    assert str(before[2]) == str(optimizer.state_dict())


def test_max_norm_by_group_and_changed_later():
    params, optimizer, handle = training.attached("adamw_fused_by_group")
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


def test_stats_name_the_parameters(host_knows):
    params, optimizer, handle = training.attached("adamw_fused_by_group")
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
def test_closure_gradients_are_clipped(name, host_knows):
    gold = TorchRun(name)
    params, optimizer, handle = training.attached(name)
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


def test_closure_called_twice_raises():
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


def test_closure_that_raises_or_is_not_called():
    class Ignores(SGD):
        def step(self, closure=None):
            return super().step()

    params, optimizer, handle = training.attached("adamw_fused")
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


@pytest.mark.parametrize("first", ["scheduler", "attach"])
def test_lr_scheduler_made_before_or_after_attach(first, recwarn):
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


def test_several_optimizers_with_added_param_group_and_accumulation():
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


def test_state_dict_pickle_and_deepcopy_match_a_plain_optimizer():
    params, optimizer, _ = training.attached("adamw_fused")
    training.set_gradients(params, [torch.ones(s) for s in training.SHAPES])
    optimizer.step()
    plain = OPTIMIZERS["adamw_fused"](training.parameters())
    plain.load_state_dict(optimizer.state_dict())
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert "step" not in vars(other) and "_fastclip_handle" not in vars(other)
        assert str(other.state_dict()) == str(optimizer.state_dict()) == str(plain.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step()  # still attached


def test_detach_restores_the_optimizer_and_allows_attach_again():
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
def test_nonfinite_error_names_the_parameter_and_changes_nothing(name, host_knows):
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
def test_step_that_raises_restores_attributes_and_gradients(name, host_knows):
    params, optimizer, handle = training.attached(name)
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
def test_gradients_cleared_by_the_step_stay_cleared(name):
    """A NaN that came back would be added to by every later backward pass."""
    params, optimizer, handle = training.attached(name)
    optimizer.register_step_post_hook(lambda o, *_: o.zero_grad())
    for grads in (next(training.gradients(1)), [torch.ones(s) for s in training.SHAPES]):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone() if p.grad is None else p.grad + g
        optimizer.step()
    assert all(p.grad is None for p in params)
    assert handle.last_step_applied is True and handle.skipped_steps == 1
    assert "zero_grad" not in vars(optimizer)


def test_max_norm_by_group_applies_to_groups_with_gradients():
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


def test_reading_the_flag_raises_while_a_cuda_graph_is_captured(monkeypatch):
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
def test_attach_raises_on_mistaken_arguments(make, options, error, message):
    optimizer = make(training.parameters())
    with pytest.raises(error, match=message):
        fastclip.attach(optimizer, options.pop("max_norm", 1.0), **options)
    assert "step" not in vars(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else True


def test_attach_raises_on_optimizers_that_cannot_be_clipped_from_outside():
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
