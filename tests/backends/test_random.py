# SPDX-License-Identifier: BSD-3-Clause
"""Random lists of gradients: sizes, dtypes, layouts and values drawn together."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastclip.backends import reference, select
from helpers import cases
from helpers.available import BACKENDS, NARROW
from helpers.cases import CHUNK, DTYPES, INF, NAN, assert_bitwise_equal, clone, exact_norm

SIZES = st.one_of(st.integers(0, 70), st.sampled_from([1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1]))
MAX_NORMS = st.sampled_from([0.0, 0.1, 1e3, INF])
NORM_TYPES = st.sampled_from([1.0, 2.0, INF])
# 150 lists take a minute in the interpreter, where 20 take ten seconds, and 20 seconds in the CUDA kernels.
SLOW = [*NARROW, "triton", "cuda_on_cpu"]
AT_LENGTH = [pytest.param(b, marks=[pytest.mark.slow] * (b in SLOW)) for b in BACKENDS]
VALUES = st.sampled_from([0.0, -0.0, 1.0, NAN, INF, -INF, 1e20, 1e-25, 6e4])


@st.composite
def gradients(draw) -> list[torch.Tensor]:
    """A list of up to eight gradients, some with gaps, some misaligned, some with special values."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    grads = []
    for _ in range(draw(st.integers(1, 8))):
        dtype, size = draw(st.sampled_from(DTYPES)), draw(SIZES)
        offset, step = draw(st.integers(0, 5)), draw(st.integers(1, 3))
        grad = cases.normal(dtype, size * step + offset)[offset::step]
        for _ in range(draw(st.integers(0, 3)) if grad.numel() else 0):
            value = torch.tensor(draw(VALUES), dtype=torch.float64).to(dtype)  # float16 makes 1e20 Inf
            grad[draw(st.integers(0, grad.numel() - 1))] = value
        grads.append(grad)
    return grads


def drawn(examples: int):
    """Give a test so many lists with an order of the norm and a limit, the same on every run."""
    few = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    return lambda test: few(given(grads=gradients(), norm_type=NORM_TYPES, max_norm=MAX_NORMS)(test))


def check_counts_norm_and_coefficient(grads, norm_type, max_norm) -> None:
    module = select(torch.device("cpu"))
    total_norm, stats = module.grad_stats(grads, norm_type)
    assert stats[:, 1].tolist() == [g.isnan().sum().item() for g in grads]
    assert stats[:, 2].tolist() == [g.isinf().sum().item() for g in grads]
    finite = [g[g.isfinite()] for g in grads]
    if all(len(f) == g.numel() for f, g in zip(finite, grads, strict=True)):
        exact = exact_norm(grads, norm_type)
        assert math.isclose(total_norm.item(), exact, rel_tol=1e-6, abs_tol=1e-45)
    before = clone(grads)
    summary, clip_stats = module.clip_(grads, max_norm, norm_type, "zero")
    assert_bitwise_equal([clip_stats[:, 1:].contiguous()], [stats[:, 1:].contiguous()])
    coef = summary[0, 1]
    assert coef == reference.clip_coefficient(summary[0, 0], max_norm)
    expected = [torch.where(g.isfinite(), g * coef, 0).to(g.dtype) for g in before]
    assert_bitwise_equal([g + 0 for g in grads], [g + 0 for g in expected])


@pytest.mark.parametrize("backend", AT_LENGTH, indirect=True)
@drawn(150)
def test_clip_of_random_lists(backend, grads, norm_type, max_norm):
    check_counts_norm_and_coefficient(grads, norm_type, max_norm)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b == "triton"], indirect=True)
@drawn(20)
def test_clip_of_a_few_random_lists_in_the_interpreter(backend, grads, norm_type, max_norm):
    check_counts_norm_and_coefficient(grads, norm_type, max_norm)
