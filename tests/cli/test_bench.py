# SPDX-License-Identifier: BSD-3-Clause
"""`fastclip bench`: refused arguments, wrong results that get no time, and figures that agree."""

import functools
import json
import re
import sys
import textwrap

import pytest
import torch

import fastclip
from fastclip import cli
from fastclip.bench import clip_rows, clip_table, machine, parity, timing
from fastclip.bench.clip_rows import ClipRow
from fastclip.bench.workloads import CPU, RestorableGradients, Workload, gpt2
from fastclip.cli import bench

SHAPES = gpt2(50, 8, 16, 1)
MODEL = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4).bfloat16())
    model[0].bias.requires_grad_(False)
    return model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch).sum()

def plain():
    model, optimizer, loss_function = build()
    return model.float(), optimizer, loss_function

def complex_():
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))])
    return model, torch.optim.SGD(model.parameters()), sum

def frozen():
    model, optimizer, loss_function = build()
    return model.requires_grad_(False), optimizer, loss_function

def nothing():
    return None
"""


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path, threads):
    """Measure few rounds of tiny gradients in a directory with one module."""
    threads(1)
    monkeypatch.setattr(timing, "MIN_ROUNDS", 3)
    monkeypatch.setattr(timing, "MAX_ROUNDS", 3)
    monkeypatch.setattr(timing, "CALLS_IN_CACHE", 2)
    monkeypatch.setattr(clip_rows, "CALLS_IN_CACHE", 2)
    monkeypatch.setattr(bench, "WORKLOADS", {"gpt2_124m": Workload("gpt2_124m", SHAPES)})
    monkeypatch.setattr(bench, "DEFAULT_WORKLOADS", ("gpt2_124m",))
    (tmp_path / "training.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("training", None)


@pytest.fixture
def fastclip_bench(capsys):
    """Run the command; return its exit status, the lines of rows, its output and its errors."""

    def run(*arguments):
        status = cli.main(["bench", *arguments])
        captured = capsys.readouterr()
        body = captured.out.partition("gradients  ")[2].partition("\nms  ")[0]
        return status, body.splitlines()[1:], captured.out, captured.err

    return run


def test_bench_prints_the_figures_that_it_writes_as_json(fastclip_bench):
    status, lines, out, err = fastclip_bench("--device", "cpu", "--json", "found.json")
    assert (status, err) == (0, "")
    with open("found.json") as file:
        found = json.load(file)
    assert [line.split()[:4] for line in lines] == [
        ["gpt2_124m", dtype, str(len(SHAPES)), clipped]
        for dtype in ("float32", "bfloat16", "float16")
        for clipped in ("no", "yes")
    ]
    for line, row in zip(lines, found["rows"], strict=True):
        theirs, ours, ratio = (float(text.rstrip("x")) for text in line.split()[4:7])
        assert row["first"]["median_ms"] == pytest.approx(theirs, rel=6e-3, abs=6e-4)
        assert row["second"]["median_ms"] == pytest.approx(ours, rel=6e-3, abs=6e-4)
        assert row["ratio"] == pytest.approx(row["first"]["median_ms"] / row["second"]["median_ms"])
        assert row["ratio"] == pytest.approx(ratio, rel=6e-3, abs=6e-4)
        low, high = row["ratio_quartiles"]
        assert 0 < low <= high
        assert row["norm_errors"][1] <= parity.NORM_ERROR
    assert found["machine"]["fastclip"].startswith(fastclip.__version__)
    assert found["machine"]["torch"] in out and found["machine"]["date"] in out


def test_measure_calls_torch_and_fastclip_in_turns_on_equal_gradients(monkeypatch):
    """What was clipped is restored before every call."""
    calls = []

    def spy(name, clip):
        def call(parameters, max_norm):
            calls.append((name, torch.equal(parameters[0].grad, gradients.saved[0]), max_norm))
            return clip(parameters, max_norm)

        return call

    gradients = RestorableGradients.of(Workload("two", ((8, 4), (3,))), "float32")
    exact = parity.exact_norm(gradients.saved)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", spy("torch", torch.nn.utils.clip_grad_norm_))
    monkeypatch.setattr(clip_rows, "clip_grad_norm_", spy("fastclip", clip_rows.clip_grad_norm_))
    row = ClipRow("two", "float32", clipped=True)
    clip_rows.measure([row], gradients, timing.Bandwidth())
    names = [name for name, _, _ in calls]
    assert names[:2] == ["torch", "fastclip"]  # checked against float64
    assert names[2:] == ["torch", "torch", "fastclip", "fastclip"] * 3
    assert all(fresh for _, fresh, _ in calls)
    assert {max_norm for *_, max_norm in calls} == {exact / 2}
    assert len(row.times.first.seconds) == len(row.times.second.seconds) == 3


def slightly_wrong(clip):
    def call(parameters, max_norm):
        total_norm = clip(parameters, max_norm)
        return total_norm * (1 + 1e-5)

    return call


def untouched(clip):
    def call(parameters, max_norm):
        return torch.nn.utils.get_total_norm([p.grad for p in parameters])

    return call


def one_element_off(clip):
    def call(parameters, max_norm):
        total_norm = clip(parameters, max_norm)
        parameters[-1].grad.view(-1)[0] *= 1.001
        return total_norm

    return call


@pytest.mark.parametrize(
    ("fault", "clipped", "words"),
    [
        (slightly_wrong, False, "fastclip: the norm is off by 9.9e-06, more than 1e-06"),
        (untouched, True, "gradient 0 is not"),
        (one_element_off, False, "changed, but nothing was to be clipped"),
        (one_element_off, True, f"gradient {len(SHAPES) - 1} is not"),
    ],
)
def test_bench_gives_a_wrong_result_of_fastclip_no_time(fastclip_bench, monkeypatch, fault, clipped, words):
    monkeypatch.setattr(clip_rows, "clip_grad_norm_", fault(clip_rows.clip_grad_norm_))
    status, lines, _, _ = fastclip_bench("--device", "cpu", "--dtype", "float32", "--json", "found.json")
    assert status == 1
    assert "PARITY FAILED" in lines[clipped] and words in lines[clipped]
    assert re.fullmatch(r"gpt2_124m +float32 +\d+ +(no|yes) +PARITY.*", lines[clipped])
    with open("found.json") as file:
        row = json.load(file)["rows"][clipped]
    assert row["ratio"] is None and row["first"] is None


def test_bench_attributes_a_wrong_result_of_torch_to_torch(fastclip_bench, monkeypatch):
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", untouched(None))
    status, lines, _, _ = fastclip_bench("--device", "cpu", "--dtype", "float32")
    assert status == 1 and "torch: gradient 0 is not" in lines[1] and "PARITY" not in lines[0]


@pytest.mark.parametrize(
    ("function", "dtype", "tensors"),
    [("build", "mixed", 3), ("plain", "float32", 3), ("complex_", "complex64", 1)],
)
def test_bench_model_uses_the_parameters_that_get_gradients(fastclip_bench, function, dtype, tensors):
    status, lines, _, err = fastclip_bench("--model", f"training:{function}")
    assert (status, err) == (0, "")
    cells = [line.split()[:4] for line in lines]
    assert cells == [[f"training:{function}", dtype, str(tensors), clipped] for clipped in ("no", "yes")]


def test_bench_measures_the_model_before_the_workloads(fastclip_bench):
    _, lines, _, _ = fastclip_bench(
        "--model", "training:plain", "--workload", "gpt2_124m", "--dtype", "float32"
    )
    assert [line.split()[0] for line in lines] == ["training:plain"] * 2 + ["gpt2_124m"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "training"], "expected MODULE:FUNCTION such as train:build, but got 'training'"),
        (["--model", "missing:build"], "no module named 'missing'"),
        (["--model", "training:nothing"], "but got NoneType without model"),
        (["--model", "training:frozen"], "its model has no parameter that requires a gradient"),
        (["--device", "nonsense"], "--device nonsense: "),
        (["--device", "cuda:99"], "--device cuda:99: "),
        (["--json", "nowhere/found.json"], "No such file or directory"),
    ],
)
def test_bench_reports_bad_arguments_in_one_line(fastclip_bench, arguments, words):
    status, _, out, err = fastclip_bench(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("fastclip: ") and words in err and err.count("\n") == 1


def test_bench_skips_gradients_that_do_not_fit_in_memory(fastclip_bench, monkeypatch):
    monkeypatch.setattr(clip_rows, "available_memory", lambda device: 1 << 29)
    status, lines, _, _ = fastclip_bench("--device", "cpu", "--dtype", "float32")
    assert status == 0 and len(lines) == 2
    assert all("skipped: needs 1.1 GB of memory, 0.5 GB are free" in line for line in lines)


@pytest.mark.parametrize(("load", "busy"), [(0.2, False), (3.0, True), (None, False)])
def test_bench_reports_a_busy_machine(fastclip_bench, monkeypatch, load, busy):
    monkeypatch.setattr(machine, "load", lambda: load)
    _, _, out, _ = fastclip_bench("--device", "cpu", "--dtype", "float32")
    assert (clip_table.BUSY in out) == busy


def test_seconds_of_synchronizes_before_and_within_the_time():
    order = []
    timing.take_turns(
        [lambda: order.append("first"), lambda: order.append("second")],
        lambda: order.append("prepare"),
        clock=functools.partial(timing.seconds_of, synchronize=lambda: order.append("synchronize")),
    )
    turn = ["prepare", "synchronize", "first", "synchronize"]
    assert order[:8] == [*turn, "prepare", "synchronize", "second", "synchronize"]
    assert timing.clock_of(CPU) is timing.seconds_of


@pytest.mark.gpu
def test_bench_on_a_gpu(fastclip_bench):
    status, lines, out, _ = fastclip_bench("--device", "cuda")
    assert status == 0 and len(lines) == 6 and torch.cuda.get_device_name() in out
