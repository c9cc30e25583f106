# SPDX-License-Identifier: BSD-3-Clause
"""pytest cases: every workload, dtype and implementation, unclipped and clipped."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fastclip.bench import parity
from fastclip.bench.clip_rows import max_norm_of
from fastclip.bench.machine import available_memory
from fastclip.bench.timing import MIN_ROUNDS
from fastclip.bench.workloads import WORKLOADS, RestorableGradients

from . import implementations

CASES = [(workload, dtype) for workload in WORKLOADS.values() for dtype in workload.dtypes]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].name}-{case[1]}")
def gradients(request: pytest.FixtureRequest) -> Iterator[RestorableGradients]:
    workload, dtype = request.param
    if 3 * workload.nbytes(dtype) > available_memory():
        pytest.skip("not enough memory")
    yield RestorableGradients.of(workload, dtype)
    gc.collect()


@pytest.fixture(scope="module")
def exact(gradients: RestorableGradients) -> float:
    return parity.exact_norm(gradients.saved)


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("name", implementations.NAMES)
def test_clip(
    benchmark: BenchmarkFixture, gradients: RestorableGradients, exact: float, name: str, clipped: bool
) -> None:
    if reason := implementations.skip_reason(name, len(gradients.saved)):
        pytest.skip(reason)
    max_norm = max_norm_of(exact, clipped)
    check = parity.check if implementations.is_fastclip(name) else parity.check_torch
    with implementations.implementation(name) as clip:
        error = check(gradients, clip, max_norm, exact)
        benchmark.extra_info.update(bytes_moved=gradients.nbytes * (3 if clipped else 1), norm_error=error)
        benchmark.pedantic(
            clip,
            args=(gradients.parameters, max_norm),
            # Clipping changes the gradients, so every round is one call on restored ones.
            setup=gradients.restore if clipped else None,
            rounds=MIN_ROUNDS,
            iterations=1,
        )
    gradients.restore()
