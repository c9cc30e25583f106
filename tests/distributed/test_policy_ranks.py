# SPDX-License-Identifier: BSD-3-Clause
"""Policies over two gloo processes: the limits are the same on both, and those of one process with it all."""

import pytest

from helpers import rank_jobs_policies
from helpers.ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(2)
    yield started
    started.stop()


def assert_same_on_both(results, alone):
    assert results[0] == results[1]
    for got, wanted in zip(results[0], alone, strict=True):
        assert got == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "kind, way",
    [
        *((kind, "clip") for kind in rank_jobs_policies.POLICIES),
        *(pytest.param(kind, "attach", marks=pytest.mark.slow) for kind in rank_jobs_policies.POLICIES),
        ("zclip", "groups"),
        ("zclip", "zero"),
        ("adagc", "zero"),
    ],
)
def test_policy_on_two_ranks_gives_the_limits_of_one(ranks, kind, way):
    results = ranks.run(rank_jobs_policies.limits, kind, way)
    assert_same_on_both(results, rank_jobs_policies.limits(kind, way, sharded=False))


def test_policy_of_stages_on_two_ranks_gives_the_limits_of_one(ranks):
    assert_same_on_both(ranks.run(rank_jobs_policies.stages), rank_jobs_policies.stages(split=False))
