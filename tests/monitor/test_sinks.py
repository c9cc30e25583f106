# SPDX-License-Identifier: BSD-3-Clause
"""Where the monitor's records go: several sinks of which some fail, W&B and Trackio, TensorBoard."""

import io
import logging
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastclip
import fastclip.monitor.sinks.tensorboard as tensorboard_module
from fastclip.logs import read_run, verdict_of
from fastclip.monitor.sinks import JsonlSink, LogSink, SinkGroup, TensorBoardSink, as_sink
from fastclip.monitor.sinks.scalars import scalars_of
from helpers.log_samples import INF, NAN, RECORD


class Broken:
    """A sink that fails at some steps."""

    def __init__(self, steps, error=None):
        self.steps, self.error, self.calls = steps, error or OSError("no space"), []

    def write(self, record):
        self.calls.append(record["step"])
        if record["step"] in self.steps:
            raise self.error

    def flush(self):
        raise self.error

    def close(self):
        self.calls.append("closed")


def test_sink_group_warns_once_of_a_failing_sink_and_continues():
    broken, fine = Broken({2, 3, 5}), Broken(())
    fine.flush = lambda: None
    group = SinkGroup([broken, fine])
    group.write({"step": 1})
    with pytest.warns(UserWarning) as caught:
        group.write({"step": 2})
    assert len(caught) == 1 and caught[0].filename == __file__
    assert str(caught[0].message).startswith("Broken failed at step 2 with OSError: no space. ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (3, 4, 5):
            group.write({"step": step})
        group.flush()
    with pytest.warns(
        UserWarning, match="Broken failed 3 more times .* step 2, the last one at step 5 with OS"
    ):
        group.close()
    group.close()
    assert broken.calls == fine.calls == [1, 2, 3, 4, 5, "closed"] and group.failures == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, after = Broken({1}), Broken(())
        group = SinkGroup([one, after])
        with pytest.raises(UserWarning):
            group.write({"step": 1})
        assert after.calls == [1], "a warning made an error does not keep the record from the others"
        group.close()
    with pytest.raises(KeyboardInterrupt):
        SinkGroup([Broken({1}, KeyboardInterrupt())]).write({"step": 1})


@pytest.mark.parametrize("step_argument", [True, False])
def test_log_sink_logs_flat_numbers(step_argument):
    logged = []

    class Run:
        def log(self, data, step=None, commit=None):
            logged.append((data, step))

    class Plain:
        def log(self, data):
            logged.append((data, None))

    sink = as_sink(Run() if step_argument else Plain())
    sink.write(RECORD)
    sink.write({**RECORD, "step": 18, "loss": 0.5})
    sink.flush()
    sink.close()
    (first, step), (second, _) = logged
    assert step == (17 if step_argument else None)
    assert all(type(value) in (int, float) for value in first.values())
    assert math.isnan(first["fastclip/loss"]) and second["fastclip/loss"] == 0.5
    assert first["fastclip/events/nan"] == 2 and second["fastclip/events/nan"] == 4
    expected = {"step": 17, "loss/aux": 0.5, "lr/1": 0.125, "gradient/total_norm": INF, "step/applied": 0}
    expected |= {"update_ratio/layer.weight": -INF, "activation_rms/layer": 1.5, "batch/0/mean": 0.125}
    expected |= {"amp/loss_scale": 65536, "throughput/samples_per_second": 100, "memory/allocated": 2**40}
    assert {tag: first[f"fastclip/{tag}"] for tag in expected} == expected
    assert not any("shape" in tag or "nothing" in tag or "tensor_norms" in tag for tag in first)
    LogSink(Run(), pass_step=False).write({"step": 5})
    assert logged[-1] == ({"fastclip/step": 5}, None)
    with pytest.raises(TypeError, match=r"expected an object with log\(dict, step=...\), but got .*Plain"):
        LogSink(Plain(), pass_step=True)


def test_as_sink_raises_on_other_objects(tmp_path):
    sink = JsonlSink(tmp_path, header={})
    assert as_sink(sink) is sink
    module = SimpleNamespace(log=lambda metrics, step=None: None)
    assert isinstance(as_sink(module), LogSink)
    lightning = SimpleNamespace(log=lambda name, value, step=0: None)
    for target in (
        None,
        3,
        "runs",
        io.StringIO(),
        logging.getLogger(),
        torch.ones(1),
        math,
        lightning,
        JsonlSink,
    ):
        with pytest.raises(
            TypeError, match="expected a sink to have write, .* but got (the class )?[A-Za-z]+$"
        ):
            as_sink(target)
        with pytest.raises(TypeError):
            SinkGroup([sink, target])


def events_of(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0})
    return events.Reload()


def scalar(events, tag):
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_sink_writes_scalars_histograms_and_text(tmp_path):
    sink = TensorBoardSink(tmp_path, histogram_every=10)
    for step in (3, 4, 12, 13, 20, 23):
        sink.write({**RECORD, "step": step, "loss": float(step) if step != 13 else NAN})
    sink.write({"step": 24, "total_norm": 1e300, "tensor_norms": [NAN, INF], "loss": None})
    sink.write({"step": 40, "tensor_norms": [NAN, INF]})
    sink.write({"step": 41, "tensor_norms": [0.0, 1e30]})
    sink.write({"step": 5, "tensor_norms": [0.0]})
    sink.flush()
    sink.close()
    sink.close()
    sink.flush()
    events = events_of(tmp_path)
    assert [(s, v) for s, v in scalar(events, "loss") if s != 13] == [(s, s) for s in (3, 4, 12, 20, 23)]
    assert math.isnan(dict(scalar(events, "loss"))[13])
    assert scalar(events, "gradient/total_norm")[-2:] == [(23, INF), (24, INF)]
    assert scalar(events, "update_ratio/layer.weight")[0] == (3, -INF)
    assert scalar(events, "events/nan")[:2] == [(3, 2), (4, 4)]
    single = {"loss/aux": 0.5, "lr/0": 0.25, "lr/1": 0.125, "gradient/max_norm": 1, "gradient/clip_coef": 0.5}
    single |= {
        "gradient/nan_count": 3,
        "amp/loss_scale": 65536,
        "activation_rms/layer": 1.5,
        "step/applied": 0,
    }
    single |= {"throughput/samples_per_second": 100, "memory/allocated": 2**40, "batch/0/mean": 0.125}
    assert {tag: scalar(events, tag)[0][1] for tag in single} == single
    tags = {*single, "loss", "loss/name", "gradient/total_norm", "update_ratio/layer.weight", "events/nan"}
    assert {*events.Tags()["scalars"]} == tags | {"activation_nonfinite/layer"}
    histograms = {event.step: event.histogram_value for event in events.Histograms("gradient/tensor_norms")}
    assert [*histograms] == [3, 13, 23, 41, 5]
    assert (histograms[3].num, histograms[3].min, histograms[3].max) == (3, 0.5, 1e19)
    (first, *_), texts = events.Tensors("events/text_summary"), events.Tags()["tensors"]
    assert texts == ["events/text_summary"] and first.step == 3
    assert first.tensor_proto.string_val[0] == b"- error nan: -Infinity\n- error nan: second"


def test_tensorboard_sink_writes_numbers_every_few_steps(tmp_path):
    sink = TensorBoardSink(tmp_path, every=10)
    for step in (3, 4, 12, 13, 25, 5):
        sink.write({**RECORD, "step": step})
    sink.close()
    events = events_of(tmp_path)
    assert [step for step, _ in scalar(events, "loss/aux")] == [3, 13, 25, 5]
    assert [step for step, _ in scalar(events, "events/nan")] == [3, 4, 12, 13, 25, 5]
    with pytest.raises(ValueError, match="expected every"):
        TensorBoardSink(tmp_path, every=0)


def test_tensorboard_sink_purges_steps_of_an_earlier_run(tmp_path):
    for steps, purge_step in ((range(10), None), (range(5, 8), 5)):
        sink = as_sink(TensorBoardSink(str(tmp_path), purge_step=purge_step))
        for step in steps:
            sink.write({"step": step, "loss": 1.0 if purge_step else 0.0})
        sink.close()
    assert scalar(events_of(tmp_path), "loss") == [(s, float(s >= 5)) for s in range(8)]


def test_tensorboard_sink_does_not_close_the_callers_writer(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sink = as_sink(writer)
        sink.write(RECORD)
        sink.close()
        assert scalar(events_of(tmp_path), "loss/aux") == [(17, 0.5)], "close flushes"
        writer.add_scalar("own", 1.0, 18)  # and leaves it open
    assert scalar(events_of(tmp_path), "own") == [(18, 1.0)]
    found = []
    duck = SimpleNamespace(add_scalar=lambda *arguments: found.append(arguments))
    as_sink(duck).write(RECORD)
    assert ("lr/1", 0.125, 17) in found
    duck.flush = lambda: found.append("flush")
    as_sink(duck).close()
    assert found[-1] == "flush"
    with pytest.raises(ValueError, match="purge_step"):
        TensorBoardSink(SimpleNamespace(add_scalar=print), purge_step=3)
    with pytest.raises(ValueError, match="histogram_every"):
        TensorBoardSink(tmp_path, histogram_every=0)
    with pytest.raises(TypeError, match="expected a directory or a writer with add_scalar, but got int"):
        TensorBoardSink(3)


def test_tensorboard_sink_raises_without_tensorboard(tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "tensorboard" or "utils.tensorboard" in m]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "torch-fastclip\[tensorboard\]"'):
        TensorBoardSink(tmp_path)


def test_tensorboard_is_not_imported_before_use():
    code = "import sys, fastclip.monitor.sinks; print('tensorboard' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "False\n", result.stdout + result.stderr


# What a real monitor writes, read back, and held to the documentation.

PAGE = Path(__file__).parents[2] / "docs" / "tensorboard.md"


def documented(text):
    """The first column of the table of tags, without its heading."""
    return re.findall(r"^\| `?([a-z_/<>]+)`? \| ", text, re.MULTILINE)[1:]


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(dim=1))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(directory of the event files, of the log) of one training in which every field of a record occurs."""
    tensorboard, log = (tmp_path_factory.mktemp(name) for name in ("tensorboard", "log"))
    torch.manual_seed(0)
    model = Words()
    parts = [{"params": model.embedding.parameters(), "lr": 1e-2}, {"params": model.head.parameters()}]
    optimizer = torch.optim.AdamW(parts, lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    groups = {"groups": lambda name: name.split(".")[0], "names": model.named_parameters()}
    fastclip.attach(optimizer, 1.0, scaler=scaler, **groups)
    monitor = fastclip.Monitor(
        model, optimizer, scaler=scaler, log_dir=log, sinks=[TensorBoardSink(tensorboard)], activations="leaf"
    )
    for step in range(12):
        ids, targets = torch.randint(20, (4, 6)), torch.randint(20, (4,))
        monitor.batch(ids=ids, targets=targets, weight=torch.full((4, 3), NAN if step == 9 else 1.0 + step))
        loss = torch.nn.functional.cross_entropy(model(ids), targets) * (NAN if step == 9 else 1.0)
        monitor.loss(loss, aux=loss.detach() / 2)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    monitor.close()
    return tensorboard, log


def test_every_tag_of_a_real_run_is_documented_and_every_documented_tag_is_written(written):
    tags = documented(PAGE.read_text())
    assert tags == documented(tensorboard_module.__doc__) and len(tags) == 26
    events = events_of(written[0])
    found = {*events.Tags()["scalars"], *events.Tags()["histograms"]}
    found |= {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}
    patterns = {tag: re.compile(re.sub(r"<\w+>", r"[^/]+", tag)) for tag in tags}
    for tag in found:
        assert any(pattern.fullmatch(tag) for pattern in patterns.values()), f"{tag} is not documented"
    for tag, pattern in patterns.items():
        assert any(pattern.fullmatch(name) for name in found), f"{tag} is never written"


def test_a_real_run_is_read_back_completely(written):
    """What goes through the tags comes back as it stands in the log, in float32."""
    run, log = read_run(written[0]), read_run(written[1])
    assert not run.inferred and run.warnings == []
    assert len(run.records[0]) == len(log.records[0]) == 12
    for found, wanted in zip(run.records[0], log.records[0], strict=True):
        assert scalars_of(found.to_dict()) == pytest.approx(
            scalars_of(wanted.to_dict()), rel=1e-6, abs=1e-30, nan_ok=True
        )
        assert abs(found.time - wanted.time) < 600
        reported = [(e.kind, e.severity, e.step, e.message) for e in wanted.events]
        assert [(e.kind, e.severity, e.step, e.message) for e in found.events] == reported
    assert {e.kind for e in run.records[0][9].events} >= {"nonfinite", "bad_batch"}
    assert type(run.records[0][9].nan_count) is int and run.records[0][9].applied is False
    assert verdict_of(run).status == verdict_of(log).status == 1  # the step was skipped, two more followed


def test_events_that_were_only_counted_are_found_again(tmp_path):
    """By a writer without add_text, such as a wrapper of the caller's."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        sink = TensorBoardSink(SimpleNamespace(add_scalar=writer.add_scalar))
        for step in range(3):
            event = {"kind": "nonfinite", "severity": "error", "message": "lost", "step": step}
            bad = {"loss": NAN, "events": [event]} if step == 2 else {}
            sink.write({"step": step, "loss": 1.0, "nan_count": 0, **bad})
    run = read_run(tmp_path)
    assert run.inferred and [e.message for r in run.records[0] for e in r.events] == ["the loss is nan"]
