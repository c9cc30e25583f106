# SPDX-License-Identifier: BSD-3-Clause
"""The fixed cost of a call, the memory it takes, and the cost of the import."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import fastclip
from fastclip.bench.timing import MIN_PAIRS
from fastclip.bench.workloads import SMOKE

from . import bars, overhead

CLIPS = {"torch": torch.nn.utils.clip_grad_norm_, "fastclip": fastclip.clip_grad_norm_}


@pytest.mark.parametrize("count", overhead.TENSOR_COUNTS)
@pytest.mark.parametrize("name", CLIPS)
def test_host_cost(benchmark: BenchmarkFixture, name: str, count: int) -> None:
    parameters = overhead.tiny(count).parameters
    benchmark.pedantic(
        CLIPS[name], args=(parameters, 1e6), rounds=10 * MIN_PAIRS, iterations=1, warmup_rounds=MIN_PAIRS
    )


@pytest.mark.parametrize("megabytes", overhead.MEGABYTES)
def test_a_call_takes_no_memory_that_grows_with_the_gradients(megabytes: int) -> None:
    added = overhead.peak_memory("fastclip", megabytes)
    if added is None:
        pytest.skip("the peak of a process is read from /proc")
    assert bars.judge_memory(added, megabytes).reached


def test_the_memory_measurement_sees_a_copy_of_the_gradients() -> None:
    megabytes = overhead.MEGABYTES[0]
    added = overhead.peak_memory(overhead.CONTROL, megabytes)
    if added is None:
        pytest.skip("the peak of a process is read from /proc")
    # The system counts the pages of a process in batches.
    assert added >= 0.9 * (megabytes << 20)


def test_import_cost() -> None:
    verdict = bars.judge_import(overhead.import_ms())
    assert SMOKE or verdict.reached
