# SPDX-License-Identifier: BSD-3-Clause
"""pytest cases: the fixed cost of a call, the memory it adds, and the cost of the import."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import fastclip
from fastclip.bench.timing import MIN_ROUNDS
from fastclip.bench.workloads import SMOKE

from . import bars, overhead

CLIPS = {"torch": torch.nn.utils.clip_grad_norm_, "fastclip": fastclip.clip_grad_norm_}


@pytest.mark.parametrize("count", overhead.TENSOR_COUNTS)
@pytest.mark.parametrize("name", CLIPS)
def test_host_cost(benchmark: BenchmarkFixture, name: str, count: int) -> None:
    parameters = overhead.tiny(count).parameters
    benchmark.pedantic(
        CLIPS[name], args=(parameters, 1e6), rounds=10 * MIN_ROUNDS, iterations=1, warmup_rounds=MIN_ROUNDS
    )


@pytest.mark.parametrize("megabytes", overhead.MEGABYTES)
def test_clip_grad_norm_adds_no_memory_that_grows_with_the_gradients(megabytes: int) -> None:
    added = overhead.peak_memory("fastclip", megabytes)
    if added is None:
        pytest.skip("peak memory is read from /proc, which is missing")
    (check,) = bars.check_memory([added], [megabytes])
    assert check.reached


def test_peak_memory_includes_a_copy_of_the_gradients() -> None:
    megabytes = overhead.MEGABYTES[0]
    added = overhead.peak_memory(overhead.CONTROL, megabytes)
    if added is None:
        pytest.skip("peak memory is read from /proc, which is missing")
    # The system updates its count of a process's pages in batches.
    assert added >= 0.9 * (megabytes << 20)


def test_import_cost() -> None:
    check = bars.check_import(overhead.import_ms())
    assert SMOKE or check.reached
