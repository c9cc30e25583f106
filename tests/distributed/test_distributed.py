# SPDX-License-Identifier: BSD-3-Clause
"""Real gloo processes: sharded gradients, data, tensor and pipeline parallelism, and what goes wrong."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.collectives import cost
from helpers import rank_jobs
from helpers.ranks import RankFailed, Ranks

INF = math.inf
ORDERS = [2.0, 1.0, INF, 3.0, 0.5]


@pytest.fixture(scope="module")
def two():
    processes = Ranks(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def four():
    processes = Ranks(4)
    yield processes
    processes.stop()


# On four ranks `make test` runs only what needs four: they share a few cores.
@pytest.fixture(scope="module", params=["two", pytest.param("four", marks=pytest.mark.slow)])
def ranks(request):
    return request.getfixturevalue(request.param)


def assert_same_on_all(results: list) -> None:
    """Bit for bit, NaN included."""
    assert all(repr(result) == repr(results[0]) for result in results), results


def test_clip_of_every_dtensor_layout_equals_the_whole(ranks):
    shape = (2,) if ranks.world == 2 else (2, 2)
    assert_same_on_all(ranks.run(rank_jobs.clip_layouts, shape, ORDERS))
    if ranks.world == 4:
        assert_same_on_all(ranks.run(rank_jobs.clip_layouts, (4,), [2.0, INF]))


@pytest.mark.parametrize(
    ("kind", "way"), [("sgd", "clip"), ("adamw_fused", "attach"), ("adamw_foreach", "attach")]
)
def test_fsdp2_trains_as_one_process(ranks, kind, way):
    assert_same_on_all(ranks.run(rank_jobs.fsdp2, (ranks.world,), kind, way))


@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_foreach"])
def test_nan_on_one_rank_skips_the_step_on_all(ranks, kind):
    assert_same_on_all(ranks.run(rank_jobs.fsdp2, (ranks.world,), kind, "attach", ranks.world - 1))


@pytest.mark.parametrize("attached", [True, False])
def test_overflow_on_one_rank_lowers_the_scale_on_all(ranks, attached):
    results = ranks.run(rank_jobs.overflow_on_one_rank, attached)
    assert all(scales == [32.0, 32.0, 32.0] for scales in results), results


def test_fsdp2_over_tensor_parallelism_trains_as_one_process(four):
    assert_same_on_all(four.run(rank_jobs.fsdp2, (2, 2), "sgd", "clip"))


def test_hsdp_trains_as_one_process(four):
    assert_same_on_all(four.run(rank_jobs.hsdp, "sgd"))


@pytest.mark.parametrize(("kind", "way"), [("sgd", "clip"), ("adamw_fused", "attach")])
def test_data_parallel_trains_as_one_process(ranks, kind, way):
    assert_same_on_all(ranks.run(rank_jobs.ddp, kind, way))


def test_tensor_parallel_trains_as_one_process(two):
    assert_same_on_all(two.run(rank_jobs.tensor_parallel, "sgd", "clip"))


@pytest.mark.parametrize(("kind", "way"), [("sgd", "clip"), ("adamw_fused", "attach"), ("sgd", "attach")])
def test_pipeline_stages_clip_by_the_norm_of_all(two, kind, way):
    assert_same_on_all(two.run(rank_jobs.pipeline, kind, way))


@pytest.mark.parametrize("norm_type", [2.0, INF, 0.0, -INF])
def test_experts_count_on_each_rank_and_the_router_once(ranks, norm_type):
    assert_same_on_all(ranks.run(rank_jobs.experts, norm_type))


def test_two_process_groups_add_up(four):
    assert_same_on_all(four.run(rank_jobs.two_process_groups))


def test_clip_of_several_meshes_and_plain_tensors(ranks):
    assert_same_on_all(ranks.run(rank_jobs.two_meshes))


def test_other_functions_serve_sharded_gradients(ranks):
    assert_same_on_all(ranks.run(rank_jobs.other_functions))


def test_nan_on_one_rank_follows_the_nonfinite_mode(ranks):
    last = ranks.world - 1
    for nonfinite in ("skip", "propagate", "zero"):
        results = ranks.run(rank_jobs.nan_on_one_rank, nonfinite)
        assert all(found == ("layer2", 1, 1, [last], 1.0) for found, *_ in results), results
        assert_same_on_all([norm for *_, norm in results])
        changed = [c for _, own, _, _ in results for c in own]
        assert not any(changed) if nonfinite == "skip" else all(changed)
        assert_same_on_all([finite for _, _, finite, _ in results])
        assert all(results[0][2]) == (nonfinite == "zero")


def test_inf_norm_beside_nan_is_nan_on_every_rank(ranks):
    """What a library makes of the maximum of NaN and a number is its own affair."""
    for found, _, _, norm in ranks.run(rank_jobs.nan_on_one_rank, "skip", INF):
        assert found == ("layer2", 1, 1, [ranks.world - 1], 1.0) and math.isnan(norm)


def test_nonfinite_error_is_raised_on_every_rank_and_names_it(ranks):
    for message, unchanged in ranks.run(rank_jobs.nan_on_one_rank, "error"):
        assert f"layer2 (1 NaN, 1 Inf), seen by rank {ranks.world - 1}" in message and unchanged


@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_rank_without_gradients_takes_part(ranks, norm_type):
    """With fewer rows than ranks too, so that some shards are empty."""
    assert_same_on_all(ranks.run(rank_jobs.rank_without_gradients, norm_type))


@pytest.mark.parametrize("when", ["at first", "later"])
def test_unequal_lists_raise_on_every_rank(ranks, when):
    if when == "at first":
        ranks.stop()
    for message in ranks.run(rank_jobs.unequal_lists, when == "later"):
        assert "the same sharded parameters on each" in message


def test_mistaken_process_groups_raise(ranks):
    results = ranks.run(rank_jobs.mistaken_groups)
    for messages in results:
        assert "but got 'p'" in messages[0] and "but got 3" in messages[1]
        assert messages[2] == "expected groups or process_group, but got both"
    assert "of which this process is a member" in results[0][3]


def test_flat_shards_of_fsdp1_raise_without_process_group(ranks):
    for refused, attach_refused, norm, expected in ranks.run(rank_jobs.flat_shards):
        assert "flat shards" in refused and "process_group=model.process_group" in refused
        assert refused == attach_refused
        assert norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow  # waits until a process is given up
def test_ranks_that_hang_fail_the_test_and_leave_no_process(monkeypatch):
    from helpers import ranks as module

    monkeypatch.setattr(module, "TIMEOUT", 20.0)
    processes = Ranks(1)
    assert processes.run(rank_jobs.whole_gradients)[0][0].shape == (7, 6)
    monkeypatch.setattr(module, "TIMEOUT", 1.0)
    alive = list(processes._processes)
    with pytest.raises(RankFailed, match="rank 0 gave no answer in 1 seconds"):
        processes.run(rank_jobs.sleep, 30.0)
    assert not any(process.is_alive() for process in alive)
    with pytest.raises(RankFailed, match=r"rank 0 raised:(.|\n)*ZeroDivisionError"):
        monkeypatch.setattr(module, "TIMEOUT", 20.0)
        processes.run(rank_jobs.fail)
    processes.stop()


COUNTED = [((2,), [6]), ((4,), [6]), ((2, 2), [4, 3])]  # the last: rows of fsdp_tp over dp, over tp


@pytest.mark.parametrize("with_group", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_collectives_match_the_formula(ranks, norm_type, with_group):
    for shape, rows in COUNTED:
        if math.prod(shape) != ranks.world:
            continue
        expected = cost(rows, ranks.world, math.isinf(norm_type), int(with_group))
        groups = [*shape, *[ranks.world] * with_group]
        sizes = [size for size in groups for _ in range(2 if math.isinf(norm_type) else 1)]
        for seen in ranks.run(rank_jobs.count_collectives, shape, norm_type, with_group):
            assert [numel for _, numel in seen] == list(expected.sizes)
            assert [size for size, _ in seen] == sizes


@pytest.mark.slow  # eight processes on a few cores
def test_collectives_of_eight_processes():
    """8 ranks on any number of cores: 2 x 4, so that both dimensions shard."""
    processes = Ranks(8)
    try:
        seen = processes.run(rank_jobs.count_collectives, (2, 4), 2.0, False)
    finally:
        processes.stop()
    assert all([numel for _, numel in own] == list(cost([4, 3], 8).sizes) for own in seen)


@pytest.mark.slow  # torchrun starts two processes of its own
def test_fsdp2_example_runs(tmp_path):
    """examples/fsdp2.py, started by torchrun as its users do."""
    example = Path(__file__).parents[2] / "examples" / "fsdp2.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(example), "--steps", "12"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 12  # one rank prints
    assert "skipped: NaN or Inf in" in done.stdout and "on rank 0, 1" in done.stdout
    assert "diagnosis on rank 0: step 6, rank 1: the batch of rank 1 holds 1 NaN" in done.stdout
    assert "diagnosis on rank 1: step 6, rank 1: batch tensor batch holds 1 NaN" in done.stdout
    assert "samples rank1/192, rank1/193" in done.stdout
    first, last = (float(line.split("loss ")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert last < first
