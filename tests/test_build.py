# SPDX-License-Identifier: BSD-3-Clause
"""What setup.py decides, with real builds of wheels in a copy of the project."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

import fastclip
from fastclip.backends import libraries

ROOT = Path(fastclip.__file__).parent.parent
LIBRARY = "fastclip/libfastclip_cpu.so"
CUDA_LIBRARY = "fastclip/libfastclip_cuda.so"

if not (ROOT / "setup.py").exists():
    pytest.skip("the tests run against an installed package, not a source tree", allow_module_level=True)


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what a build reads, without anything that was built."""
    copy = tmp_path / "project"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "_build_report.txt")
    for folder in ("csrc", "fastclip"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


class Wheel:
    """The outcome of `pip wheel`: its output and, if it succeeded, what the wheel holds."""

    def __init__(self, project: Path, **environment: str) -> None:
        out = project.parent / "wheels"
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps"]
        result = subprocess.run(
            [*command, "--wheel-dir", str(out), "."],
            cwd=project,
            env={**os.environ, "FASTCLIP_BUILD": "auto", "TORCH_CUDA_ARCH_LIST": "9.0", **environment},
            capture_output=True,
            text=True,
        )
        self.output = result.stdout + result.stderr
        self.succeeded = result.returncode == 0
        self.path = next(out.glob("*.whl")) if self.succeeded else None

    def files(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return archive.namelist()

    def report(self) -> str:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read("fastclip/_build_report.txt").decode()


def no_compiler(tmp_path: Path) -> dict[str, str]:
    """A PATH on which nothing compiles."""
    (tmp_path / "empty").mkdir()
    return {"PATH": str(tmp_path / "empty"), "CXX": "", "CC": ""}


def no_torch(tmp_path: Path) -> dict[str, str]:
    """What an isolated build sees: a Python that has no torch."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise ImportError('No module named torch')\n")
    return {"PYTHONPATH": str(tmp_path / "shadow")}


def assert_pure(wheel: Wheel, *words: str) -> None:
    """A wheel for any machine, that says aloud and in its report why it holds no library."""
    assert wheel.succeeded, wheel.output
    assert LIBRARY not in wheel.files() and wheel.path.name.endswith("py3-none-any.whl")
    for word in words:
        assert word in wheel.output and word in wheel.report()


def test_none_builds_no_library(project):
    assert_pure(Wheel(project, FASTCLIP_BUILD="none"), "pure Python only", "FASTCLIP_BUILD=none")


def test_auto_without_a_compiler(project, tmp_path):
    needs_modern_torch()
    assert_pure(Wheel(project, **no_compiler(tmp_path)), "pure Python only", "no C++ compiler")


def test_auto_without_torch(project, tmp_path):
    wheel = Wheel(project, **no_torch(tmp_path))
    assert_pure(wheel, "torch cannot be imported by the build", "--no-build-isolation")


def test_auto_with_a_compiler_that_fails(project, tmp_path):
    needs_modern_torch()
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    broken.chmod(0o755)
    wheel = Wheel(project, CXX=str(broken))
    assert wheel.succeeded, wheel.output
    assert LIBRARY not in wheel.files()
    assert "did not compile" in wheel.output and "did not compile" in wheel.report()


def test_cpu_builds_or_fails(project, tmp_path):
    wheel = Wheel(project, FASTCLIP_BUILD="cpu", **no_torch(tmp_path))
    assert not wheel.succeeded and "FASTCLIP_BUILD=cpu: torch cannot be imported" in wheel.output


def test_unknown_modes_fail(project):
    wheel = Wheel(project, FASTCLIP_BUILD="fast")
    assert not wheel.succeeded
    assert "expected one of auto, cpu, cuda, none, but got 'fast'" in wheel.output


def without_nvcc(tmp_path: Path) -> dict[str, str]:
    """A machine with the C++ compiler and everything else, but no CUDA toolkit on PATH."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for tool in Path(folder).glob("*") if Path(folder).is_dir() else ():
            if not tool.name.startswith("nvcc") and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    return {"PATH": str(tools), "CUDA_HOME": "", "CUDA_PATH": ""}


def test_cuda_without_a_toolkit(project, tmp_path):
    """Asked for by name, its absence ends the build; else it is told and the CPU library built."""
    needs_modern_torch()
    environment = without_nvcc(tmp_path)
    if list((Path(sysconfig.get_paths()["purelib"]) / "nvidia").glob("cu*/bin/nvcc")):
        pytest.skip("NVIDIA's compiler is installed as a package")
    wheel = Wheel(project, FASTCLIP_BUILD="cuda", **environment)
    assert not wheel.succeeded and "FASTCLIP_BUILD=cuda: no nvcc" in wheel.output
    wheel = Wheel(project, **environment)
    assert wheel.succeeded and LIBRARY in wheel.files() and CUDA_LIBRARY not in wheel.files()
    assert "no CUDA kernels: " in wheel.report() and "no CUDA kernels: " in wheel.output


def test_cuda_with_a_compiler_behind_a_script(project, tmp_path):
    """On PATH lies a script that calls nvcc elsewhere: the toolkit is found from what nvcc says of itself."""
    needs_modern_torch()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nvcc"
    script.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    wheel = Wheel(project, FASTCLIP_BUILD="cuda", PATH=path)
    assert wheel.succeeded, wheel.output
    assert LIBRARY in wheel.files() and CUDA_LIBRARY in wheel.files()
    assert re.search(r"CUDA kernels by CUDA \d+\.\d+ for sm_90 \(", wheel.report())
    with zipfile.ZipFile(wheel.path) as archive:
        library = archive.read(CUDA_LIBRARY)
    for place in (project, tmp_path, Path(torch.__file__).parent):
        assert str(place).encode() not in library


def test_a_toolkit_without_its_static_runtime(project, tmp_path):
    """auto builds the CPU library and tells why nothing else; it does not end."""
    needs_modern_torch()
    if torch.version.cuda is None:
        pytest.skip("auto looks for a toolkit only where torch has CUDA")
    script = tmp_path / "nvcc"
    script.write_text(f'#!/bin/sh\necho "#$ TOP={tmp_path}"\necho "release 13.0"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    wheel = Wheel(project, PATH=path, CUDA_HOME="", CUDA_PATH="")
    assert wheel.succeeded, wheel.output
    assert LIBRARY in wheel.files() and CUDA_LIBRARY not in wheel.files()
    assert f"no CUDA kernels: no libcudart_static.a under {tmp_path}" in wheel.report()


def test_a_mistaken_architecture_fails(project):
    needs_modern_torch()
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    wheel = Wheel(project, FASTCLIP_BUILD="cuda", TORCH_CUDA_ARCH_LIST="Hopper")
    assert not wheel.succeeded and "expected numbers such as 9.0, but got 'Hopper'" in wheel.output


def needs_modern_torch() -> None:
    if libraries.torch_version() < libraries.OLDEST_TORCH:
        pytest.skip(f"torch {torch.__version__} is older than the library needs, which is said first")


def test_an_installed_wheel_runs_the_library(project, tmp_path):
    needs_modern_torch()
    if not shutil.which(os.environ.get("CXX", "c++")):
        pytest.skip("no C++ compiler")
    wheel = Wheel(project, FASTCLIP_BUILD="cpu")
    assert wheel.succeeded, wheel.output
    assert LIBRARY in wheel.files() and "-py3-none-" in wheel.path.name
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel.path) as archive:
        archive.extractall(site)
    code = (
        "import torch, fastclip\n"
        "p = torch.nn.Parameter(torch.zeros(2)); p.grad = torch.tensor([3.0, 4.0])\n"
        "norm = fastclip.clip_grad_norm_([p], 1).item()\n"
        "print(fastclip.__file__, fastclip.backends.status()['native'], norm)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert result.stdout.split(maxsplit=1)[1] == "in use 5.0\n", result.stderr
    assert result.stdout.startswith(str(site))
    assert str(project).encode() not in (site / LIBRARY).read_bytes()
