# SPDX-License-Identifier: BSD-3-Clause
"""`fastclip demo`: it passes, its output is true, and it fails if clipping or naming is wrong."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch

import fastclip
from fastclip import cli

pytest.importorskip("plotext")
pytest.importorskip("tqdm")

from fastclip.demo import comparison, monitored_training, poisoning, program
from fastclip.demo.character_model import QUICK, Corpus

STEPS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("demo") / "run"


@pytest.fixture(scope="module")
def output(directory) -> str:
    """Return what `fastclip demo DIRECTORY --quick` prints into a pipe."""
    environment = {**os.environ, "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "fastclip", "demo", str(directory), "--quick"]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step {STEPS} of {STEPS}: loss" in done.stderr and "Warning" not in done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def row(output: str, label: str) -> list[float]:
    """Return all numbers of the one line of the table that starts with `label`."""
    lines = [line for line in output.splitlines() if line.strip().startswith(label)]
    assert len(lines) == 1, (label, lines)
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", lines[0].split(label)[1])]


def test_demo_reports_equal_losses_of_both_trainings(output):
    _, torch_loss, fastclip_loss = row(output, "final loss (mean of the last")
    assert torch_loss == pytest.approx(fastclip_loss, abs=1e-4)
    assert 2.0 < torch_loss < 4.0  # guessing costs ln(104) = 4.6
    torch_clipped, torch_steps, clipped, steps = row(output, "steps whose gradients were clipped")
    assert torch_clipped == clipped and torch_steps == steps == STEPS
    assert 0 < clipped < STEPS
    found = re.findall(r"Losses of the first 60 steps differ by (\S+) at most \(limit (\S+)\)", output)
    assert len(found) == 2
    assert all(0 <= float(difference) <= float(limit) <= 0.01 for difference, limit in found)


def test_demo_prints_ratios_that_fit_its_times(output):
    torch_step, fastclip_step = row(output, "time of a whole step (median)")
    torch_median, fastclip_median = row(output, "time in clipping (median)")
    torch_sum, fastclip_sum = row(output, "time in clipping, all steps together")
    assert 0 < torch_median < torch_step and 0 < fastclip_median < fastclip_step
    ratios = re.search(r"torch / fastclip: (\S+) \(median\), (\S+) \(all steps", output)
    assert float(ratios[1]) == pytest.approx(torch_median / fastclip_median, rel=0.03)
    assert float(ratios[2]) == pytest.approx(torch_sum / fastclip_sum, rel=0.03)
    assert all(0 < share < 100 for share in row(output, "its share of a whole step"))


def test_demo_names_the_gradients_that_hold_nan(output):
    poisoned = output.split("2. One poisoned batch")[1]
    assert math.isfinite(float(re.search(r"looks healthy: (\d\S*)\.", poisoned)[1]))
    found = re.findall(r"^ +(\S+) +NaN in ([\d,]+) of ([\d,]+) elements$", poisoned, re.MULTILINE)
    counts = {name: (int(nans.replace(",", "")), int(of.replace(",", ""))) for name, nans, of in found}
    assert list(counts) == ["head.weight", "prefix_features.weight"]
    nans, elements = counts["head.weight"]
    assert nans == elements > 0
    nans, elements = counts["prefix_features.weight"]
    assert nans * 4 == elements > 0  # one feature of four
    assert "gradients that changed: none" in poisoned
    spoiled = re.findall(r"parameters that hold NaN: (\d+) of (\d+)", poisoned)
    after_fastclip, after_torch = [(int(count), int(of)) for count, of in spoiled]
    assert after_fastclip[0] == 0 and after_torch[0] == after_torch[1] == after_fastclip[1] > 2
    losses = re.findall(r"loss on the next batch: (\S+)", poisoned)
    assert math.isfinite(float(losses[0])) and losses[1] == "nan"


def test_demo_prints_plain_text_into_a_pipe(output, directory):
    assert "\x1b" not in output and "\r" not in output
    lines = output.replace(str(directory), "runs/demo").splitlines()
    assert max(len(line) for line in lines) <= 100


def never(parameters, max_norm):
    return torch.nn.utils.get_total_norm([p.grad for p in parameters])


def too_weakly(parameters, max_norm):
    return torch.nn.utils.clip_grad_norm_(parameters, 1.01 * max_norm)


def to_nan(parameters, max_norm):
    return torch.nn.utils.clip_grad_norm_(parameters, math.nan)


@pytest.mark.parametrize("clip", [never, too_weakly, to_nan])
def test_training_failures_reports_wrong_clipping(clip):
    corpus = Corpus(QUICK, seed=0)
    runs = [
        comparison.TimedTraining(function, corpus.size, corpus.padding, seed=0)
        for function in (torch.nn.utils.clip_grad_norm_, clip)
    ]
    comparison.train(*runs, corpus)
    failures = comparison.training_failures(*runs)
    assert failures
    assert all(re.fullmatch(r"the losses differ by (nan|\d\S*) within \d+ steps", line) for line in failures)


def test_training_failures_reports_a_training_without_clipping(monkeypatch):
    monkeypatch.setattr(comparison, "MAX_NORM", 1e9)
    corpus = Corpus(QUICK, seed=0)
    run = comparison.TimedTraining(torch.nn.utils.clip_grad_norm_, corpus.size, corpus.padding, seed=0)
    run.step(corpus.batch())
    assert comparison.training_failures(run, run) == ["no gradients were clipped, so nothing was compared"]


def test_demo_fails_on_wrong_clipping(monkeypatch, capsys):
    monkeypatch.setattr(program, "clip_grad_norm_", never)
    assert cli.main(["demo", "--quick"]) == 1
    assert re.search(r"^FAILED: the losses differ by \d", capsys.readouterr().out, re.MULTILINE)


real_clip_ = fastclip.clip_


def nameless(named, max_norm, nonfinite):
    return real_clip_([parameter for _, parameter in named], max_norm, nonfinite=nonfinite)


def misnamed(named, max_norm, nonfinite):
    names, parameters = zip(*named, strict=True)
    return real_clip_(list(zip(reversed(names), parameters, strict=True)), max_norm, nonfinite=nonfinite)


def spoiling(named, max_norm, nonfinite):
    return real_clip_(named, max_norm, nonfinite="propagate")


@pytest.mark.parametrize(
    ("clip_", "failure"),
    [
        (real_clip_, None),
        (nameless, "fastclip found NaN in"),
        (misnamed, "fastclip found NaN in"),
        (spoiling, "should be untouched, but changed"),
    ],
)
def test_poison_reports_gradients_that_are_not_named_or_not_kept(monkeypatch, clip_, failure):
    monkeypatch.setattr(poisoning, "clip_", clip_)
    corpus = Corpus(QUICK, seed=0)
    run = comparison.TimedTraining(fastclip.clip_grad_norm_, corpus.size, corpus.padding, seed=0)
    failures = poisoning.poison(run, corpus)
    assert bool(failures) == bool(failure)
    assert all(failure in line for line in failures)


def test_demo_prints_the_monitor_summary_and_the_cause(output):
    part = output.split("3. The monitor")[1]
    assert "skipped     1 step" in part and re.search(r"clipping +\d+ of 59 steps at max_norm 1\.5", part)
    assert re.search(r"step 40: error: bad_batch: batch tensor features holds 1 NaN", part)
    diagnosis = part.split("monitor.diagnose()")[1]
    first = next(line for line in diagnosis.splitlines() if line.strip().startswith("data"))
    assert "step 40, rank 0: batch tensor features holds 1 NaN" in first
    assert "samples 320, 321" in diagnosis


def test_train_under_monitor_reports_a_wrong_diagnosis(monkeypatch, capsys):
    monkeypatch.setattr(fastclip.monitor.Diagnosis, "cause", "unknown")
    assert monitored_training.train_under_monitor(Corpus(QUICK, 0), 0, 12) == ["the diagnosis is unknown"]
    monkeypatch.undo()
    assert monitored_training.train_under_monitor(Corpus(QUICK, 0), 0, 12) == []


def test_show_next_commands_reports_a_missing_incident(tmp_path):
    assert monitored_training.show_next_commands(str(tmp_path), QUICK)[0].endswith("but got none")


def commands(output: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith("  fastclip ")]


def test_demo_prints_commands_that_read_its_log_and_incident(output, directory, capsys, monkeypatch):
    printed = {command: rest for command, *rest in commands(output)}
    assert list(printed) == ["lint", "report", "diagnose", "incidents", "replay"]
    assert all(str(directory) in arguments[0] for arguments in printed.values())
    assert cli.main(["diagnose", *printed["diagnose"]]) == 1
    assert "step 40: error: nonfinite" in capsys.readouterr().out
    assert cli.main(["incidents", *printed["incidents"]]) == 0
    monkeypatch.chdir(directory)
    assert cli.main(["replay", *printed["replay"]]) == 0
    replayed = capsys.readouterr().out
    assert "reproduced, bit for bit" in replayed and "1 of 8 samples causes it: id 327" in replayed


def test_demo_refuses_a_directory_that_is_not_empty(tmp_path, capsys):
    (tmp_path / "rank00000.jsonl").write_text("")
    for target in (tmp_path, tmp_path / "rank00000.jsonl"):
        assert cli.main(["demo", str(target), "--quick"]) == 2
        captured = capsys.readouterr()
        assert captured.err == f"fastclip: expected a new or empty directory, but got {target}\n"
        assert not captured.out


def test_demo_refuses_zero_threads(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--threads", "0"])
    assert ended.value.code == 2 and "expected at least 1, but got 0" in capsys.readouterr().err


def test_demo_names_its_extra_if_a_package_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotext", None)
    for name in ("program", "comparison", "poisoning", "monitored_training"):
        monkeypatch.delitem(sys.modules, f"fastclip.demo.{name}")
    assert cli.main(["demo", "--quick"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fastclip: the demo needs plotext 6 and tqdm") and not captured.out
    assert 'pip install "torch-fastclip[demo]"' in captured.err
