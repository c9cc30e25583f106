# SPDX-License-Identifier: BSD-3-Clause
"""The value grid: every backend over the whole case list, against float64 and plain PyTorch.

A test runs all cases of a table in one item and names those that fail. The native backend is compared with
values on the widest instruction set only: test_instruction_sets.py proves that the others give the same bits.
"""

import math

import pytest
import torch

from fastclip.backends import reference, select
from helpers import cases
from helpers.available import BACKENDS, NARROW
from helpers.cases import (
    ALL,
    CLAMP_LIMITS,
    FINITE,
    INF,
    NONFINITE,
    NORM_TYPES,
    assert_bitwise_equal,
    by_dtype,
    clone,
    dtype_name,
    each_case,
    exact_norm,
    random_factors,
    without_nan_payloads,
)

CPU = torch.device("cpu")
GRID = [name for name in BACKENDS if name not in NARROW]
on_grid = pytest.mark.parametrize("backend", GRID, indirect=True)
by_norm = pytest.mark.parametrize("norm_type", NORM_TYPES)


def relative_error(actual: float, exact: float) -> float:
    return abs(actual - exact) / exact if exact else abs(actual)


def tolerance(grads) -> float:
    """The largest relative error of a norm: the promised 1e-6 in float32, else rounding of float64 sums."""
    return 1e-6 if reference.result_dtype(grads) == torch.float32 else 1e-12


@on_grid
@by_dtype
@by_norm
@each_case(FINITE)
def test_grad_stats_equals_float64_on_finite_gradients(backend, case, dtype, norm_type):
    grads = FINITE[case](dtype)
    total_norm, stats = select(CPU).grad_stats(grads, norm_type)
    assert total_norm.shape == (1,) and total_norm.dtype == reference.result_dtype(grads)
    exact = exact_norm(grads, norm_type)
    # A norm in float32 is rounded to it, to zero and to its subnormals too.
    assert (
        relative_error(total_norm.item(), exact) <= tolerance(grads) or abs(total_norm.item() - exact) < 1e-45
    )
    assert stats.shape == (len(grads), 3)
    assert stats[:, 1:].count_nonzero() == 0
    each = reference.totals(stats, norm_type, range(len(grads)))
    for grad, norm in list(zip(grads, each.tolist(), strict=True))[:100]:
        assert relative_error(norm, exact_norm([grad], norm_type)) <= tolerance(grads)


@on_grid
@by_dtype
@by_norm
@pytest.mark.parametrize("finite_only", [False, True])
@each_case(NONFINITE)
def test_grad_stats_counts_nonfinite_elements_exactly(backend, case, dtype, norm_type, finite_only):
    grads = NONFINITE[case](dtype)
    total_norm, stats = select(CPU).grad_stats(grads, norm_type, finite_only)
    assert stats[:, 1].tolist() == [g.isnan().sum().item() for g in grads]
    assert stats[:, 2].tolist() == [g.isinf().sum().item() for g in grads]
    if finite_only:
        finite = [g[g.isfinite()] for g in grads]
        assert relative_error(total_norm.item(), exact_norm(finite, norm_type)) <= tolerance(grads)
    elif any(g.isnan().any() for g in grads):
        assert math.isnan(total_norm.item())
    else:
        assert total_norm.item() == INF


@by_norm
def test_grad_stats_of_mixed_dtypes(backend, norm_type):
    grads = cases.mixed()
    total_norm, _ = select(CPU).grad_stats(grads, norm_type)
    assert total_norm.dtype == torch.float64
    # The float32 elements are summed in float32 for a while.
    assert relative_error(total_norm.item(), exact_norm(grads, norm_type)) <= 1e-6
    grads = cases.mixed([torch.bfloat16, torch.float16])
    total_norm, _ = select(CPU).grad_stats(grads, norm_type)
    assert total_norm.dtype == torch.float32


@on_grid
@by_dtype
@pytest.mark.parametrize("max_norm", [0.5, INF])
@each_case(ALL)
def test_clip_multiplies_by_the_coefficient_once(backend, case, dtype, max_norm):
    grads = ALL[case](dtype)
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, max_norm, 2.0, "propagate")
    total_norm, coef, found_inf = summary[0]
    assert (coef == reference.clip_coefficient(total_norm, max_norm)) | coef.isnan()
    assert found_inf == (0.0 if case in FINITE else 1.0)
    expected = [(g * coef).to(dtype) for g in before] if coef != 1 else before
    assert_bitwise_equal(without_nan_payloads(grads), without_nan_payloads(expected))


@on_grid
@by_dtype
@pytest.mark.parametrize("max_norm", [1e-3, INF])
@each_case(NONFINITE)
def test_clip_with_zero_drops_nonfinite_elements(backend, case, dtype, max_norm):
    grads = NONFINITE[case](dtype)
    finite = [torch.where(g.isfinite(), g, 0) for g in grads]
    expected_norm = exact_norm(finite, 2.0)
    summary, _ = select(CPU).clip_(grads, max_norm, 2.0, "zero")
    total_norm, coef, found_inf = summary[0]
    assert relative_error(total_norm.item(), expected_norm) <= tolerance(grads)
    assert found_inf == 1.0
    assert_bitwise_equal([g + 0 for g in grads], [(g * coef).to(dtype) + 0 for g in finite])


@on_grid
@by_dtype
@each_case(NONFINITE)
def test_clip_with_skip_leaves_the_memory_as_it_is(backend, case, dtype):
    grads = NONFINITE[case](dtype)
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, 1e-3, 2.0, "skip")
    assert summary[0, 2] == 1.0
    assert_bitwise_equal(grads, before)


@on_grid
@by_dtype
@pytest.mark.parametrize("limit", CLAMP_LIMITS)
@each_case(ALL)
def test_clamp_equals_torch(backend, case, dtype, limit):
    grads = ALL[case](dtype)
    expected = clone(grads)
    for g in expected:
        g.clamp_min_(-limit).clamp_max_(limit) if limit <= torch.finfo(dtype).max or limit == INF else None
    select(CPU).clamp_(grads, limit)
    # Which of 0 and -0 a limit of 0 gives depends on torch's own code path.
    assert_bitwise_equal([g + 0 for g in grads], [g + 0 for g in expected])


@on_grid
@by_dtype
@each_case(ALL)
def test_scale_multiplies_by_one_factor_each(backend, case, dtype):
    grads = ALL[case](dtype)
    before = clone(grads)
    factors = random_factors(len(grads))
    select(CPU).scale_(grads, factors)
    wide = dtype == torch.float64
    expected = [(g * (f if wide else f.float())).to(dtype) for g, f in zip(before, factors, strict=True)]
    assert_bitwise_equal(without_nan_payloads(grads), without_nan_payloads(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("factor", [1.5, 0.75, 1 / 3])
def test_scale_rounds_every_16_bit_number_as_torch(backend, dtype, factor):
    """To nearest, ties to even: products with 1.5 and 0.75 often lie half-way between two numbers."""
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = torch.where(grad.isnan(), torch.nan, (grad.float() * factor).to(dtype))
    select(CPU).scale_([grad], torch.tensor([factor]))
    assert_bitwise_equal([torch.where(grad.isnan(), torch.nan, grad)], [expected])


@on_grid
@by_dtype
def test_scale_by_nan_gives_nan_whatever_its_payload(backend, dtype):
    """Rounded like a number, a NaN with a full payload would become -0 in bfloat16."""
    factor = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    grads = [cases.normal(dtype, 40)]
    select(CPU).scale_(grads, factor)
    assert grads[0].isnan().all()


def test_clip_unscales_by_inverse_scale(backend):
    grads = [cases.normal(torch.float32, n) * 1024 for n in (10, 2000)]
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, 0.7, 2.0, "propagate", (), torch.tensor(1 / 1024))
    unscaled = [g / 1024 for g in before]
    assert relative_error(summary[0, 0].item(), exact_norm(unscaled, 2.0)) <= 1e-6
    assert_bitwise_equal(grads, [g * summary[0, 1] for g in unscaled])
    # Nothing to clip: the scale is taken off all the same.
    grads = clone(before)
    select(CPU).clip_(grads, INF, 2.0, "propagate", (), torch.tensor(1 / 1024))
    assert_bitwise_equal(grads, unscaled)


def test_clip_gives_each_group_its_own_norm(backend):
    grads = [cases.normal(torch.float32, n) for n in (10, 20, 40000, 5)]
    before = clone(grads)
    groups = [1, 0, 1, 2]
    limits = torch.tensor([1.0, 2.0, INF])
    summary, _ = select(CPU).clip_(grads, limits, 2.0, "propagate", groups)
    for group in range(3):
        members = [g for g, number in zip(before, groups, strict=True) if number == group]
        assert relative_error(summary[group, 0].item(), exact_norm(members, 2.0)) <= 1e-6
    expected = [g * summary[number, 1] for g, number in zip(before, groups, strict=True)]
    assert_bitwise_equal(grads, expected)
    assert summary[2, 1] == 1.0


def test_clip_of_a_nonfinite_group_leaves_the_others_alone(backend):
    def build():
        return [cases.filled(torch.float32, 2.0, 4), cases.filled(torch.float32, math.nan, 4)]

    grads = build()
    summary, _ = select(CPU).clip_(grads, 1.0, 2.0, "propagate", [0, 1])
    assert summary[:, 2].tolist() == [0.0, 1.0]
    assert grads[0].isfinite().all() and grads[0].norm() <= 1
    grads = build()
    select(CPU).clip_(grads, 1.0, 2.0, "skip", [0, 1])
    assert_bitwise_equal(grads, build())


@by_dtype
@pytest.mark.parametrize("nonfinite", ["propagate", "skip", "zero"])
@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_clip_sets_found_inf_on_a_bad_limit_in_a_tensor(backend, dtype, nonfinite, max_norm):
    grads = [cases.normal(dtype, 50)]
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, torch.tensor(max_norm), 2.0, nonfinite)
    assert summary[0, 2] == 1.0
    if nonfinite == "skip":
        assert_bitwise_equal(grads, before)
    elif math.isnan(max_norm):
        assert grads[0].isnan().all()


def test_clip_counts_and_scales_a_repeated_gradient_twice(backend):
    grad = cases.normal(torch.float32, 3 * cases.CHUNK)
    other = cases.normal(torch.float32, 70)
    before = grad.clone()
    summary, stats = select(CPU).clip_([grad, other, grad], 1.0, 2.0, "propagate")
    coef = summary[0, 1]
    assert relative_error(summary[0, 0].item(), exact_norm([before, before, other / coef], 2.0)) <= 1e-6
    assert stats[0, 0] == stats[2, 0]
    assert_bitwise_equal([grad], [before * coef * coef])


def test_clip_and_grad_stats_give_the_same_bits(backend):
    grads = [cases.normal(torch.float32, n) for n in (5, 100000, 900)]
    total_norm, stats = select(CPU).grad_stats(grads, 2.0)
    summary, clip_stats = select(CPU).clip_(grads, INF, 2.0, "propagate")
    assert_bitwise_equal([total_norm, stats], [summary[:, 0].contiguous(), clip_stats])


# Ten million elements take the interpreter ten seconds.
TEN_MILLION = [pytest.param(b, marks=[pytest.mark.slow] * (b in (*NARROW, "triton"))) for b in BACKENDS]


@pytest.mark.parametrize("backend", TEN_MILLION, indirect=True)
def test_grad_stats_of_ten_million_elements_is_precise(backend):
    grad = cases.normal(torch.float32, 10_000_000)
    exact = exact_norm([grad], 2.0)
    total_norm, _ = select(CPU).grad_stats([grad], 2.0)
    assert relative_error(total_norm.item(), exact) <= 1e-6
