# SPDX-License-Identifier: BSD-3-Clause
"""`make gpu-check` where there is no GPU: it says so; and its parts run on the CPU at smoke size."""

import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu import __main__ as gpu_check
from helpers.available import USABLE

pytestmark = pytest.mark.skipif(not USABLE, reason="no native library")


def run(*module: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "FASTCLIP_BENCH_SMOKE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *module]
    return subprocess.run(command, cwd=gpu_check.ROOT, capture_output=True, text=True, env=environment)


def test_gpu_check_without_a_gpu_exits_with_its_own_status():
    result = run("benchmarks.gpu")
    assert result.returncode == gpu_check.NO_GPU
    assert "no CUDA device here; nothing was built, tested or measured" in result.stderr


@pytest.mark.slow  # measures every table once
def test_gpu_check_tables_run_on_the_cpu():
    result = run("benchmarks.gpu.tables")
    assert result.returncode in (0, gpu_check.BAR_MISSED), result.stderr
    for words in (
        "torch foreach",
        "torch.compile",
        "copy GB/s",
        "### Bars",
        "smoke, bfloat16",
        "smoke, float32, AdamW fused | yes",
    ):
        assert words in result.stdout
    assert (result.returncode == gpu_check.BAR_MISSED) == ("MISSED" in result.stdout)


def test_gpu_check_describes_a_variant():
    result = run("benchmarks.gpu.tables", "--ops")
    assert result.returncode == 0 and result.stdout.startswith("statistics GB/s "), result.stderr


def test_gpu_check_runs_the_sanitizer_on_the_right_tests():
    result = run("benchmarks.gpu.small")
    assert result.returncode == 0 and result.stdout.startswith("done: "), result.stderr


def test_gpu_check_writes_its_report(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=0: "A GPU")
    monkeypatch.setattr(gpu_check, "head", lambda: "- driver: 1")
    steps = [gpu_check.CheckStep("Build", "done"), gpu_check.CheckStep("Tests marked gpu", "1 failed", False)]
    text = gpu_check.report(steps)
    assert text.startswith("# fastclip on A GPU\n\n- driver: 1\n\n## Build\n")
    assert "## Tests marked gpu (FAILED)" in text
