# SPDX-License-Identifier: BSD-3-Clause
"""The monitor on several processes: it names the guilty one, and all of them do the same in the same step."""

import math
from itertools import pairwise

import pytest

from fastclip.cli import main
from fastclip.monitor import Record
from fastclip.monitor.detectors.system import RankDiffers
from helpers import rank_jobs_monitor as jobs
from helpers.rank_jobs_monitor import STEPS
from helpers.ranks import Ranks

NAN = math.nan
GLOBAL = (
    *("step", "lr", "total_norm", "max_norm", "clip_coef", "nan_count", "inf_count", "nonfinite_ranks"),
    *("worst", "tensor_norms", "applied", "held", "skipped_steps", "param_norm", "ranks"),
)


@pytest.fixture(scope="module")
def two():
    processes = Ranks(2)
    yield processes
    processes.stop()


def run(processes, name, *arguments, **options):
    return processes.run(jobs.call, name, arguments, options)


def of(result, *names):
    """Some fields of all records, in a form that compares NaN too."""
    return [repr([record.get(name) for name in names]) for record in result["records"]]


def assert_same(results, *names):
    first = results[0]
    for other in results[1:]:
        assert of(other, *names) == of(first, *names)
        assert other["digests"] == first["digests"] and other["lrs"] == first["lrs"]


# Who is guilty.


@pytest.mark.parametrize(
    ("layout", "tell"),
    [
        *(("ddp", "all"), ("ddp", "loss"), ("fsdp2", "all"), ("fsdp2", "loss")),
        *(pytest.param("fsdp2", tell, marks=pytest.mark.slow) for tell in ("rank 1", "late")),
    ],
)
def test_every_rank_names_the_one_with_the_bad_batch(two, layout, tell):
    results = run(two, "plain", layout=layout, tell=tell, hurt={6: NAN})
    for rank, result in enumerate(results):
        assert ("rank", "error", 6, 1) in result["events"]
        assert not [e for e in result["events"] if e[0] == "rank" and e[2:] != (6, 1)]
        finding = result["finding"]
        assert (finding.area, finding.step, finding.rank) == ("data", 6, 1)
        assert finding.cause == ("rank_nonfinite" if tell == "loss" else "nonfinite_batch")
        known = rank == 1 and tell != "loss"
        assert finding.sample_ids == ([610, 611, 612, 613] if known else [])
    assert_same(results, *GLOBAL)


@pytest.mark.slow
def test_four_ranks_agree():
    four = Ranks(4)
    try:
        results = run(four, "plain", layout="fsdp2", hurt={6: NAN})
        assert_same(results, *GLOBAL)
        assert all(("rank", "error", 6, 1) in result["events"] for result in results)
        acting = run(four, "acting", "raise", "rank 0", True, True)
    finally:
        four.stop()
    assert_same(acting, *GLOBAL[:-2])
    assert [a["raised"][1:] for a in acting] == [(1, "alone" if r == 1 else "rank") for r in range(4)]
    assert len({a["raised"][0] for a in acting}) == 1


def test_rank_differs_reports_each_rank_once():
    detector = RankDiffers()

    def update(step, **ranks):
        event = detector.update(Record(step, ranks=ranks))
        return event and (event.severity, event.rank)

    assert update(0, loss=[1.0, NAN], requests=[0.0, 0.0]) == ("error", 1)
    assert update(1, loss=[1.0, NAN]) is None  # it lasts
    assert update(2, loss=[NAN, 1.0]) == ("error", 0)
    assert update(3, batch_nonfinite=[0.0, 3.0], requests=[0.0, 0.0]) == ("error", 1)  # losses are not known
    assert update(20, batch_nonfinite=[NAN, 3.0]) == ("error", 1)  # rank 0 was given no batch
    assert update(40, loss=[NAN, NAN]) is None
    assert update(41) is None


# The numbers.


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_records_of_every_rank_have_the_global_numbers(two, layout):
    results = run(two, "plain", layout=layout, hurt={7: NAN})
    assert_same(results, *GLOBAL)
    gold = run(two, "alone", {7: NAN})[0]
    losses = zip(*([r["loss"] for r in result["records"]] for result in results), strict=True)
    for record, expected, pair in zip(results[0]["records"], gold, losses, strict=True):
        for name in ("step", "lr", "nan_count", "inf_count", "applied", "skipped_steps", "max_norm"):
            assert record[name] == expected[name], name
        for name in ("total_norm", "clip_coef", "param_norm"):
            known = expected.get(name)
            assert record.get(name) == (known and pytest.approx(known, rel=2e-4, nan_ok=True)), name
        names = [[t["name"].removeprefix("module.") for t in r["worst"]] for r in (record, expected)]
        assert names[0] == names[1]
        assert sum(pair) / 2 == pytest.approx(expected["loss"], rel=2e-4, nan_ok=True)
    assert sum(r.get("param_norm") is not None for r in results[0]["records"]) == 5


def test_records_of_pipeline_stages_have_the_global_norm(two):
    """Their names differ, the norm and the counts are those of all."""
    first, second = run(two, "plain", layout="stages", hurt={6: NAN})
    assert of(first, "total_norm", "nan_count", "applied") == of(second, "total_norm", "nan_count", "applied")
    counts = [record["nan_count"] for record in first["records"]]
    assert first["digests"] != second["digests"] and counts[6] > 0 == sum(counts) - counts[6]


def test_update_ratios_are_of_local_shards(two):
    (first, expected), (second, _) = run(two, "ratio_of_shards")
    assert first == pytest.approx(expected) and first != pytest.approx(second)


def test_monitor_makes_one_collective_per_step(two):
    """And one for the norm of sharded parameters in the steps that have it."""
    for seen in run(two, "counted", "ddp", 6):
        assert seen == [1] * 6 + [0]
    alone = run(two, "counted", "fsdp2", 6, compare_ranks=False, weights_every=0)[0]
    compared = run(two, "counted", "fsdp2", 6, weights_every=0)[0]
    assert [c - a for c, a in zip(compared, alone, strict=True)] == [1] * 6 + [0]
    sampled = run(two, "counted", "fsdp2", 6)[0]
    assert [s - c for s, c in zip(sampled, compared, strict=True)] == [1, 1, 1, 0, 1, 0, 0]
    gated = run(two, "counted", "ddp", 6, actions={"nonfinite": ["skip", "stop"], "norm_spike": "skip"})
    assert gated == [[1] * 6 + [0]] * 2


def test_each_rank_has_its_log(two, tmp_path, capsys):
    run(two, "plain", hurt={6: NAN}, log_dir=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank00000.jsonl", "rank00001.jsonl"]
    assert main(["diagnose", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    data = next(line for line in shown.splitlines() if line.startswith("data"))
    assert "step 6, rank 1: " in data and "samples 610, 611, 612, 613" in data


# Acting together.

WAYS = [("all", False), ("rank 0", False), ("late", True), ("rank 1", True), ("all", True)]


@pytest.mark.parametrize("action", ["stop", "lower_lr", "raise"])
@pytest.mark.parametrize(("tell", "late_too"), WAYS)
def test_event_of_one_rank_makes_all_act_in_the_same_step(two, action, tell, late_too):
    """`late_too`: numbers arrive as from a GPU, at other times on each rank, one of which waits for them."""
    results = run(two, "acting", action, tell, late_too, late_too)
    assert_same(results, *GLOBAL[:-2])
    assert results[0]["stops"] == results[1]["stops"]
    lowered = [b / a < 0.6 for a, b in pairwise(results[0]["lrs"])]
    assert sum(lowered) == (action == "lower_lr")
    assert (True in results[0]["stops"]) == (action == "stop")
    if action == "raise":
        assert results[0]["raised"][1:] == (1, "rank") and results[1]["raised"][1:] == (1, "alone")
        assert results[0]["raised"][0] == results[1]["raised"][0]
    else:
        assert len(results[0]["lrs"]) == 30
    if not late_too:  # then the next step already is another one
        if action == "raise":
            step = results[0]["raised"][0]
        else:
            step = lowered.index(True) + 1 if action == "lower_lr" else results[0]["stops"].index(True)
        assert step == 6


def test_event_of_several_ranks_lowers_the_rate_once(two):
    options = {"actions": {"nonfinite": "lower_lr"}, "hurt": {9: NAN}}
    for result in run(two, "acting", "log", "all", True, True, **options):
        halvings = [b / a < 0.6 for a, b in pairwise(result["lrs"])]
        assert sum(halvings) == 1


def test_monitor_raises_on_joint_actions_without_compare_ranks(two):
    for action in ("stop", "lower_lr", "raise", "skip"):
        for message in run(two, "refused", {"compare_ranks": False, "actions": {"nonfinite": action}}):
            assert "expected compare_ranks=True" in message and f"'{action}'" in message
            assert "on 2 processes" in message
    for message in run(two, "different_skips"):
        assert "for the same kinds of events on every rank" in message


# Skipping steps.

SKIPPING = [
    ("sgd", "ddp", None, "loss"),
    ("sgd", "fsdp2", None, "targets"),
    ("adamw_fused", "fsdp2", None, "loss"),
    ("adamw_fused", "ddp", "torch", "targets"),
    ("sgd", "ddp", "torch", "loss"),
    ("adamw_foreach", "ddp", "fastclip", "targets"),
    ("adamw_fused", "ddp", "fastclip", "loss"),
]


@pytest.mark.parametrize(("kind", "layout", "scaler", "what"), SKIPPING)
def test_all_ranks_skip_the_same_steps(two, kind, layout, scaler, what):
    """A loss that is NaN and one that spikes, or a target that makes the norm spike, on one rank of two."""
    hurt = {2: NAN, 9: 1e4} if what == "loss" else {9: 1e4}
    options = {"kind": kind, "layout": layout, "scaler": scaler, "what": what}
    results = run(two, "skipping", hurt=hurt, max_norm=100.0, **options)
    assert_same(results, *GLOBAL[:-1])
    for result in results:
        records, digests = result["records"], result["digests"]
        assert [r["step"] for r in records if r["held"]] == list(hurt)
        assert [r["step"] for r in records if r["applied"] is False] == list(hurt)
        assert [a == b for a, b in pairwise(digests)] == [s in hurt for s in range(STEPS)]
        assert set(result["scales"]) <= {8.0}


@pytest.mark.parametrize("tell", ["all", "rank 1", "late"])
@pytest.mark.parametrize("late_too", [False, True])
def test_bad_loss_of_one_rank_skips_the_step_on_all(two, tell, late_too):
    results = run(two, "skipping", late_too, True, tell=tell, what="loss", hurt={9: NAN})
    assert_same(results, *GLOBAL[:-1])
    skipped = [r["step"] for r in results[0]["records"] if r["held"]]
    assert skipped == (
        [9] if tell == "all" else []
    )  # a batch is no loss, and the step is over before the loss


# What goes wrong elsewhere.


def test_monitor_raises_if_other_ranks_have_none(two):
    """One that does not compare needs no other; those made together afterwards find each other."""
    for message, silent, compared in run(two, "without_a_monitor_on_the_other"):
        assert "not all made one within 0.3 seconds" in message and "compare_ranks=False" in message
        assert silent == [0] * 4 and compared == [1, 1, 1, 0]


def test_extra_step_on_one_rank_fails_in_torch_first(two):
    assert run(two, "uneven") == ["nowhere", "the backward pass of step 3"]


def test_failed_batch_on_one_rank_keeps_collectives_in_step(two):
    first, second = run(two, "failing_batch")
    assert first == second and sum(norm is not None for norm in first) == 5


def test_run_resumes_in_new_processes(two, tmp_path):
    """Saved between an event of rank 1 and what all do about it; the process group goes first."""
    whole, lr, digest = run(two, "resumable", "", "", 0, 16)[0]
    assert [e for e in whole if e[0] == "rank"] == [("rank", 10, 1)]
    before = run(two, "resumable", "", str(tmp_path), 0, 6)
    two.stop()
    after = run(two, "resumable", str(tmp_path), "", 6, 10)
    assert before[0][0] + after[0][0] == whole
    assert {result[1:] for result in after} == {(lr, digest)}
