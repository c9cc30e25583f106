# SPDX-License-Identifier: BSD-3-Clause
"""What setup.py decides, with real builds of wheels in a copy of the project.

Where the decision is the outcome, the compiler is a script that compiles an empty file in the place of every
source. What a wheel with the real library does is in test_packaging.py.
"""

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
COMPILER = os.environ.get("CXX") or shutil.which("c++")

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


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def compiler_without(tmp_path: Path, sources: str) -> str:
    """A compiler that finds nothing in these sources (a pattern of sh) and does not optimize the others."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    empty = tmp_path / "empty.cpp"
    empty.write_text("")
    lines = (
        "for argument do",
        "  shift",
        f'  case "$argument" in {sources}) argument={empty};; esac',
        '  set -- "$@" "$argument"',
        "done",
        f'exec {COMPILER} "$@" -O0',
    )
    return script(tmp_path / "compiler", "\n".join(lines))


@pytest.fixture
def empty_compiler(tmp_path) -> str:
    return compiler_without(tmp_path, "*.cpp")


# The hook that pip calls, in one process where pip takes four.
HOOK = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv.pop())"
# As pip isolates a build: what is installed is hidden, but for what the build requires.
HIDE = (
    "import sys, sysconfig; hidden = {sysconfig.get_path(n) for n in ('purelib', 'platlib')}; "
    "sys.path[:] = [sys.argv.pop(1), *(p for p in sys.path if p not in hidden)]; "
)


class Wheel:
    """The outcome of a build as pip asks for it: its output and, if it succeeded, what the wheel holds."""

    def __init__(self, project: Path, required: Path | None = None, **environment: str) -> None:
        out = project.parent / "wheels"
        out.mkdir(exist_ok=True)
        hook = [HOOK] if required is None else [HIDE + HOOK, str(required)]
        result = subprocess.run(
            [sys.executable, "-c", *hook, str(out)],
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
    """What a build in an environment of its own sees: a Python that has no torch."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise ImportError('No module named torch')\n")
    return {"PYTHONPATH": str(tmp_path / "shadow")}


def assert_pure(wheel: Wheel, *words: str) -> None:
    """A wheel for any machine, that says aloud and in its report why it holds no library."""
    assert wheel.succeeded, wheel.output
    assert LIBRARY not in wheel.files() and wheel.path.name.endswith("py3-none-any.whl")
    for word in words:
        assert word in wheel.output and word in wheel.report()


def needs_modern_torch() -> None:
    if libraries.torch_version() < libraries.OLDEST_TORCH:
        pytest.skip(f"torch {torch.__version__} is older than the library needs, which is said first")


def test_build_none_makes_no_library(project):
    assert_pure(Wheel(project, FASTCLIP_BUILD="none"), "pure Python only", "FASTCLIP_BUILD=none")


def test_build_auto_without_a_compiler_makes_the_python_package(project, tmp_path):
    needs_modern_torch()
    assert_pure(Wheel(project, **no_compiler(tmp_path)), "pure Python only", "no C++ compiler")


def test_build_auto_without_torch_makes_the_python_package(project, tmp_path):
    wheel = Wheel(project, **no_torch(tmp_path))
    assert_pure(wheel, "torch cannot be imported by the build", "--no-build-isolation")


def test_isolated_build_sees_the_installed_torch(project, tmp_path, empty_compiler):
    needs_modern_torch()
    required = tmp_path / "required"
    required.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.startswith(("setuptools", "wheel", "_distutils_hack", "pkg_resources")):
            (required / path.name).symlink_to(path)
    wheel = Wheel(project, required, FASTCLIP_BUILD="cpu", CXX=empty_compiler)
    assert wheel.succeeded, wheel.output
    assert LIBRARY in wheel.files() and f"built with torch {torch.__version__}" in wheel.report()


@pytest.mark.slow  # two builds of a wheel
def test_build_auto_survives_a_compiler_that_fails(project, tmp_path):
    needs_modern_torch()
    wheel = Wheel(project, CXX=script(tmp_path / "broken-compiler", "echo no such luck >&2\nexit 1"))
    assert wheel.succeeded, wheel.output
    assert LIBRARY not in wheel.files()
    assert "did not compile" in wheel.output and "did not compile" in wheel.report()


def test_build_cpu_succeeds_or_fails(project, tmp_path):
    wheel = Wheel(project, FASTCLIP_BUILD="cpu", **no_torch(tmp_path))
    assert not wheel.succeeded and "FASTCLIP_BUILD=cpu: torch cannot be imported" in wheel.output


def test_build_fails_on_an_unknown_mode(project):
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


@pytest.mark.slow  # two builds of a wheel
def test_build_cuda_fails_without_a_toolkit(project, tmp_path, empty_compiler):
    """Asked for by name, its absence ends the build; else it is reported and the CPU library built."""
    needs_modern_torch()
    environment = without_nvcc(tmp_path)
    if list((Path(sysconfig.get_paths()["purelib"]) / "nvidia").glob("cu*/bin/nvcc")):
        pytest.skip("NVIDIA's compiler is installed as a package")
    wheel = Wheel(project, FASTCLIP_BUILD="cuda", CXX=empty_compiler, **environment)
    assert not wheel.succeeded and "FASTCLIP_BUILD=cuda: no nvcc" in wheel.output
    wheel = Wheel(project, CXX=empty_compiler, **environment)
    assert wheel.succeeded and LIBRARY in wheel.files() and CUDA_LIBRARY not in wheel.files(), wheel.output
    assert "no CUDA kernels: " in wheel.report() and "no CUDA kernels: " in wheel.output


@pytest.mark.slow  # nvcc takes half a minute
def test_build_cuda_finds_the_toolkit_behind_a_script(project, tmp_path):
    """On PATH lies a script that calls nvcc elsewhere: the toolkit is found from what nvcc says of itself."""
    needs_modern_torch()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on PATH")
    (tmp_path / "bin").mkdir()
    # What the CUDA library holds is compiled, but not optimized, and nothing else.
    script(tmp_path / "bin" / "nvcc", f'exec {nvcc} "$@" -Xcicc -O0 -Xptxas -O0')
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    compiler = compiler_without(tmp_path, "*csrc/cpu/*.cpp|*csrc/schemas.cpp")
    wheel = Wheel(project, FASTCLIP_BUILD="cuda", PATH=path, CXX=compiler)
    assert wheel.succeeded, wheel.output
    assert LIBRARY in wheel.files() and CUDA_LIBRARY in wheel.files()
    assert re.search(r"CUDA kernels built with CUDA \d+\.\d+ for sm_90 \(", wheel.report())
    with zipfile.ZipFile(wheel.path) as archive:
        library = archive.read(CUDA_LIBRARY)
    assert b"grad_stats" in library
    for place in (project, tmp_path, Path(torch.__file__).parent):
        assert str(place).encode() not in library


def test_build_auto_survives_a_toolkit_without_static_runtime(project, tmp_path, empty_compiler):
    """auto builds the CPU library and tells why nothing else; it does not end."""
    needs_modern_torch()
    if torch.version.cuda is None:
        pytest.skip("auto looks for a toolkit only where torch has CUDA")
    script(tmp_path / "nvcc", f'echo "#$ TOP={tmp_path}"\necho "release 13.0"')
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    wheel = Wheel(project, PATH=path, CUDA_HOME="", CUDA_PATH="", CXX=empty_compiler)
    assert wheel.succeeded, wheel.output
    assert LIBRARY in wheel.files() and CUDA_LIBRARY not in wheel.files()
    assert f"no CUDA kernels: no libcudart_static.a under {tmp_path}" in wheel.report()


def test_build_fails_on_a_mistaken_architecture(project):
    needs_modern_torch()
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    wheel = Wheel(project, FASTCLIP_BUILD="cuda", TORCH_CUDA_ARCH_LIST="Hopper")
    assert not wheel.succeeded and "expected numbers such as 9.0, but got 'Hopper'" in wheel.output


@pytest.mark.parametrize("command", ["sdist", "egg_info", "dist_info"])
def test_metadata_commands_keep_what_was_built(project, tmp_path, command):
    """Without torch it must not take the library of the tree away, nor tell a decision."""
    library, report = project / LIBRARY, project / "fastclip" / "_build_report.txt"
    library.write_text("a library")
    report.write_text("a report\n")
    result = subprocess.run(
        [sys.executable, "setup.py", command],
        cwd=project,
        env={**os.environ, "FASTCLIP_BUILD": "auto", **no_torch(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert library.read_text() == "a library" and report.read_text() == "a report\n"
    assert "pure Python only" not in result.stdout + result.stderr
