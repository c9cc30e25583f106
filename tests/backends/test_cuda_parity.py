# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA backend against the reference on the CPU: on a GPU where there is one, else through the shim.

The same lines run in both places, so that what a GPU would be asked is known to be asked rightly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fastclip.backends import native, reference, triton
from helpers import cases, shim
from helpers.cases import (
    ALL,
    DTYPES,
    INF,
    NORM_TYPES,
    assert_bitwise_equal,
    clone,
    dtype_name,
    each_case,
    random_factors,
    without_nan_payloads,
)


@dataclass(frozen=True)
class Machine:
    """Where the kernels run."""

    device: str
    backend: ModuleType

    def send(self, grads: list[Tensor]) -> list[Tensor]:
        return clone(grads, self.device)


ON_A_GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda with triton")]


@pytest.fixture(params=["shim", *ON_A_GPU])
def machine(request) -> Machine:
    if request.param == "shim":
        if reason := shim.reason_against():
            pytest.skip(reason)
        shim.configure()
        return Machine("cpu", shim.backend())
    # On a machine with a GPU a library that is not there is a failure, not a reason to skip.
    backend = triton if "triton" in request.param else native
    reason = backend.unavailable(torch.device("cuda"))
    assert reason is None, reason
    return Machine("cuda", backend)


# Through the shim the value grid of test_backends.py has every dtype; here one is enough for `make test`.
by_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(d, marks=[pytest.mark.slow] * (d != torch.float16)) for d in DTYPES],
    ids=dtype_name,
)


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    return without_nan_payloads([t.detach().cpu() for t in tensors])


def assert_same_numbers(actual: Tensor, expected: Tensor, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(actual.cpu(), expected, rtol=rtol, atol=1e-45, equal_nan=True)


def roots(stats: Tensor, norm_type: float) -> Tensor:
    return reference.totals(stats.cpu(), norm_type, range(len(stats)))


@by_dtype
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@each_case(ALL)
def test_cuda_grad_stats_equals_the_reference(machine, case, dtype, norm_type):
    grads = ALL[case](dtype)
    sent = machine.send(grads)
    for finite_only in (False, True):
        total_norm, stats = machine.backend.grad_stats(sent, norm_type, finite_only)
        expected_norm, expected = reference.grad_stats(grads, norm_type, finite_only)
        assert total_norm.device.type == stats.device.type == machine.device
        assert total_norm.dtype == expected_norm.dtype and stats.dtype == torch.float64
        assert_same_numbers(total_norm, expected_norm)
        assert_same_numbers(roots(stats, norm_type), roots(expected, norm_type))
        assert torch.equal(stats[:, 1:].cpu(), expected[:, 1:])
    assert_bitwise_equal(on_cpu(sent), on_cpu(grads))


@by_dtype
@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "skip"])
@each_case(ALL)
def test_cuda_clip_equals_the_reference(machine, case, dtype, nonfinite):
    """What is written fits the coefficient that is returned; twice gives the same bits."""
    grads = ALL[case](dtype)
    for max_norm in (0.5, INF):
        sent, again = machine.send(grads), machine.send(grads)
        summary, stats = machine.backend.clip_(sent, max_norm, 2.0, nonfinite)
        repeated = machine.backend.clip_(again, max_norm, 2.0, nonfinite)
        assert_bitwise_equal([t.cpu() for t in repeated], [summary.cpu(), stats.cpu()])
        assert_bitwise_equal([t.cpu() for t in again], [t.cpu() for t in sent])
        summary = summary.cpu()
        expected = clone(grads)
        expected_summary, _ = reference.clip_(clone(grads), max_norm, 2.0, nonfinite)
        assert_same_numbers(summary, expected_summary)
        reference.scale_(expected, reference.factors(summary, nonfinite, (), None), nonfinite == "zero")
        assert_bitwise_equal([t + 0 for t in on_cpu(sent)], [t + 0 for t in on_cpu(expected)])


@by_dtype
@each_case(ALL)
def test_cuda_scale_and_clamp_equal_the_reference(machine, case, dtype):
    grads = ALL[case](dtype)
    factors = random_factors(len(grads))
    calls: list[Callable[[ModuleType, list[Tensor]], None]] = [
        lambda backend, g: backend.scale_(g, factors.to(g[0].device)),
        lambda backend, g: backend.scale_(g, torch.tensor(0.75), True),
        lambda backend, g: backend.clamp_(g, 0.5),
        lambda backend, g: backend.clamp_(g, INF),
    ]
    for call in calls:
        sent, expected = machine.send(grads), clone(grads)
        call(machine.backend, sent)
        call(reference, expected)
        assert_bitwise_equal([t + 0 for t in on_cpu(sent)], [t + 0 for t in on_cpu(expected)])


def test_cuda_clip_of_mixed_dtypes_groups_and_limits(machine):
    grads = cases.mixed()
    groups = [i % 3 for i in range(len(grads))]
    limits = torch.tensor([0.1, 2.0, INF])
    for order in (groups, sorted(groups), list(range(len(grads)))):
        sent, expected = machine.send(grads), clone(grads)
        max_norm = limits if max(order) == 2 else 0.3
        found = machine.backend.clip_(sent, max_norm, 2.0, "propagate", order, torch.tensor(0.5))
        wanted = reference.clip_(expected, max_norm, 2.0, "propagate", order, torch.tensor(0.5))
        for a, b in zip(found, wanted, strict=True):
            assert_same_numbers(a, b)
        for a, b in zip(sent, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2 * torch.finfo(b.dtype).eps, atol=1e-6)


def test_cuda_clip_scales_a_repeated_gradient_twice(machine):
    (grad,) = machine.send([cases.normal(torch.float32, 100_000)])
    before = grad.clone()
    machine.backend.scale_([grad, grad, grad], torch.tensor([0.5, 0.25, 1.0], device=grad.device))
    assert torch.equal(grad, before * 0.5 * 0.25)


def test_cuda_ops_refuse_before_they_write(machine):
    (flat,) = machine.send([torch.ones(100)])
    expanded = flat[:1].expand(50)
    for bad in ([flat, flat[10:20]], [flat, expanded], [flat, flat.to(torch.int32)]):
        with pytest.raises(RuntimeError):
            machine.backend.clip_(bad, 0.1, 2.0, "propagate")
        with pytest.raises(RuntimeError):
            machine.backend.scale_(bad, torch.tensor(0.5, device=flat.device))
    if hasattr(machine.backend, "ops"):
        with pytest.raises(RuntimeError, match="expected at least one gradient"):
            machine.backend.ops.scale_([], torch.ones(1, device=flat.device))
    with pytest.raises(RuntimeError, match="max_norm to have 1 element, but got 3"):
        machine.backend.clip_([flat], torch.ones(3), 2.0, "propagate")
    with pytest.raises(RuntimeError, match="expected norm_type to be 1, 2 or inf"):
        machine.backend.clip_([flat], 0.1, 3.0, "propagate")
    assert torch.equal(flat.cpu(), torch.ones(100))


def test_cuda_ops_follow_gradients_that_were_freed_or_resized(machine):
    """Nothing is kept from one call to the next."""
    for size in (10, 70_000, 3, 200_000):
        grads = machine.send([cases.normal(torch.float32, size), cases.normal(torch.bfloat16, size)])
        total_norm, _ = machine.backend.grad_stats(grads, 2.0)
        assert abs(total_norm.item() / cases.exact_norm([g.cpu() for g in grads], 2.0) - 1) < 1e-6
        del grads
