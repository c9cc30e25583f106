# SPDX-License-Identifier: BSD-3-Clause
"""The jobs of test_distributed.py by NCCL, on machines with several GPUs."""

import math

import pytest
import torch

from helpers import rank_jobs
from helpers.ranks import Ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ranks():
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs several GPUs")
    processes = Ranks(4 if count >= 4 else 2, "nccl")
    yield processes
    processes.stop()


def assert_same_on_all(results: list) -> None:
    assert all(repr(result) == repr(results[0]) for result in results), results


def test_clip_of_every_dtensor_layout_equals_the_whole(ranks):
    shape = (2,) if ranks.world == 2 else (2, 2)
    assert_same_on_all(ranks.run(rank_jobs.clip_layouts, shape, [2.0, 1.0, math.inf]))


@pytest.mark.parametrize(("kind", "way"), [("sgd", "clip"), ("adamw_fused", "attach")])
def test_fsdp2_trains_as_one_process(ranks, kind, way):
    assert_same_on_all(ranks.run(rank_jobs.fsdp2, (ranks.world,), kind, way))


def test_nan_on_one_rank_skips_the_step_on_all(ranks):
    assert_same_on_all(ranks.run(rank_jobs.fsdp2, (ranks.world,), "adamw_fused", "attach", ranks.world - 1))


def test_nan_on_one_rank_follows_the_nonfinite_mode(ranks):
    for nonfinite in ("skip", "propagate", "zero"):
        results = ranks.run(rank_jobs.nan_on_one_rank, nonfinite)
        assert all(found == ("layer2", 1, 1, [ranks.world - 1], 1.0) for found, *_ in results), results


def test_experts_and_other_functions_by_nccl(ranks):
    assert_same_on_all(ranks.run(rank_jobs.other_functions))
    assert_same_on_all(ranks.run(rank_jobs.two_meshes))
