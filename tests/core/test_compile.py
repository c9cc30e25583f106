# SPDX-License-Identifier: BSD-3-Clause
"""torch.compile over the public functions and over whole training steps; fake and meta tensors."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

import fastclip
from fastclip.backends import libraries

pytestmark = [
    pytest.mark.usefixtures("native_only", "fresh_compiler"),
    # Older ones do not trace some of what torch's own clipping does either.
    pytest.mark.skipif(
        libraries.torch_version() < (2, 13), reason="compiled steps are supported from torch 2.13"
    ),
]


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def parameters(count: int = 5, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    torch.manual_seed(0)
    made = [Parameter(torch.zeros(100 + i, dtype=dtype)) for i in range(count)]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def statistics_of(stats: fastclip.GradStats) -> tuple:
    return stats.total_norm, stats.clip_coef, stats.found_inf, stats.nan_count, stats.per_tensor.norm


CALLS = {
    "clip_grad_norm_": lambda ps: fastclip.clip_grad_norm_(ps, 1.0),
    "inf norm": lambda ps: fastclip.clip_grad_norm_(ps, 0.5, float("inf")),
    "skip": lambda ps: fastclip.clip_grad_norm_(ps, 1.0, nonfinite="skip"),
    "clip_grad_value_": lambda ps: fastclip.clip_grad_value_(ps, 0.5),
    "get_total_norm": lambda ps: fastclip.get_total_norm([p.grad for p in ps]),
    "clip_grads_with_norm_": lambda ps: fastclip.clip_grads_with_norm_(ps, 1.0, torch.tensor(4.0)),
    "clip_": lambda ps: statistics_of(fastclip.clip_(ps, 1.0)),
    "groups": lambda ps: statistics_of(fastclip.clip_(ps, 1.0, groups="tensor")),
    "zero": lambda ps: statistics_of(fastclip.clip_(ps, 1.0, nonfinite="zero")),
    "grad_stats": lambda ps: fastclip.grad_stats(ps).total_norm,
}


def flat(result: object) -> list[torch.Tensor]:
    return [] if result is None else list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("call", CALLS)
def test_compiled_call_is_one_graph_and_equals_eager(call):
    mine, theirs = parameters(), parameters()
    found = torch.compile(CALLS[call], fullgraph=True, backend="aot_eager")(mine)
    expected = CALLS[call](theirs)
    for a, b in zip(flat(found), flat(expected), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_clip_compiles_with_the_default_compiler():
    mine, theirs = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    total_norm = torch.compile(CALLS["clip_grad_norm_"], fullgraph=True)(mine)
    assert torch.equal(total_norm, CALLS["clip_grad_norm_"](theirs))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))


def test_compiled_clip_bumps_versions_for_autograd():
    """The version counters rise, and a backward that saved a gradient refuses its changed value."""
    mine = parameters()
    weight = torch.ones(100, requires_grad=True)
    product = (weight * mine[0].grad).sum()
    before = [p.grad._version for p in mine]
    torch.compile(CALLS["clip_grad_norm_"], fullgraph=True, backend="aot_eager")(mine)
    assert all(p.grad._version > version for p, version in zip(mine, before, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_clip_compiles_once_for_each_list_length():
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(lambda ps: fastclip.clip_grad_norm_(ps, 1.0), fullgraph=True, backend=counter)
    for count, compilations in ((3, 1), (3, 1), (5, 2), (3, 2), (5, 2)):
        mine = parameters(count)
        clip(mine)
        assert counter.frame_count == compilations, (count, counter.frame_count)


def test_compiled_clip_follows_a_max_norm_tensor():
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(fastclip.clip_grad_norm_, fullgraph=True, backend=counter)
    for limit in (1.0, 0.5, 3.0):
        mine, theirs = parameters(), parameters()
        clip(mine, torch.tensor(limit))
        fastclip.clip_grad_norm_(theirs, torch.tensor(limit))
        assert torch.equal(mine[0].grad, theirs[0].grad)
    assert counter.frame_count == 1


def test_compiled_clip_recompiles_when_the_backend_changes():
    counter = CompileCounterWithBackend("aot_eager")
    clip = torch.compile(lambda ps: fastclip.clip_grad_norm_(ps, 1.0), backend=counter)
    clip(parameters())
    with fastclip.backends.use("reference"):
        norm = clip(parameters())
    assert counter.frame_count == 2
    assert torch.allclose(norm, fastclip.clip_grad_norm_(parameters(), 1.0))


def training_step(clip):
    """A model, and a step of it that clips by `clip`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 20)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (model(inputs) - inputs[:, :1]).square().mean()
        loss.backward()
        clip(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return model, step


def graph_breaks(clip) -> int:
    torch._dynamo.reset()
    counters.clear()
    _, step = training_step(clip)
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(3):
        compiled()
    return sum(counters["graph_break"].values())


def test_compiled_step_has_no_more_graph_breaks_than_with_torch():
    assert graph_breaks(fastclip.clip_grad_norm_) <= graph_breaks(torch.nn.utils.clip_grad_norm_)


def test_compiled_step_trains_as_an_eager_one():
    model, step = training_step(fastclip.clip_grad_norm_)
    eager_model, eager_step = training_step(fastclip.clip_grad_norm_)
    compiled = torch.compile(step, backend="aot_eager")
    for _ in range(20):
        torch.testing.assert_close(compiled(), eager_step(), rtol=1e-5, atol=1e-7)
    for a, b in zip(model.parameters(), eager_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fake_tensors_give_the_shapes_and_dtypes_of_real_ones(dtype):
    def results(made: list[Parameter]) -> list[torch.Tensor]:
        stats = fastclip.clip_(made, 1.0, groups="tensor")
        return [fastclip.clip_grad_norm_(made, 1.0), stats.total_norm, stats.clip_coef, *stats.per_tensor]

    real = results(parameters(dtype=dtype))
    with FakeTensorMode():
        fake = results(parameters(dtype=dtype))
    for a, b in zip(fake, real, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_meta_tensors_give_the_shapes_and_dtypes_of_real_ones(dtype):
    made = [Parameter(torch.empty(10, dtype=dtype, device="meta")) for _ in range(3)]
    for parameter in made:
        parameter.grad = torch.empty_like(parameter)
    with fastclip.backends.use("auto"):
        total_norm = fastclip.clip_grad_norm_(made, 1.0)
        fastclip.clip_grad_value_(made, 1.0)
        per_tensor = fastclip.clip_(made, 1.0).per_tensor
    assert total_norm.is_meta and total_norm.shape == ()
    assert total_norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert per_tensor.norm.is_meta and per_tensor.norm.shape == (3,)
