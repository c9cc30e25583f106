# SPDX-License-Identifier: BSD-3-Clause
"""read_run: every format, the names of columns, directories, and files that are not logs."""

import builtins
import gzip
import json
import math
import os

import pytest

from fastclip.logs import read_run, text_files
from fastclip.monitor import Event, Record
from fastclip.monitor.sinks import JsonlSink, LogError
from helpers.log_samples import LOG, TABLES, event_file, trainer_state_json
from helpers.records import INF, NAN, gpt2


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def numbers(run, *fields):
    """Return (step, fields) of each record of rank 0."""
    return [(r.step, *(getattr(r, field) for field in fields)) for r in run.records[0]]


def same(found, wanted):
    """Return whether both are equal and have NaN in the same places."""
    return repr(found) == repr(wanted)


# Tables.


def test_read_run_reads_the_gpt2_log():
    run = read_run(LOG)
    assert (run.source, run.inferred, run.stride, run.warnings) == ("CSV", True, 1, [])
    assert [*run.records] == [0]
    steps = gpt2()
    assert numbers(run, "loss", "total_norm") == [(s, loss, norm) for s, loss, _, norm in steps]
    assert [r.lr for r in run.records[0]] == [[lr] for _, _, lr, _ in steps]
    assert run.headers[0]["columns"] == {"step": "step", "loss": "loss", "lr": "lr", "total_norm": "norm"}
    assert not any(r.events for r in run.records[0]), "a healthy run"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_read_run_reads_tables(tmp_path, name, packed):
    text, source = TABLES[name]
    path = put(tmp_path / "log", gzip.compress(text.encode()) if packed else text)
    run = read_run(path)
    assert run.source == source and run.inferred
    assert numbers(run, "loss", "total_norm")[:2] == [(1, 2.5, 0.5), (2, 2.25, 0.75)]
    assert len(run.records[0]) == 2 + (name == "resumed")
    assert run.warnings == [f"{path}: 2 steps appear more than once, as in a resumed run; the last of each "
                            "was kept"] * (name == "resumed")  # fmt: skip


def test_read_run_reads_every_field(tmp_path):
    row = {"global_step": 7, "train/loss": 2.5, "grad_norm": 4.0, "lr/group0": 0.25, "lr/group1": 0.5}
    row |= {"amp/scale": 1, "loss_scale": 1024, "max_norm": 1.0, "nan_count": 3, "inf_count": 0}
    row |= {"param_norm": 30.0, "tokens_per_sec": 1e5, "samples_per_second": 50, "_timestamp": 1.7e9}
    path = put(tmp_path / "a.jsonl", json.dumps(row) + "\n")
    (record,) = read_run(path).records[0]
    wanted = Record(7, 1.7e9, loss=2.5, total_norm=4.0, lr=[0.25, 0.5], loss_scale=1024.0, max_norm=1.0)
    wanted.nan_count, wanted.param_norm, wanted.clip_coef = 3, 30.0, 1.0 / (4.0 + 1e-6)
    wanted.tokens_per_second, wanted.samples_per_second = 1e5, 50.0
    wanted.events = record.events
    assert same(record, wanted)
    assert record.clipped and [e.kind for e in record.events] == ["nonfinite"]
    assert record.events[0].message == "the gradients hold 3 NaN and 0 Inf"


@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan"])
def test_read_run_takes_a_limit_of_0_or_inf_for_none(tmp_path, limit):
    (record,) = read_run(put(tmp_path / "a.csv", f"step,grad_norm,grad_clip\n1,4.0,{limit}\n")).records[0]
    assert record.max_norm is None and record.clipped is None


def test_read_run_parses_spellings_of_numbers(tmp_path):
    cells = ["nan", "NaN", "inf", "-Infinity", "1e-3", " 2 ", "None", "null", "N/A", ""]
    text = "step,loss,lr\n" + "".join(f"{i},{cell},1\n" for i, cell in enumerate(cells))
    found = [loss for _, loss in numbers(read_run(put(tmp_path / "a.csv", text)), "loss")]
    assert same(found, [NAN, NAN, INF, -INF, 1e-3, 2.0, None, None, None, None])
    cells = ["NaN", "-Infinity", "null", '"nan"']
    text = "".join(f'{{"step":{i},"loss":{cell}}}\n' for i, cell in enumerate(cells))
    assert same(numbers(read_run(put(tmp_path / "a.jsonl", text)), "loss"), [(0, NAN), (1, -INF), (3, NAN)])


def test_read_run_numbers_rows_without_a_step_column(tmp_path):
    run = read_run(put(tmp_path / "a.csv", "epoch,loss\n0,3\n0,\n0,2\n1,1\n"))
    assert numbers(run, "loss") == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert run.warnings == [f"{tmp_path / 'a.csv'}: no column holds the step: rows were numbered from 0"]
    text = "epoch,iter,loss\n" + "".join(f"{e},{i},{10 * e + i}\n" for e in range(3) for i in range(4))
    run = read_run(put(tmp_path / "b.csv", text))
    assert [s for s, _ in numbers(run, "loss")] == [*range(12)]
    assert len(run.warnings) == 1
    assert "the steps in column 'iter' restart: rows were numbered from 0 instead" in run.warnings[0]
    run = read_run(put(tmp_path / "c.csv", "step,loss\n,3\n4,2\n,\n"))
    assert numbers(run, "loss") == [(4, 2.0)]
    assert run.warnings == [f"{tmp_path / 'c.csv'}: ignored rows without a step in column 'step': 1"]


@pytest.mark.parametrize(
    "columns, chosen",
    [
        ("loss_epoch,train_loss_step,step", {"loss": "train_loss_step"}),
        ("val_loss,eval/loss,Train Loss,loss__MAX", {"loss": "Train Loss"}),
        ("loss,norm,weight_norm,grad_norm", {"total_norm": "grad_norm", "param_norm": "weight_norm"}),
        ("loss,lr-Adam-momentum,lr-Adam/pg2,lr-Adam/pg10", {"lr": ["lr-Adam/pg2", "lr-Adam/pg10"]}),
        ("loss,learning_rate,lr/0,lr_scheduler", {"lr": "learning_rate"}),
        ("Train/Samples/train_loss,Train/Samples/lr", {"lr": "Train/Samples/lr"}),
        ("iteration,lm loss,grad-norm,loss-scale", {"loss": "lm loss", "loss_scale": "loss-scale"}),
        ("step,_step,trainer/global_step,loss", {"step": "step"}),
        ("total_steps,current_steps,loss,lr", {"step": "current_steps"}),
    ],
)
def test_read_run_chooses_columns(tmp_path, columns, chosen):
    path = put(tmp_path / "a.csv", f"{columns}\n" + ",".join("1" for _ in columns.split(",")) + "\n")
    found = read_run(path).headers[0]["columns"]
    assert {field: found.get(field) for field in chosen} == chosen


# The Trainer of Transformers.


def test_read_run_reads_a_trainer_state(tmp_path):
    entries = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 5e-05, "loss": 2.5, "step": 10},
        {"epoch": 0.1, "eval_loss": 9.0, "eval_runtime": 1.0, "step": 10},
        {"grad_norm": "2.5", "learning_rate": 4e-05, "loss": 2.0, "step": 20},
        {"eval_loss": 8.0, "step": 25},
        {"grad_norm": 0.5, "loss": 1.5, "step": 30},
        {"grad_norm": NAN, "learning_rate": 1e-05, "loss": 0.0, "step": 40},
        {"epoch": 1.0, "train_loss": 5.0, "train_runtime": 3.0, "total_flos": 1, "step": 40},
    ]
    path = put(tmp_path / "trainer_state.json", trainer_state_json(*entries))
    for run in (read_run(path), read_run(tmp_path)):
        assert (run.source, run.stride, run.inferred) == ("Transformers trainer_state.json", 10, True)
        found = numbers(run, "loss", "total_norm", "lr")
        assert same(found, [(10, 2.5, 1.5, [5e-05]), (20, 2.0, 2.5, [4e-05]), (30, 1.5, 0.5, []),
                            (40, 0.0, NAN, [1e-05])])  # fmt: skip
        assert run.headers == {0: {"global_step": 40, "logging_steps": 10}}
        assert run.warnings == [
            f"{path if run.warnings[0].startswith(str(path)) else tmp_path}: records are about 10 steps "
            "apart: events between them cannot be seen"
        ]
        (event,) = run.records[0][-1].events
        assert (event.step, event.message) == (40, "the gradient norm is nan")
    line = put(tmp_path / "one_line.json", json.dumps(json.loads(path.read_text())))
    assert same(numbers(read_run(line), "loss"), numbers(run, "loss"))


def test_read_run_reads_the_newest_checkpoint(tmp_path):
    for number in (9, 20, 100):
        put(
            tmp_path / f"checkpoint-{number}" / "trainer_state.json",
            trainer_state_json({"loss": 1.0, "step": number}),
        )
    (tmp_path / "checkpoint-200").mkdir()
    run = read_run(tmp_path)
    assert numbers(run) == [(100,)] and "read the newest checkpoint, checkpoint-100" in run.warnings[0]
    put(tmp_path / "trainer_state.json", trainer_state_json({"loss": 1.0, "step": 101}))
    assert numbers(read_run(tmp_path)) == [(101,)]


def test_read_run_infers_a_nan_loss_that_the_trainer_logs_as_0(tmp_path):
    losses = [2.0, 0.0, 1.5, 0.0, 0.0, 0.0]
    entries = [{"loss": loss, "step": 10 * i} for i, loss in enumerate(losses)]
    run = read_run(put(tmp_path / "a.json", trainer_state_json(*entries)))
    (event,) = [e for r in run.records[0] for e in r.events]
    assert (event.kind, event.severity, event.step) == ("nonfinite", "warning", 30)
    for entry in entries:
        entry["grad_norm"] = 0.01
    assert not any(
        r.events for r in read_run(put(tmp_path / "a.json", trainer_state_json(*entries))).records[0]
    )


# TensorBoard.


def test_read_run_reads_event_files_of_other_programs(tmp_path):
    series = {
        "train/loss": [(1, 2.5), (2, 2.25)],
        "train/grad_norm": [(1, 0.5), (2, NAN)],
        "eval/loss": [(2, 9.0)],
    }
    series |= {"train/learning_rate": [(2, 0.25)], "train/epoch": [(1, 0.0), (1, 1.0)]}
    file = event_file(tmp_path / "run", series)
    for path in (file, tmp_path / "run"):
        run = read_run(path)
        assert (run.source, run.inferred, run.warnings) == ("TensorBoard event files", True, [])
        assert same(numbers(run, "loss", "total_norm", "lr"), [(1, 2.5, 0.5, []), (2, 2.25, NAN, [0.25])])
        assert run.records[0][0].time > 1.7e9
    run = read_run(tmp_path)
    assert len(run.records[0]) == 2 and run.warnings == [f"{tmp_path}: read the run in run"]


def test_read_run_reads_scalars_in_tensor_form(tmp_path):
    from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.scalar.summary_v2 import scalar_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step in range(3):
        summary = Summary()
        summary.CopyFrom(scalar_pb("Loss", step + 0.5))
        writer.add_event(TensorBoardEvent(step=step, wall_time=1.0, summary=summary))
    writer.close()
    run = read_run(tmp_path)
    assert numbers(run, "loss", "time") == [(0, 0.5, 0.0), (1, 1.5, 0.0), (2, 2.5, 0.0)]


def test_read_run_keeps_the_last_step_of_resumed_event_files(tmp_path):
    event_file(tmp_path, {"loss": [(s, 1.0) for s in range(6)]}, name="-1")
    event_file(tmp_path, {"loss": [(s, 2.0) for s in range(4, 8)]}, name="-2")
    run = read_run(tmp_path)
    assert numbers(run, "loss") == [(s, 1.0 + (s >= 4)) for s in range(8)]
    assert "2 steps appear more than once" in run.warnings[0]


def test_read_run_honours_purge_step_in_event_files(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    event_file(tmp_path, {"loss": [(s, 1.0) for s in range(6)]}, name="-1")
    with SummaryWriter(str(tmp_path), purge_step=3, filename_suffix="-2") as writer:
        writer.add_scalar("loss", 2.0, 3)
    assert numbers(read_run(tmp_path), "loss") == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_read_run_reads_a_truncated_event_file_up_to_the_damage(tmp_path):
    file = event_file(tmp_path, {"loss": [(s, 1.0) for s in range(6)]})
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    run = read_run(tmp_path)
    assert [s for (s,) in numbers(run)] == [0, 1, 2, 3, 4]
    assert run.warnings[0].startswith(f"{file}: incomplete or damaged after ")
    file.write_bytes(content[:-5] + b"\xff\xff\xff\xff\xff")
    assert len(read_run(file).records[0]) == 5
    file.write_bytes(content[:20] + b"\xff" + content[21:])
    with pytest.raises(LogError, match="not an event file of TensorBoard, or damaged from its beginning"):
        read_run(file)


def test_read_run_names_several_runs_in_its_error(tmp_path):
    for name in ("a", "b"):
        event_file(tmp_path / name, {"loss": [(1, 1.0)]})
    event_file(tmp_path / "a" / "hparams", {"hparam/accuracy": [(1, 1.0)]})
    with pytest.raises(LogError) as caught:
        read_run(tmp_path)
    assert str(caught.value) == f"{tmp_path}: expected one run, but got several: a, b"
    assert numbers(read_run(tmp_path / "a"), "loss") == [(1, 1.0)]
    file = event_file(tmp_path / "c", {"accuracy": [(1, 1.0)]})
    with pytest.raises(LogError) as caught:
        read_run(tmp_path / "c")
    assert str(caught.value) == (
        f"{file}: expected a column such as loss, train_loss, training_loss, grad_norm, gnorm, "
        "gradient_norm, loss_scale, amp_loss_scale, train_loss_scale, but got 'accuracy'"
    )


def test_read_run_raises_without_tensorboard(tmp_path, monkeypatch, capsys):
    from fastclip.cli import main

    event_file(tmp_path, {"loss": [(1, 1.0)]})
    real = builtins.__import__

    def without(name, *arguments):
        if name.startswith("tensorboard"):
            raise ImportError(f"no {name}")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'needs tensorboard, .*: pip install "torch-fastclip\[report\]"'):
        read_run(tmp_path)
    for command, status in (("diagnose", 2), ("lint", 3)):
        assert main([command, str(tmp_path)]) == status
        assert 'pip install "torch-fastclip[report]"' in capsys.readouterr().err


# fastclip's own log, and directories.


def write_fastclip_log(directory, steps, rank=0):
    sink = JsonlSink(directory, rank, header={"note": "x"})
    for step in steps:
        sink.write(Record(step, loss=1.0, events=[Event("loss_spike", step, "warning", "m")]).to_dict())
    sink.close()


def test_read_run_reads_fastclips_own_log(tmp_path):
    for rank in (0, 1):
        write_fastclip_log(tmp_path / "log", range(rank + 2), rank)
    run = read_run(tmp_path / "log")
    assert (run.source, run.inferred, run.warnings) == ("fastclip log", False, [])
    assert {rank: len(its) for rank, its in run.records.items()} == {0: 2, 1: 3}
    assert run.headers[1]["rank"] == 1 and run.headers[0]["note"] == "x"
    assert [e.kind for e in run.records[0][1].events] == ["loss_spike"]
    renamed = put(tmp_path / "other.log", (tmp_path / "log" / "rank00001.jsonl").read_bytes())
    assert read_run(renamed).source == "fastclip log" and [*read_run(renamed).records] == [1]
    run = read_run(tmp_path)
    assert len(run.records) == 2 and run.warnings == [f"{tmp_path}: read the run in log"]


def test_read_run_searches_directories(tmp_path):
    put(tmp_path / "run" / "version_0" / "metrics.csv", "step,loss\n1,1\n")
    put(tmp_path / "run" / "version_0" / "hparams.yaml", "a: 1\n")
    run = read_run(tmp_path / "run")
    assert numbers(run, "loss") == [(1, 1.0)] and "read the run in version_0" in run.warnings[0]
    put(tmp_path / "run" / "version_1" / "metrics.csv", "step,loss\n1,1\n")
    with pytest.raises(LogError, match="run: expected one run, but got several: version_0, version_1$"):
        read_run(tmp_path / "run")
    put(tmp_path / "tables" / "b.jsonl", '{"loss":1}\n')
    assert len(read_run(tmp_path / "tables").records[0]) == 1
    put(tmp_path / "tables" / "a.csv.gz", b"")
    with pytest.raises(LogError, match="tables: expected one log, but got several: a.csv.gz, b.jsonl$"):
        read_run(tmp_path / "tables")


# Files that are not logs.

EXPECTED = (
    "expected a column such as loss, train_loss, training_loss, grad_norm, gnorm, gradient_norm, loss_scale, "
    "amp_loss_scale, train_loss_scale, but got "
)
BAD = {
    "empty": (b"", ": the file is empty"),
    "blank": (b" \n\n \n", ": the file is empty"),
    "binary": (b"\x93NUMPY\x01\0\xff\n\n", ": expected a log, but got a binary file"),
    "not UTF-8": (b"step,loss\n1,2\n2,\xff\xfe\n", ":3: expected text in UTF-8, but got the byte 0xff"),
    "not UTF-8 at all": ("step,loss\n".encode("utf-16"), ": expected a log, but got a binary file"),
    "text": (b"Dear reader\nthis is a letter\n", f":1: {EXPECTED}'Dear reader'"),
    "no usable column": (b"step,lr,val_loss\n1,2,3\n", f":1: {EXPECTED}'step', 'lr', 'val_loss'"),
    "no header": (b"1,2,3\n4,5,6\n", f":1: {EXPECTED}'1', '2', '3'"),
    "two runs": (b"Step,a - loss,b - loss\n1,2,3\n", ":1: expected one run, but got several columns 'loss'"),
    "too many cells": (b"step,loss\n1,2,3\n", ":2: expected 2 cells, but got 3"),
    "too few cells": (b"step,loss\n1\n2,3\n", ":2: expected 2 cells, but got 1"),
    "text for a number": (b"step,loss\n1,2\n2,low\n", ":3: loss: expected a number, but got 'low'"),
    "half a step": (b"step,loss\n1.5,2\n", ":2: step: expected a whole number as step, but got '1.5'"),
    "an endless step": (b"step,loss\ninf,2\n", ":2: step: expected a whole number as step, but got 'inf'"),
    "a huge cell": (
        b'step,loss\n1,"' + b"x" * 200_000 + b'"\n',
        ":2: not CSV: field larger than field limit",
    ),
    "JSON without a number": (b'{"a":1}\n{"b":2}\n', f": {EXPECTED}'a', 'b'"),
    "damaged JSON lines": (b'{"loss":1}\n{"loss":\n{"loss":2}\n', ":2: not JSON: Expecting value"),
    "a list a line": (b'{"loss":1}\n[1]\n', ":2: expected a JSON object, but got [1]"),
    "a huge number": (
        b'{"loss":1' + b"0" * 400 + b"}\n",
        ":1: loss: expected a number, but got one that is too",
    ),
    "a number of too many digits": (b'{"loss":' + b"1" * 5000 + b"}\n", ":1: not JSON: Exceeds the limit"),
    "deep JSON": (b'{"loss":' + b"[" * 100_000 + b"\n", ": not JSON: "),
    "a list as loss": (b'{"loss":[1,2]}\n', ":1: loss: expected a number, but got [1, 2]"),
    "array of numbers": (b"[1, 2]", ": expected objects in the array, but got 1 at index 0"),
    "damaged array": (b'[\n{"loss": 1},\n{"loss"\n]', ":4: not JSON: Expecting ':' delimiter"),
    "another object": (b'{\n"loss": 1\n}', ": expected JSON lines, or an object with log_history, but"),
    "history of numbers": (b'{"log_history": [1]}', ": log_history[0]: expected an object, but got 1"),
    "no history": (b'{"log_history": 3}', ": expected log_history to be a list, but got 3"),
    "text in the history": (
        b'{"log_history": [{"loss": "low", "step": 1}]}',
        ": log_history[0]: expected a number, but got 'low'",
    ),
    "no step in the history": (
        b'{"log_history": [{"loss": 1}]}',
        ": log_history[0]: expected a step, but got n",
    ),
    "truncated state": (trainer_state_json({"loss": 1, "step": 1})[:-30].encode(), ": not JSON: "),
    "truncated gzip": (gzip.compress(b"step,loss\n" * 1000)[:12], ": the compressed file ends too early"),
    "damaged gzip": (gzip.compress(os.urandom(3000))[:-1500] + b"\0" * 1500, ": "),
    "llm.c, damaged": (
        b"s:1 trl:2\nhello\ns:2 trl:2\n",
        ":2: expected pairs of name:number, but got 'hello'",
    ),
    "log of a later version": (b'{"fastclip_log":99,"rank":0}\n', ":1: the log has version 99"),
}


@pytest.mark.parametrize("name", BAD)
def test_read_run_refuses_a_damaged_file_in_one_line(tmp_path, name):
    content, words = BAD[name]
    path = put(tmp_path / "log.json", content)
    with pytest.raises(LogError) as caught:
        read_run(path)
    message = str(caught.value)
    start = str(path)
    assert message.startswith(start) and "\n" not in message and len(message) < 400, message
    assert words in message, message


def test_read_run_raises_on_a_missing_log(tmp_path):
    for path, words in (
        (tmp_path / "none", "none: No such file or directory"),
        (tmp_path, "expected a directory with a file such as trainer_state.json, metrics.csv, events.out.tf"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(LogError) as caught:
            read_run(path)
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_read_run_raises_without_permission(tmp_path, monkeypatch):
    path = put(tmp_path / "a.csv", "step,loss\n1,2\n")
    real = builtins.open

    def refusing(file, *arguments, **more):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *arguments, **more)

    monkeypatch.setattr(builtins, "open", refusing)
    with pytest.raises(LogError, match=f"{path}: Permission denied"):
        read_run(path)


TORN = {
    "CSV": "step,loss,lr\n1,2,3\n2,2",
    "JSON lines": '{"step":1,"loss":2}\n{"step":2,"lo',
    "pairs": "s:1 trl:2\ns:2 tr",
}


@pytest.mark.parametrize("name", TORN)
def test_read_run_ignores_a_torn_last_line(tmp_path, name):
    path = put(tmp_path / "log", TORN[name])
    run = read_run(path)
    assert numbers(run, "loss") == [(1, 2.0)]
    line = 3 if name == "CSV" else 2
    assert run.warnings[0] == f"{path}:{line}: the last line is incomplete and was ignored"


def test_read_run_reads_a_truncated_gzip_file_up_to_its_end(tmp_path):
    text = "step,loss\n" + "".join(f"{i},{math.sin(i)}\n" for i in range(5000))
    path = put(tmp_path / "a.csv.gz", gzip.compress(text.encode())[:-20_000])
    run = read_run(path)
    assert 1000 < len(run.records[0]) < 5000 and "the compressed file ends too early" in run.warnings[-1]


def test_read_run_reads_a_log_without_rows(tmp_path):
    for text in ("step,loss\n", '{"step":1,"loss":null}\n'):
        run = read_run(put(tmp_path / "log", text))
        assert run.records == {0: []}


def test_read_run_refuses_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LONGEST_LINE", 1000)
    path = put(tmp_path / "a.csv", "step,loss\n" + "1" * 2000)
    with pytest.raises(LogError, match=f"{path}:2: the line is longer than"):
        read_run(path)


def test_read_run_refuses_a_gzip_file_damaged_in_its_middle(tmp_path):
    text = "step,loss\n" + "".join(f"{i},{math.sin(i)}\n" for i in range(8000))
    content = bytearray(gzip.compress(text.encode()))
    content[-30_000:-29_000] = b"\xff" * 1000
    path = put(tmp_path / "a.csv.gz", bytes(content))
    with pytest.raises(LogError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}") and "\n" not in str(caught.value)
