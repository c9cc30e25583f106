# SPDX-License-Identifier: BSD-3-Clause
"""What PyTorch's own tests of gradient clipping demand, in our words (test/test_nn.py, TestNNDeviceType)."""

import math

import pytest
import torch
from torch import Tensor

import fastclip

FOREACH = [False, True]


def linear_with(*grads: Tensor) -> torch.nn.Linear:
    model = torch.nn.Linear(10, 10)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad.clone().view_as(parameter)
    return model


def norm_of(model: torch.nn.Module, norm_type) -> float:
    norm_type = float(norm_type)
    if norm_type == math.inf:
        return max(p.grad.abs().max().item() for p in model.parameters())
    return sum(p.grad.abs().pow(norm_type).sum().item() for p in model.parameters()) ** (1 / norm_type)


def scales_of(model: torch.nn.Module, before: list[Tensor]) -> Tensor:
    """What each element was multiplied with; clipping knows one number only."""
    ratios = [p.grad.div(g.view_as(p)).view(-1) for p, g in zip(model.parameters(), before, strict=True)]
    scales = torch.cat(ratios)
    assert scales.std() < 1e-6
    return scales[0]


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("norm_type", [0.5, 1.5, 2.0, 4.0, "inf"])
def test_clip_grad_norm_passes_torchs_test(backend, foreach, norm_type):
    max_norm = 2.0
    big = [torch.arange(1.0, 101).view(10, 10), torch.ones(10).div(1000)]
    model = linear_with(*big)
    before = norm_of(model, norm_type)
    norm = fastclip.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type, foreach=foreach)
    assert norm.item() == pytest.approx(before, rel=1e-6)
    assert norm_of(model, norm_type) == pytest.approx(max_norm, rel=1e-5)
    assert scales_of(model, big) < 1
    # Gradients within the limit keep their scale.
    small = [torch.rand(10, 10).div(10000), torch.ones(10).div(500)]
    model = linear_with(*small)
    before = norm_of(model, norm_type)
    norm = fastclip.clip_grad_norm_(model.parameters(), max_norm, norm_type=norm_type, foreach=foreach)
    assert norm.item() == pytest.approx(before, rel=1e-5)
    assert norm_of(model, norm_type) == pytest.approx(before, rel=1e-5)
    assert scales_of(model, small) == 1


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("norm_type", [0.5, 1.5, 2.0, 4.0, "inf"])
def test_split_functions_pass_torchs_test(backend, foreach, norm_type):
    grads = [torch.arange(1.0, 101).view(10, 10), torch.ones(10).div(1000)]
    whole, split = linear_with(*grads), linear_with(*grads)
    expected = fastclip.clip_grad_norm_(whole.parameters(), 2.0, norm_type, foreach=foreach)
    total = fastclip.get_total_norm([p.grad for p in split.parameters()], norm_type, foreach=foreach)
    fastclip.clip_grads_with_norm_(split.parameters(), 2.0, total, foreach=foreach)
    assert torch.equal(total, expected)
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_single_tensor_passes_torchs_test(backend):
    p1, p2 = torch.randn(10, 10), torch.randn(10, 10)
    g = torch.arange(1.0, 101).view(10, 10)
    p1._grad, p2._grad = g.clone(), g.clone()
    for norm_type in (0.5, 1.5, 2.0, 4.0, "inf"):
        fastclip.clip_grad_norm_(p1, 2.0, norm_type=norm_type)
        fastclip.clip_grad_norm_([p2], 2.0, norm_type=norm_type)
        assert torch.equal(p1.grad, p2.grad)


ORDERS = [0.1, 1, 2, 3.5, math.inf, -0.1, -1, -2, -3.5, -math.inf, 0]
VALUES = [math.inf, -math.inf, math.nan, 2e22, -2e22, 2e200, -2e200]


def ten_elements(value: float, one_element: bool, finite_first: bool) -> list[Tensor]:
    """Gradients that hold the value in one element of ten or in all, after a finite gradient or not."""
    parameter = torch.ones(10, dtype=torch.float64, requires_grad=True)
    (parameter[1] if one_element else parameter).mul(value).sum().backward()
    if not finite_first:
        return [parameter]
    prefix = torch.ones(1, dtype=torch.float64, requires_grad=True)
    prefix.mul(1).sum().backward()
    return [prefix, parameter]


def test_float64_norm_is_nonfinite_where_the_power_leaves_the_range(backend):
    """The list of torch's test, which the next one takes from torch itself."""
    everywhere = [g.grad for g in ten_elements(2e200, False, False)]
    nonfinite = [p for p in ORDERS if not fastclip.get_total_norm(everywhere, p).isfinite()]
    assert nonfinite == [2, 3.5, -2, -3.5]
    once = [g.grad for g in ten_elements(2e200, True, False)]
    assert [p for p in ORDERS if not fastclip.get_total_norm(once, p).isfinite()] == [2, 3.5]


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("one_element", [False, True])
@pytest.mark.parametrize("finite_first", [False, True])
@pytest.mark.parametrize("value", VALUES)
def test_error_if_nonfinite_passes_torchs_test(backend, foreach, one_element, finite_first, value):
    """Raises exactly where torch does, before any gradient has changed."""
    for norm_type in ORDERS:
        ours, theirs = (ten_elements(value, one_element, finite_first) for _ in range(2))
        arguments = dict(max_norm=1.0, norm_type=norm_type, error_if_nonfinite=True, foreach=foreach)
        try:
            torch.nn.utils.clip_grad_norm_(theirs, **arguments)
        except RuntimeError:
            words = f"The total norm of order {float(norm_type)} for gradients"
            with pytest.raises(RuntimeError, match=words):
                fastclip.clip_grad_norm_(ours, **arguments)
        else:
            fastclip.clip_grad_norm_(ours, **arguments)
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.parametrize("foreach", FOREACH)
def test_clip_grad_value_passes_torchs_test(backend, foreach):
    parameters = [torch.nn.Parameter(torch.zeros(10, 10)), torch.nn.Parameter(torch.zeros(10))]
    for with_gradients in ([0, 1], [0], [1]):
        grads = [torch.arange(-50.0, 50).view(10, 10).div(5), torch.ones(10).mul(2)]
        for index, parameter in enumerate(parameters):
            parameter.grad = grads[index].clone() if index in with_gradients else None
        fastclip.clip_grad_value_(parameters, 2.5, foreach=foreach)
        for index in with_gradients:
            assert parameters[index].grad.min() >= -2.5 and parameters[index].grad.max() <= 2.5
            assert torch.equal(parameters[index].grad, grads[index].clamp(-2.5, 2.5))
    p1, p2 = torch.randn(10, 10), torch.randn(10, 10)
    p1._grad = torch.arange(-50.0, 50).view(10, 10).div(5)
    p2._grad = p1.grad.clone()
    fastclip.clip_grad_value_(p1, 2.5, foreach=foreach)
    fastclip.clip_grad_value_([p2], 2.5, foreach=foreach)
    assert torch.equal(p1.grad, p2.grad)
