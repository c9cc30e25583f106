# SPDX-License-Identifier: BSD-3-Clause
"""verdict_of and fastclip lint, on fastclip's logs and on others; other commands on logs of others."""

import csv
import json
import math
import shutil
from pathlib import Path

import pytest

from fastclip.cli import main
from fastclip.logs import read_run, verdict_of
from fastclip.logs.reader import Run
from fastclip.monitor import MEANINGS, Event, Record, detectors
from fastclip.monitor.sinks import JsonlSink
from helpers.records import NAN, bad_gradients, clipped, detect, gpt2, healthy, lognormal, seeded, watched

COLUMNS = ("step", "loss", "grad_norm")


@pytest.fixture
def lint(capsys):
    def run(*arguments, command="lint"):
        status = main([command, *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def table(path, rows, columns=COLUMNS):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
    return path


def calm(count, loss=2.0):
    rng = seeded()
    return [(s, loss + rng.gauss(0, 0.03), lognormal(rng, 0.1, 0.2)) for s in range(count)]


def write_fastclip_log(directory, records):
    sink = JsonlSink(directory, header={"meanings": MEANINGS})
    for record in records:
        sink.write(record.to_dict())
    sink.close()
    return directory


def test_lint_passes_a_healthy_table(tmp_path, lint):
    path = table(tmp_path / "a.csv", calm(100))
    assert lint(path) == (0, f"{path}: healthy: 100 steps, 0 to 99 (CSV)\n", "")


def test_lint_passes_a_healthy_fastclip_log(tmp_path, lint):
    rng = seeded()
    path = write_fastclip_log(tmp_path / "log", watched([healthy(rng, s) for s in range(100)]))
    lines = [
        f"{path}: healthy: 100 steps, 0 to 99 (fastclip log)",
        "  clipped 0 of 100 steps (0%), last at max_norm 1",
    ]
    assert lint(path) == (0, "\n".join(lines) + "\n", "")


def test_lint_returns_1_for_warnings(tmp_path, lint):
    rows = calm(100)
    rows[70] = (70, 2.0, 20.0)
    rows[71] = (71, 2.0, 20.0)
    path = table(tmp_path / "a.csv", rows)
    status, out, err = lint(path)
    assert (status, err) == (1, "")
    first, spike, growth = out.splitlines()
    assert first == f"{path}: warnings: 100 steps, 0 to 99 (CSV)"
    assert spike.startswith("  warning: norm_spike: in step 70: the gradient norm is 20, ")
    assert growth.startswith("  warning: norm_growth: in step 71: the gradient norm is 20, ")


def test_lint_returns_2_for_an_exploded_table(tmp_path, lint):
    rows = [*calm(100), *((s, NAN, NAN) for s in range(100, 120))]
    path = table(tmp_path / "a.csv", rows)
    status, out, err = lint(path)
    assert (status, err) == (2, "")
    assert out.splitlines() == [
        f"{path}: exploded: 120 steps, 0 to 119 (CSV)",
        "  error: nonfinite: reported 3 times, first in step 100: the loss is nan; the gradient norm is nan",
        "  NaN or Inf in 20 of 120 steps",
    ]


def test_lint_returns_2_for_an_exploded_fastclip_log(tmp_path, lint):
    rng = seeded()
    records = [healthy(rng, s) for s in range(40)]
    records.append(healthy(rng, 40, loss=NAN, applied=False, loss_scale=None, **bad_gradients()))
    path = write_fastclip_log(tmp_path / "log", watched(records))
    status, out, _ = lint(path)
    assert status == 2
    assert out.splitlines()[1:] == [
        "  error: nonfinite: in step 40: the loss is nan; the gradients hold 3 NaN and 0 Inf; most of them "
        "in body.weight; the step was skipped",
        "  NaN or Inf in 1 of 41 steps, 1 of them skipped",
        "  clipped 0 of 41 steps (0%), last at max_norm 1",
    ]


@pytest.mark.parametrize("applied, after, expected", [(False, 1, 1), (False, 0, 2), (True, 1, 2)])
def test_lint_returns_1_for_nan_in_a_skipped_step_if_the_run_went_on(
    tmp_path, lint, applied, after, expected
):
    rng = seeded()
    records = [healthy(rng, s, applied=True) for s in range(40)]
    records.append(healthy(rng, 40, loss=NAN, applied=applied, loss_scale=None, **bad_gradients()))
    records += [healthy(rng, 41 + s, applied=True) for s in range(after)]
    status, out, _ = lint(write_fastclip_log(tmp_path / "log", watched(records)))
    assert status == expected and "  error: nonfinite: in step 40" in out


def test_lint_passes_overflows_of_a_loss_scaler(tmp_path, lint):
    rng = seeded()
    records = [healthy(rng, s) for s in range(40)]
    records[3] = healthy(rng, 3, applied=False, overflows=1, **bad_gradients())
    status, out, _ = lint(write_fastclip_log(tmp_path / "log", watched(records)))
    assert status == 0 and "NaN or Inf in 1 of 40 steps, 1 of them skipped" in out


# Losses that rise and stay, without a NaN.


def verdict(losses, first=0):
    records = [Record(first + i, loss=loss) for i, loss in enumerate(losses)]
    for record in records:
        record.events = []
    spikes = detectors.LossSpike()
    for record in records:
        record.events = detect(spikes, [record])
    return verdict_of(Run({0: records}, "test"))


def noisy(*pieces):
    """Return noisy losses for pieces of (count, level)."""
    rng = seeded()
    return [level + rng.gauss(0, 0.02 * level) for count, level in pieces for _ in range(count)]


@pytest.mark.parametrize(
    "name, losses, kinds",
    [
        ("a jump that stays", noisy((100, 3.0), (50, 7.5)), ["loss_exploded", "loss_spike"]),
        ("a jump at the end", noisy((100, 3.0), (3, 7.5)), ["loss_exploded", "loss_spike"]),
        ("a run that was stopped at the jump", noisy((100, 3.0), (2, 7.5)), ["loss_spike"]),
        ("a spike", noisy((100, 3.0), (2, 7.5), (30, 3.0)), ["loss_spike"]),
        ("a jump that ends in NaN", [*noisy((100, 3.0), (50, 7.5)), NAN], ["loss_spike"]),
        ("a step by a third", noisy((100, 3.0), (50, 4.0)), ["loss_spike"]),
        (
            "a second jump stays",
            noisy((100, 3.0), (1, 8.0), (60, 3.0), (20, 9.0)),
            ["loss_exploded", "loss_spike"],
        ),
        (
            "it creeps back to where it began",
            [*noisy((50, 11.0), (100, 3.0)), *(3.0 * 1.01**i for i in range(200))],
            ["loss_exploded"],
        ),
        ("it creeps up by half", [*noisy((50, 11.0), (100, 3.0)), *(3.0 * 1.002**i for i in range(200))], []),
        ("nothing was learned", noisy((300, 3.0)), []),
        ("a loss that begins at nothing and grows", [1e-4 * (i + 1) for i in range(300)], []),
        ("it falls", [11 * math.exp(-i / 100) + 1 for i in range(300)], []),
        ("a critic's", [5 * math.sin(i / 40) for i in range(300)], []),
    ],
)
def test_verdict_of_losses_that_rise(name, losses, kinds):
    found = verdict(losses)
    assert [finding.kind for finding in found.findings] == kinds
    assert found.status == (2 if "loss_exploded" in kinds else 1 if kinds else 0)


def test_lint_tells_the_gpt2_run_from_the_same_run_diverging(tmp_path, lint):
    for every in (10, 100):
        rows = [(s, loss, norm) for s, loss, _, norm in gpt2()[::every]]
        status, out, err = lint(table(tmp_path / "healthy.csv", rows))
        assert status == 0 and out.endswith(f"steps, 0 to {rows[-1][0]} (CSV)\n")
        assert f"healthy.csv: records are about {every} steps apart" in err and err.count("\n") == 1
        bad = rows[: -len(rows) // 4]
        bad += [(s, loss + 4.0, 30 * norm) for s, loss, norm in rows[len(bad) :]]
        status, out, _ = lint(table(tmp_path / "bad.csv", bad))
        kinds = {line.split(": ")[1] for line in out.splitlines()[1:]}
        assert status == 2 and kinds >= {"loss_exploded", "loss_spike", "norm_growth", "norm_spike"}, out


# Clipping.


def clip_rows(count, norm, limit=1.0):
    return [(i, 2.0, norm, limit) for i in range(count)]


def test_lint_warns_if_nearly_all_steps_are_clipped(tmp_path, lint):
    columns = (*COLUMNS, "max_norm")
    for count in (60, 300):  # too few for the detector; enough
        status, out, _ = lint(table(tmp_path / "a.csv", clip_rows(count, 2.0), columns))
        assert status == 1 and out.count("warning: clip_share: in step ") == 1, out
        assert f"  clipped {count} of {count} steps (100%), last at max_norm 1" in out
    assert lint(table(tmp_path / "a.csv", clip_rows(40, 2.0), columns))[0] == 0
    assert lint(table(tmp_path / "a.csv", clip_rows(300, 0.5), columns))[0] == 0
    policy = [(i, 2.0, 2.0, 1.0 + i % 3 / 10) for i in range(300)]
    assert lint(table(tmp_path / "a.csv", policy, columns))[0] == 0


def test_lint_does_not_mention_clipping_without_a_limit(tmp_path, lint):
    status, out, _ = lint(table(tmp_path / "a.csv", [(i, 2.0, 2.0) for i in range(300)]))
    assert status == 0 and "clipped" not in out and out.count("\n") == 1


# Several logs, and those that cannot be read.


def test_lint_returns_the_highest_status_of_several_logs(tmp_path, lint):
    good = table(tmp_path / "good.csv", calm(50))
    bad = table(tmp_path / "bad.csv", [*calm(50), (50, NAN, NAN)])
    assert lint(good, good)[0] == 0
    status, out, _ = lint(bad, good)
    verdicts = [line.split(": ")[1] for line in out.splitlines() if line[0] != " "]
    assert (status, verdicts) == (2, ["exploded", "healthy"])
    status, out, err = lint(bad, tmp_path / "none", good)
    assert status == 3 and f"{good}: healthy" in out
    assert err == f"fastclip: {tmp_path / 'none'}: No such file or directory\n"


def test_lint_returns_3_for_a_log_without_steps(tmp_path, lint):
    status, out, err = lint(table(tmp_path / "a.csv", []))
    assert (status, out) == (
        3,
        f"{tmp_path / 'a.csv'}: no steps (CSV)\n",
    ) and "no step has been logged" in err
    assert lint(write_fastclip_log(tmp_path / "log", []))[0] == 3


def test_lint_json_has_an_object_for_each_log(tmp_path, lint):
    bad = table(tmp_path / "bad.csv", [*calm(50), (50, NAN, NAN)])
    status, out, err = lint("--json", bad, tmp_path / "none")
    first, second = json.loads(out)
    assert status == 3 and err.count("\n") == 1
    assert first.pop("findings") == [
        {
            "kind": "nonfinite",
            "severity": "error",
            "count": 1,
            "step": 50,
            "message": "the loss is nan; the gradient norm is nan",
        }
    ]
    assert first == {
        "log": str(bad), "source": "CSV", "warnings": [], "verdict": "exploded", "status": 2, "steps": 51,
        "first_step": 0, "last_step": 50, "nonfinite_steps": 1, "left_out": 0, "clipped": 0, "clip_known": 0,
        "max_norm": None,
    }  # fmt: skip
    message = f"{tmp_path / 'none'}: No such file or directory"
    assert second == {"log": str(tmp_path / "none"), "verdict": "unreadable", "status": 3, "error": message}


def test_verdict_of_counts_an_event_of_several_ranks_once():
    event = Event("loss_spike", 3, "warning", "m")
    records = {rank: [Record(3, rank=rank, loss=1.0, events=[event])] for rank in range(4)}
    (finding,) = verdict_of(Run(records, "test")).findings
    assert (finding.count, finding.step) == (1, 3)
    records[2].append(Record(5, events=[Event("loss_spike", 5, "error", "worse")]))
    found = verdict_of(Run(records, "test"))
    assert found.status == 2 and found.steps == 2
    assert str(found.findings[0]) == "error: loss_spike: reported 2 times, first in step 5: worse"
    info = {0: [Record(3, events=[Event("loss_spike", 3, "info", "small")])]}
    assert verdict_of(Run(info, "test")).status == 0


def test_verdict_to_dict_has_no_infinite_limit():
    records = [clipped(i, 0.5, max_norm=math.inf) for i in range(5)]
    json.dumps(verdict_of(Run({0: records}, "test")).to_dict(), allow_nan=False)


# Other commands on logs of others.


def test_diagnose_reads_a_log_of_another_program(tmp_path, lint):
    rows = [(s, loss, norm, 1e-3 * (s + 1)) for s, loss, norm in calm(100)]
    rows += [
        (100 + i, loss, norm, 0.1) for i, (loss, norm) in enumerate([(2.0, 1.0), (2.1, 1.1), (NAN, NAN)])
    ]
    path = table(tmp_path / "a.csv", rows, (*COLUMNS, "lr"))
    status, out, err = lint(path, command="diagnose")
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "Event      step 102: error: nonfinite: the loss is nan; the gradient norm is nan"
    assert lines[1].startswith("Warned     1 step before, at step 101: warning: norm_growth")
    assert any("the learning rate was rising" in line for line in lines)
    assert lines[-1] == "The log (CSV) has no information on batches, parameters or modules."
    assert lint(table(tmp_path / "b.csv", calm(50)), command="diagnose") == (
        0,
        "No event: nothing to explain.\n",
        "",
    )


def test_recommend_reads_a_log_of_another_program(tmp_path, lint):
    data = Path(__file__).parents[1] / "data" / "gpt2_124m_train.csv.gz"
    shutil.copy(data, tmp_path)
    status, out, err = lint(tmp_path, command="recommend")
    assert (status, err) == (0, "") and out.startswith("max_norm 0.26\n")
    assert "(current)" not in out, "the log has no limit"
    losses = table(tmp_path / "losses.csv", [(s, loss) for s, loss, _ in calm(100)], COLUMNS[:2])
    status, out, _ = lint(losses, command="recommend")
    assert status == 1 and out.startswith("0 steps with a finite norm")


def test_verdict_of_uses_the_events_of_the_monitor(tmp_path):
    """The events of fastclip's own log are those that the monitor reported, not inferred ones."""
    records = [Record(s, loss=2.0) for s in range(30)]
    records[20].events = [Event("bad_batch", 20, "error", "batch tensor 0 holds 1 NaN")]
    run = read_run(write_fastclip_log(tmp_path / "log", records))
    assert not run.inferred and verdict_of(run).findings[0].kind == "bad_batch"
