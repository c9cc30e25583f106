# SPDX-License-Identifier: BSD-3-Clause
"""The commands that read logs, on logs of the monitor and on other files."""

import json
import subprocess
import sys

import pytest

import fastclip
from fastclip.cli import main
from fastclip.monitor import MEANINGS, Event, Record
from fastclip.monitor.sinks import JsonlSink
from helpers.records import NAN, bad_gradients, healthy, numbers, seeded, watched


def write(directory, records, rank=0):
    sink = JsonlSink(directory, rank, header={"meanings": MEANINGS})
    for record in records:
        sink.write(record.to_dict())
    sink.close()
    return directory / f"rank{rank:05}.jsonl"


def failing(rank=0, bad=0):
    """Return 100 healthy records, then one with a batch with NaN on the rank `bad`."""
    rng = seeded(rank)
    ranks = {"loss": [NAN, NAN], "batch_nonfinite": [7.0 * (r == bad) for r in range(2)]}
    batch = {"0": numbers(rng, nan=7 * (rank == bad))}
    last = healthy(rng, 100, rank, batch=batch, ranks=ranks, loss=NAN, **bad_gradients())
    return watched([*(healthy(rng, s, rank, ranks={}) for s in range(100)), last])


@pytest.fixture
def log(tmp_path):
    for rank in range(2):
        write(tmp_path / "log", failing(rank, bad=1), rank)
    return tmp_path / "log"


@pytest.fixture
def fastclip_(capsys):
    """Run a command; returns its exit status, output and errors."""

    def run(*arguments):
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_record_from_dict_restores_a_logged_record(tmp_path):
    for record in [*failing(), Record(101)]:
        line = json.loads(json.dumps(record.to_dict()))
        again = Record.from_dict(line)
        assert repr(again) == repr(record)


def test_diagnose_explains_the_worst_event_of_all_ranks(log, fastclip_):
    status, out, err = fastclip_("diagnose", log)
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith(
        "Event      step 100: error: nonfinite: the loss is nan; the gradients hold 3 NaN"
    )
    assert lines[1].startswith(
        "data       step 100, rank 1: batch tensor 0 holds 7 NaN and 0 Inf; samples r1s3200"
    )
    assert lines[-1].split()[0] == "model" and lines[-1].endswith("parameters body.weight")


def test_diagnose_reads_the_log_of_one_rank(log, fastclip_):
    status, out, _ = fastclip_("diagnose", log / "rank00000.jsonl")
    assert status == 1 and "rank 1: the batch of rank 1 holds 7 NaN or Inf" in out and "samples" not in out


def test_diagnose_lists_events(log, fastclip_):
    status, out, _ = fastclip_("diagnose", log, "--events")
    listed, _, explained = out.partition("\n\n")
    kinds = [line.split(": ")[:4:3] for line in listed.splitlines()]
    assert status == 1 and explained.startswith("Event")
    assert kinds == [
        ["rank 1", "rank"],
        ["rank 0", "nonfinite"],
        ["rank 1", "bad_batch"],
        ["rank 1", "rank"],
        ["rank 1", "nonfinite"],
    ]


def test_diagnose_explains_the_event_of_a_step(tmp_path, fastclip_):
    records = [Record(s) for s in range(10)]
    records[3].events = [Event("loss_spike", 3, "info", "small"), Event("norm_spike", 3, "warning", "large")]
    records[7].events = [Event("nonfinite", 7, "error", "lost")]
    write(tmp_path, records)
    assert fastclip_("diagnose", tmp_path)[1].startswith("Event      step 7: error")
    status, out, _ = fastclip_("diagnose", tmp_path, "--step", 3)
    assert status == 1 and out.startswith("Event      step 3: warning: norm_spike: large")
    assert "Nothing in the batches" in out
    status, out, err = fastclip_("diagnose", tmp_path, "--step", 5)
    assert status == 2 and out == ""
    assert "has no event in step 5" in err and "steps with events: 3, 7" in err


def test_diagnose_returns_0_without_an_event(tmp_path, fastclip_):
    write(tmp_path, [Record(s, loss=1.0) for s in range(10)])
    assert fastclip_("diagnose", tmp_path) == (0, "No event: nothing to explain.\n", "")
    assert fastclip_("diagnose", tmp_path, "--step", 3)[0] == 2


def test_recommend_proposes_a_max_norm(tmp_path, fastclip_):
    rng = seeded()
    write(tmp_path, [healthy(rng, s) for s in range(500)])
    status, out, err = fastclip_("recommend", tmp_path)
    assert (status, err) == (0, "")
    assert out.startswith("max_norm 0.5") and "would have clipped" in out and "(proposed)" in out


def test_recommend_returns_1_for_too_few_steps(tmp_path, fastclip_):
    write(tmp_path, [healthy(seeded(), s) for s in range(20)])
    status, out, _ = fastclip_("recommend", tmp_path)
    assert status == 1 and "too few" in out


def test_doctor_is_the_default_command(fastclip_):
    for arguments in ([], ["doctor"]):
        status, out, err = fastclip_(*arguments)
        assert (status, err) == (0, "")
        assert out.startswith(f"fastclip  {fastclip.__version__}") and "\ncpu\n" in out


# Files that are not logs.

HEADER = b'{"fastclip_log":1,"rank":0}\n'
BROKEN = {
    "empty": (b"", "rank00000.jsonl: the file is empty"),
    "binary": (b"\x93NUMPY\x01\x00\xff\n\n", "rank00000.jsonl:1: not a log of fastclip"),
    "text": (b"s:0 trl:11.0\ns:1 trl:10.9\n", "rank00000.jsonl:1: not a log of fastclip"),
    "other JSON": (b'{"loss": 3}\n', "rank00000.jsonl:1: not a log of fastclip"),
    "header in part": (HEADER[:9], "rank00000.jsonl: not a log of fastclip, or its run ended"),
    "damaged": (HEADER + b'{"step":0}\n{"step":1,"lo\n{"step":2}\n', "rank00000.jsonl:3: not JSON"),
    "later version": (b'{"fastclip_log":99,"rank":0}\n', "rank00000.jsonl:1: the log has version 99"),
    "no step": (HEADER + b'{"step":0}\n{"loss":3}\n', "rank00000.jsonl:3: expected a record with a step"),
    "step is true": (
        HEADER + b'{"step":true}\n',
        "rank00000.jsonl:2: expected a record with a step, but got step T",
    ),
    "text for a number": (
        HEADER + b'{"step":0}\n{"step":1,"loss":"low"}\n',
        "rank00000.jsonl:3: expected loss to be float | None, but got 'low'",
    ),
    "list for a dict": (HEADER + b'{"step":0,"batch":[1]}\n', "rank00000.jsonl:2: expected batch to be dict"),
    "deep": (HEADER + b'{"step":0,"activations":{"m":{"rms":"x"}}}\n', ":2: expected activations to be dict"),
    "events": (
        HEADER + b'{"step":0,"events":3}\n',
        "rank00000.jsonl:2: expected events to be a list, but got 3",
    ),
    "event": (
        HEADER + b'{"step":0,"events":[{"kind":"x"}]}\n',
        ":2: expected an event, but got {'kind': 'x'}",
    ),
    "severity": (
        HEADER + b'{"step":0,"events":[{"kind":"x","step":0,"severity":"bad","message":""}]}\n',
        ":2: expected a severity of info, warning, error, but got 'bad'",
    ),
}


@pytest.mark.parametrize("command", ["diagnose", "recommend", "lint"])
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("whole", [True, False], ids=["directory", "file"])
def test_commands_refuse_a_damaged_log_in_one_line(tmp_path, fastclip_, name, command, whole):
    content, words = BROKEN[name]
    (tmp_path / "rank00000.jsonl").write_bytes(content)
    status, out, err = fastclip_(command, tmp_path if whole else tmp_path / "rank00000.jsonl")
    assert (status, out) == (3 if command == "lint" else 2, "")
    assert err.startswith(f"fastclip: {tmp_path}") and words in err and err.count("\n") == 1, err


def test_diagnose_returns_2_for_a_missing_log(tmp_path, fastclip_):
    for path, words in (("none", "No such file or directory"), ("", "rank00000.jsonl, but found none")):
        status, out, err = fastclip_("diagnose", tmp_path / path)
        assert (status, out) == (2, "") and words in err and err.count("\n") == 1


def test_diagnose_reads_a_truncated_log(log, fastclip_):
    file = log / "rank00001.jsonl"
    file.write_bytes(file.read_bytes()[:-40])
    status, out, err = fastclip_("diagnose", log)
    assert status == 1 and "rank 1: the batch of rank 1" in out
    assert err == f"fastclip: {file}:102: the last line is incomplete and was ignored\n"


def test_commands_accept_a_log_without_steps(tmp_path, fastclip_):
    write(tmp_path, [])
    status, out, err = fastclip_("diagnose", tmp_path)
    assert (status, out) == (0, "No event: nothing to explain.\n") and "no step has been logged yet" in err
    assert fastclip_("recommend", tmp_path)[0] == 1


def test_diagnose_ignores_fields_of_later_versions(tmp_path, fastclip_):
    line = (
        b'{"step":0,"later":1,"events":[{"kind":"x","step":0,"severity":"error","message":"m","later":2}]}\n'
    )
    (tmp_path / "rank00000.jsonl").write_bytes(HEADER + line)
    assert fastclip_("diagnose", tmp_path)[0] == 1


def test_recommend_names_file_and_line_in_a_log_of_several_files(tmp_path, fastclip_):
    (tmp_path / "rank00000.jsonl").write_bytes(HEADER + b'{"step":0}\n{"step":1,"lr":1}\n')
    (tmp_path / "rank00000.1.jsonl").write_bytes(HEADER + b'{"step":1,"lr":2}\n')
    assert (
        "rank00000.1.jsonl:2: expected lr to be list[float], but got 2" in fastclip_("recommend", tmp_path)[2]
    )


@pytest.mark.parametrize(
    "arguments", [["diagnose"], ["lint"], ["nonsense"], ["diagnose", "x", "--step", "three"]]
)
def test_main_exits_with_2_on_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage: fastclip" in capsys.readouterr().err


def test_python_m_fastclip_runs_a_command(log):
    command = [sys.executable, "-m", "fastclip", "diagnose", str(log)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1 and "samples r1s3200" in found.stdout and found.stderr == ""
