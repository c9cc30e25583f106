# SPDX-License-Identifier: BSD-3-Clause
"""The Triton backend beside what the suite of all backends asks: compilation for GPUs that are not here."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import fastclip
from fastclip.backends import triton
from helpers import cases
from helpers.available import reason_against_the_interpreter
from helpers.cases import DTYPES

if reason := triton.reason_absent():
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[2]
# `make test` compiles for one of them; each takes seconds.
TARGETS = ["cuda 90", "cuda 80", "cuda 100", "cuda 120", "hip gfx90a", "hip gfx942"]


def compile_for(target: str) -> dict[str, dict[str, int]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "triton_compile.py"), *target.split()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def compiled(request) -> dict[str, Future]:
    """Compile for the targets of the selected tests at once, one process per core."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {p["target"]: pool.submit(compile_for, p["target"]) for p in parameters if "target" in p}


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[pytest.mark.slow] * (t != TARGETS[0])) for t in TARGETS]
)
def test_triton_kernels_compile_without_spills_and_with_wide_loads(compiled, target):
    found = compiled[target].result()
    assert len(found) == 13
    # The assembler in Triton 3.6 spills two registers of one kernel for sm_100.
    newest = tuple(map(int, version("triton").split(".")[:2])) >= (3, 8)
    most_spilled = 0 if newest else 16
    for kernel, facts in found.items():
        assert facts["spilled"] <= most_spilled, (kernel, facts)
        # Half of the threads that fit at least: 65,536 registers for 2,048 threads, 512 for 8 waves.
        assert facts["registers"] <= 80, (kernel, facts)
        if kernel.startswith(("chunk_statistics", "scale", "clamp")):
            assert facts["wide loads"] >= 4, (kernel, facts)
        if kernel.startswith("scale"):
            assert facts["wide stores"] >= 3, (kernel, facts)


interpreted = pytest.mark.skipif(
    reason_against_the_interpreter() is not None, reason=str(reason_against_the_interpreter())
)


@interpreted
@pytest.mark.slow  # a quarter of a minute, a program of the interpreter after the other
def test_triton_clip_of_thousands_of_gradients():
    """More than one block of rows, once: the interpreter takes milliseconds for each gradient."""
    grads = [cases.normal(DTYPES[i % 4], i % 3) for i in range(1100)]
    total_norm, stats = triton.grad_stats(grads, 2.0)
    assert abs(total_norm.item() / cases.exact_norm(grads, 2.0) - 1) < 1e-6
    assert stats.shape == (1100, 3)


@interpreted
def test_triton_serves_the_cpu_only_under_the_interpreter(monkeypatch):
    cpu = torch.device("cpu")
    assert triton.unavailable(cpu) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert triton.unavailable(cpu) == "Triton has no kernels for cpu"


def test_auto_never_chooses_the_interpreter(monkeypatch):
    monkeypatch.setattr(fastclip.backends, "_chosen", {})
    with fastclip.backends.use("auto"):
        assert fastclip.backends.select(torch.device("cpu")) is not triton


@pytest.mark.parametrize("what", ["missing", "too old"])
def test_triton_reports_why_it_is_not_available(monkeypatch, what):
    triton.reason_absent.cache_clear()
    try:
        if what == "missing":
            monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
        else:
            monkeypatch.setattr("triton.__version__", "3.1.0")
        words = "Triton is not installed" if what == "missing" else "3.2 or later is needed, this is 3.1.0"
        with pytest.raises(RuntimeError, match=f"backend 'triton' is not available: .*{words}"):
            fastclip.backends.use("triton")
        assert words in triton.unavailable(torch.device("cuda"))
    finally:
        triton.reason_absent.cache_clear()


def test_triton_reports_a_missing_driver(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "Triton finds no driver for cuda" in triton.unavailable(torch.device("cuda"))


@interpreted
def test_triton_gives_the_same_bits_each_time():
    grads = cases.mixed()
    first = triton.clip_(cases.clone(grads), 0.5, 2.0, "propagate")
    second = triton.clip_(cases.clone(grads), 0.5, 2.0, "propagate")
    cases.assert_bitwise_equal(list(first), list(second))
