# SPDX-License-Identifier: BSD-3-Clause
"""Which backend serves, by name and without, and what the doctor says of it."""

import os
import subprocess
import sys

import pytest
import torch

import fastclip
from fastclip import backends
from fastclip.backends import libraries, native, reference

CPU, META = torch.device("cpu"), torch.device("meta")


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    """A fresh interpreter."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)


def test_auto_prefers_native_on_the_cpu_and_the_reference_elsewhere(native_only):
    with backends.use("auto"):
        assert backends.select(CPU) is native
        assert backends.select(META) is reference
        assert list(backends.status("cpu")) == ["native", "triton", "reference"]
        assert backends.status("cpu")["native"] == "in use"
        assert backends.status("cpu")["reference"] == "usable"
        assert backends.status(META) == {
            "native": "no kernels for meta",
            "triton": "Triton has no kernels for meta",
            "reference": "in use",
        }


@pytest.mark.parametrize("norm_type", [3.0, 0.5, -1.0, float("-inf"), float("nan"), 0.0])
def test_select_leaves_other_orders_to_the_reference(native_only, norm_type):
    assert backends.select(CPU, norm_type) is reference


def test_use_of_a_named_backend_works_or_raises(native_only):
    with backends.use("reference"):
        assert backends.select(CPU) is reference
        assert backends.status()["reference"] == "in use" and backends.status()["native"] == "usable"
    with (
        backends.use("native"),
        pytest.raises(RuntimeError, match="cannot serve meta.*usable there: reference"),
    ):
        fastclip.get_total_norm([torch.ones(2, device="meta")])
    assert backends.select(CPU) is native


def test_use_lasts_until_the_with_block_ends():
    before = backends.name_in_use()
    try:
        backends.use("reference")
        assert backends.name_in_use() == "reference"
        with backends.use("auto"):
            assert backends.name_in_use() == "auto"
        assert backends.name_in_use() == "reference"
    finally:
        backends.use(before)


@pytest.mark.parametrize("name", ["cuda", "", "Native", None, 3])
def test_use_raises_on_an_unknown_name(name):
    with pytest.raises(
        ValueError, match=r"expected 'auto' or one of 'native', 'triton', 'reference', but got"
    ):
        backends.use(name)


def test_environment_variable_names_a_backend(monkeypatch):
    code = "import fastclip; print(fastclip.backends.name_in_use())"
    assert run(code, FASTCLIP_BACKEND="reference").stdout == "reference\n"
    monkeypatch.setattr(backends, "_named", None)
    monkeypatch.setattr(backends, "_environment", "reference")
    assert backends.select(CPU) is reference
    with backends.use("auto"):
        assert backends.name_in_use() == "auto"
    monkeypatch.setattr(backends, "_environment", "fast")
    with pytest.raises(ValueError, match="FASTCLIP_BACKEND: expected 'auto' or one of .* but got 'fast'"):
        fastclip.get_total_norm([torch.ones(2)])


def without_library(monkeypatch, tmp_path, report: str = "pure Python only: no C++ compiler") -> None:
    monkeypatch.setattr(libraries, "CPU_LIBRARY", tmp_path / "libfastclip_cpu.so")
    monkeypatch.setattr(libraries, "BUILD_REPORT", tmp_path / "report.txt")
    (tmp_path / "report.txt").write_text(report + "\n")
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setattr(backends, "_named", None)
    monkeypatch.setattr(backends, "_environment", "auto")


def test_missing_library_warns_once_and_shows_in_status(monkeypatch, tmp_path):
    if libraries.torch_version() < libraries.OLDEST_TORCH:
        pytest.skip("this torch is too old for the library, so nobody misses it")
    without_library(monkeypatch, tmp_path)
    with pytest.warns(UserWarning, match="plain PyTorch reference.*no C.. compiler.*python -m fastclip"):
        assert fastclip.get_total_norm([torch.ones(4)]) == 2
    assert fastclip.get_total_norm([torch.ones(4)]) == 2  # a second warning would be an error here
    assert "no C++ compiler" in backends.status()["native"]
    with pytest.raises(RuntimeError, match="'native' is not available: the library was not built"):
        backends.use("native")


def test_missing_library_does_not_warn_if_it_was_not_wanted(monkeypatch, tmp_path, recwarn):
    without_library(monkeypatch, tmp_path, "pure Python only, no native library: FASTCLIP_BUILD=none")
    assert fastclip.get_total_norm([torch.ones(4)]) == 2
    assert not recwarn.list


def test_old_torch_is_served_by_the_reference(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    monkeypatch.setattr(backends, "_chosen", {})
    with backends.use("auto"):
        assert backends.select(CPU) is reference
        assert "needs torch >= 2.10, this is 2.9.1" in backends.status()["native"]


def test_load_refuses_a_second_library_and_names_both(native_only, tmp_path):
    """Loading it would end the process: the ops would be defined twice."""
    code = (
        "import shutil, pathlib, torch, fastclip\n"
        "from fastclip.backends import libraries, native\n"
        f"copy = pathlib.Path({str(tmp_path)!r}) / libraries.CPU_LIBRARY.name\n"
        "shutil.copy(libraries.CPU_LIBRARY, copy)\n"
        "first, libraries.CPU_LIBRARY = libraries.CPU_LIBRARY, copy\n"
        "try:\n"
        "    native.load()\n"
        "except ImportError as error:\n"
        "    assert str(copy) in str(error) and str(first) in str(error), error\n"
        "    print('refused')\n"
    )
    result = run(code)
    assert result.stdout == "refused\n", result.stderr


def test_doctor_shows_versions_build_and_backends():
    result = subprocess.run(
        [sys.executable, "-m", "fastclip"],
        capture_output=True,
        text=True,
        env={**os.environ, "FASTCLIP_BACKEND": "reference"},
    )
    assert result.returncode == 0, result.stderr
    for words in (fastclip.__version__, torch.__version__, "FASTCLIP_BACKEND=reference", "\ncpu\n", "build "):
        assert words in result.stdout
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("  "))
    assert lines["reference"] == "in use"


def test_doctor_names_the_instruction_set(native_only):
    result = run(
        "from fastclip.cli.doctor import report; print(report())", FASTCLIP_CPU_CAPABILITY="baseline"
    )
    assert "native runs on baseline" in result.stdout


def test_doctor_works_in_the_environments_that_it_diagnoses():
    result = run("import runpy; runpy.run_module('fastclip', run_name='__main__')", FASTCLIP_BACKEND="fast")
    assert "but got 'fast'" in result.stdout, result.stderr
    if native.unavailable(CPU) is None:
        result = run(
            "import runpy; runpy.run_module('fastclip', run_name='__main__')", FASTCLIP_CPU_CAPABILITY="sse9"
        )
        assert "but got 'sse9'" in result.stdout, result.stderr
