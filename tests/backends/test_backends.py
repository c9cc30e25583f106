# SPDX-License-Identifier: BSD-3-Clause
"""Every backend, on each instruction set, over the whole case list: norms, counts, scaling, repeats."""

import math

import pytest
import torch

from fastclip.backends import reference, select
from helpers import cases
from helpers.cases import (
    ALL,
    DTYPES,
    FINITE,
    INF,
    NONFINITE,
    assert_bitwise_equal,
    clone,
    dtype_name,
    exact_norm,
)

CPU = torch.device("cpu")
NORM_TYPES = [1.0, 2.0, INF]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
by_norm = pytest.mark.parametrize("norm_type", NORM_TYPES)


def relative_error(actual: float, exact: float) -> float:
    return abs(actual - exact) / exact if exact else abs(actual)


def tolerance(grads) -> float:
    """Of a norm: the promised 1e-6 where it is told in float32, rounding of float64 sums else."""
    return 1e-6 if reference.result_dtype(grads) == torch.float32 else 1e-12


@by_dtype
@by_norm
@pytest.mark.parametrize("case", FINITE)
def test_norm_of_finite_gradients(backend, case, dtype, norm_type):
    grads = FINITE[case](dtype)
    total_norm, stats = select(CPU).grad_stats(grads, norm_type)
    assert total_norm.shape == (1,) and total_norm.dtype == reference.result_dtype(grads)
    exact = exact_norm(grads, norm_type)
    # A norm told in float32 is rounded to it, to zero and to its subnormals too.
    assert (
        relative_error(total_norm.item(), exact) <= tolerance(grads) or abs(total_norm.item() - exact) < 1e-45
    )
    assert stats.shape == (len(grads), 3)
    assert stats[:, 1:].count_nonzero() == 0
    each = reference.totals(stats, norm_type, range(len(grads)))
    for grad, norm in list(zip(grads, each.tolist(), strict=True))[:100]:
        assert relative_error(norm, exact_norm([grad], norm_type)) <= tolerance(grads)


@by_dtype
@by_norm
@pytest.mark.parametrize("case", NONFINITE)
@pytest.mark.parametrize("finite_only", [False, True])
def test_nonfinite_elements_are_counted_exactly(backend, case, dtype, norm_type, finite_only):
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
def test_mixed_dtypes_in_one_list(backend, norm_type):
    grads = cases.mixed()
    total_norm, _ = select(CPU).grad_stats(grads, norm_type)
    assert total_norm.dtype == torch.float64
    # The float32 elements are summed in float32 for a while.
    assert relative_error(total_norm.item(), exact_norm(grads, norm_type)) <= 1e-6
    grads = cases.mixed([torch.bfloat16, torch.float16])
    total_norm, _ = select(CPU).grad_stats(grads, norm_type)
    assert total_norm.dtype == torch.float32


@by_dtype
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("max_norm", [0.5, INF])
def test_clip_multiplies_by_the_coefficient_once(backend, case, dtype, max_norm):
    grads = ALL[case](dtype)
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, max_norm, 2.0, "propagate")
    total_norm, coef, found_inf = summary[0]
    assert (coef == reference.clip_coefficient(total_norm, max_norm)) | coef.isnan()
    assert found_inf == (0.0 if case in FINITE else 1.0)
    expected = [g * coef for g in before] if coef != 1 else before
    same_nan = [torch.where(g.isnan(), torch.nan, g) for g in grads]
    assert_bitwise_equal(same_nan, [torch.where(g.isnan(), torch.nan, g).to(dtype) for g in expected])


@by_dtype
@pytest.mark.parametrize("case", NONFINITE)
@pytest.mark.parametrize("max_norm", [1e-3, INF])
def test_zero_drops_nonfinite_elements(backend, case, dtype, max_norm):
    grads = NONFINITE[case](dtype)
    finite = [torch.where(g.isfinite(), g, 0) for g in grads]
    expected_norm = exact_norm(finite, 2.0)
    summary, _ = select(CPU).clip_(grads, max_norm, 2.0, "zero")
    total_norm, coef, found_inf = summary[0]
    assert relative_error(total_norm.item(), expected_norm) <= tolerance(grads)
    assert found_inf == 1.0
    assert_bitwise_equal([g + 0 for g in grads], [(g * coef).to(dtype) + 0 for g in finite])


@by_dtype
@pytest.mark.parametrize("case", NONFINITE)
def test_skip_leaves_the_memory_as_it_is(backend, case, dtype):
    grads = NONFINITE[case](dtype)
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, 1e-3, 2.0, "skip")
    assert summary[0, 2] == 1.0
    assert_bitwise_equal(grads, before)


@by_dtype
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("limit", [0.0, 0.1, 1e3, INF])
def test_clamp_equals_torch(backend, case, dtype, limit):
    grads = ALL[case](dtype)
    expected = clone(grads)
    for g in expected:
        g.clamp_min_(-limit).clamp_max_(limit) if limit <= torch.finfo(dtype).max or limit == INF else None
    select(CPU).clamp_(grads, limit)
    # Which of 0 and -0 a limit of 0 gives depends on torch's own code path.
    assert_bitwise_equal([g + 0 for g in grads], [g + 0 for g in expected])


@by_dtype
@pytest.mark.parametrize("case", ALL)
def test_scale_by_one_factor_each(backend, case, dtype):
    grads = ALL[case](dtype)
    before = clone(grads)
    factors = torch.rand(len(grads), dtype=torch.float64) + 0.1
    factors[::2] = 1.0
    select(CPU).scale_(grads, factors)
    wide = dtype == torch.float64
    expected = [g * (f if wide else f.float()) for g, f in zip(before, factors, strict=True)]
    assert_bitwise_equal(
        [torch.where(g.isnan(), torch.nan, g) for g in grads],
        [torch.where(g.isnan(), torch.nan, g).to(dtype) for g in expected],
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("factor", [1.5, 0.75, 1 / 3])
def test_every_16_bit_number_is_rounded_as_by_torch(backend, dtype, factor):
    """To nearest, ties to even: products with 1.5 and 0.75 often lie half-way between two numbers."""
    grad = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = torch.where(grad.isnan(), torch.nan, (grad.float() * factor).to(dtype))
    select(CPU).scale_([grad], torch.tensor([factor]))
    assert_bitwise_equal([torch.where(grad.isnan(), torch.nan, grad)], [expected])


def test_inverse_scale_unscales_and_clips(backend):
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


def test_groups_have_their_own_norm(backend):
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


def test_a_group_that_is_not_finite_leaves_the_others_alone(backend):
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
def test_bad_limit_in_a_tensor_is_not_read(backend, dtype, nonfinite, max_norm):
    grads = [cases.normal(dtype, 50)]
    before = clone(grads)
    summary, _ = select(CPU).clip_(grads, torch.tensor(max_norm), 2.0, nonfinite)
    assert summary[0, 2] == 1.0
    if nonfinite == "skip":
        assert_bitwise_equal(grads, before)
    elif math.isnan(max_norm):
        assert grads[0].isnan().all()


def test_the_same_gradient_twice_is_counted_and_scaled_twice(backend):
    grad = cases.normal(torch.float32, 3 * cases.CHUNK)
    other = cases.normal(torch.float32, 70)
    before = grad.clone()
    summary, stats = select(CPU).clip_([grad, other, grad], 1.0, 2.0, "propagate")
    coef = summary[0, 1]
    assert relative_error(summary[0, 0].item(), exact_norm([before, before, other / coef], 2.0)) <= 1e-6
    assert stats[0, 0] == stats[2, 0]
    assert_bitwise_equal([grad], [before * coef * coef])


def all_results(grads) -> list[torch.Tensor]:
    total_norm, stats = select(CPU).grad_stats(grads, 2.0)
    clipped = clone(grads)
    summary, _ = select(CPU).clip_(clipped, 0.1, 2.0, "propagate")
    return [total_norm, stats, summary, *clipped]


@pytest.mark.parametrize("dtype", [*DTYPES, "mixed"], ids=lambda d: d if d == "mixed" else dtype_name(d))
def test_same_bits_on_every_run_thread_count_and_instruction_set(native_only, threads, monkeypatch, dtype):
    # Sizes that give threads shares of their own, and tails in every chunk.
    sizes = (5, 12 * cases.CHUNK + 17, 900, 3 * cases.CHUNK - 1, 64)
    grads = cases.mixed() if dtype == "mixed" else [cases.normal(dtype, n) for n in sizes]
    expected = all_results(grads)
    from helpers.available import USABLE

    for capability in USABLE:
        monkeypatch.setenv("FASTCLIP_CPU_CAPABILITY", capability)
        for count in (1, 2, 4, 4, 3):
            threads(count)
            assert_bitwise_equal(all_results(grads), expected)


def test_total_norm_of_clip_and_of_stats_are_the_same_bits(backend):
    grads = [cases.normal(torch.float32, n) for n in (5, 100000, 900)]
    total_norm, stats = select(CPU).grad_stats(grads, 2.0)
    summary, clip_stats = select(CPU).clip_(grads, INF, 2.0, "propagate")
    assert_bitwise_equal([total_norm, stats], [summary[:, 0].contiguous(), clip_stats])


def test_healthy_precision_beats_torch(backend):
    grad = cases.normal(torch.float32, 10_000_000)
    exact = exact_norm([grad], 2.0)
    total_norm, _ = select(CPU).grad_stats([grad], 2.0)
    assert relative_error(total_norm.item(), exact) <= 1e-6
