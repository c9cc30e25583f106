# SPDX-License-Identifier: BSD-3-Clause
"""Every workload, dtype and implementation as a case of its own, clipped and not."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastclip.bench import parity
from fastclip.bench.machine import available_memory
from fastclip.bench.rows import limit_of
from fastclip.bench.timing import MIN_PAIRS
from fastclip.bench.workloads import WORKLOADS, Gradients

from . import providers

CASES = [(workload, dtype) for workload in WORKLOADS.values() for dtype in workload.dtypes]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def gradients(request: pytest.FixtureRequest) -> Iterator[Gradients]:
    workload, dtype = request.param
    if 3 * workload.nbytes(dtype) > available_memory():
        pytest.skip("not enough memory")
    yield Gradients.of(workload, dtype)
    gc.collect()


@pytest.fixture(scope="module")
def exact(gradients: Gradients) -> float:
    return parity.exact_norm(gradients.saved)


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", providers.NAMES)
def test_clip(
    benchmark: BenchmarkFixture, gradients: Gradients, exact: float, name: str, clipped: bool
) -> None:
    if reason := providers.reason_absent(name, len(gradients.saved)):
        pytest.skip(reason)
    max_norm = limit_of(exact, clipped)
    check = parity.check if providers.is_fastclip(name) else parity.check_torch
    with providers.provider(name) as clip:
        error = check(gradients, clip, max_norm, exact)
        nbytes = sum(grad.nbytes for grad in gradients.grads)
        benchmark.extra_info.update(bytes_moved=nbytes * (3 if clipped else 1), norm_error=error)
        benchmark.pedantic(
            clip,
            args=(gradients.parameters, max_norm),
            # A clip changes the gradients, so every round is one call on fresh ones.
            setup=gradients.restore if clipped else None,
            rounds=MIN_PAIRS,
            iterations=1,
        )
    gradients.restore()
