# SPDX-License-Identifier: BSD-3-Clause
"""Decides what to compile, says what and why, and leaves the rest to pyproject.toml.

FASTCLIP_BUILD: "auto" compiles what this machine can and falls back with the reason, "cpu" compiles the CPU
library or fails, "cuda" both libraries or fails, even beside a torch without CUDA, "none" gives the pure
Python package. TORCH_CUDA_ARCH_LIST names other GPUs, such as "9.0;10.0+PTX".
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
REPORT = ROOT / "fastclip" / "_build_report.txt"
MODES = ("auto", "cpu", "cuda", "none")
MODE = os.environ.get("FASTCLIP_BUILD", "auto")
DESCRIBING = {"dist_info", "egg_info", "sdist"}
BUILDING = {"bdist_wheel", "build", "build_ext", "build_py", "develop", "editable_wheel", "install"}
CPU, CUDA = "fastclip.libfastclip_cpu", "fastclip.libfastclip_cuda"
ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0+PTX", "10.0", "12.0+PTX")
# Contraction would make the last bits of a norm depend on the instruction set; see csrc/cpu/loops.h.
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}=."]


def say(message: str) -> None:
    """Tell the decision to whoever watches the build, and to `python -m fastclip` afterwards."""
    bar = "*" * 100
    print(f"{bar}\nfastclip: {message}\n{bar}", file=sys.stderr)
    REPORT.write_text(message + "\n", encoding="utf-8")


def output_of(*command: str) -> str:
    """What a tool prints, on either stream."""
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


class Toolkit:
    """A CUDA toolkit, known by its compiler."""

    def __init__(self, nvcc: str) -> None:
        self.nvcc = nvcc
        # Where nvcc is a wrapper script, only nvcc itself knows its place.
        top = re.search(r"^#\$ TOP=(.*)$", output_of(nvcc, "--dryrun", "kernels.cu"), re.MULTILINE)
        self.root = Path(top.group(1) if top else Path(nvcc).resolve().parent.parent).resolve()
        version = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
        if version is None:
            raise RuntimeError(f"{nvcc} does not tell its version")
        self.version = (int(version[1]), int(version[2]))

    @classmethod
    def find(cls) -> "Toolkit | None":
        """By CUDA_HOME, on PATH, or from NVIDIA's packages beside torch."""
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
        places = [Path(home) / "bin" / "nvcc"] if home else []
        places += [Path(found)] if (found := shutil.which("nvcc")) else []
        places += sorted(packages.glob("cu*/bin/nvcc"), reverse=True)
        return next((cls(str(place)) for place in places if place.exists()), None)

    def runtime(self) -> Path:
        """The folder of the static runtime."""
        folders = ("lib64", "lib", "targets/*/lib", "lib/x64")
        found = [p for f in folders for p in self.root.glob(f"{f}/libcudart_static.a")]
        if not found:
            raise RuntimeError(f"no libcudart_static.a under {self.root}")
        return found[0].parent

    def architectures(self) -> list[str]:
        """The GPUs to build for: those that were named, or the usual ones that this compiler knows."""
        named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
        if named:
            return named
        known = output_of(self.nvcc, "--list-gpu-arch")
        return [a for a in ARCHITECTURES if f"compute_{digits(a)}\n" in known + "\n"]

    def compile(self, source: Path, target: Path) -> None:
        """One object that holds the kernels for all GPUs."""
        command = [self.nvcc, "-c", str(source), "-o", str(target), "-std=c++17", "-O3", "-fmad=false"]
        command += ["--threads", "0", "-Xfatbin=-compress-all", f"-Xcompiler={','.join(['-fPIC', *FLAGS])}"]
        for architecture in self.architectures():
            number = digits(architecture)
            command += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
            if architecture.endswith("+PTX"):
                command += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
        target.parent.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")

    def __str__(self) -> str:
        names = " ".join("sm_" + a.replace(".", "") for a in self.architectures())
        return f"CUDA {self.version[0]}.{self.version[1]} for {names}"


def digits(architecture: str) -> str:
    """90 of 9.0+PTX."""
    number = architecture.removesuffix("+PTX").replace(".", "")
    if not re.fullmatch(r"\d+[af]?", number):
        raise RuntimeError(f"TORCH_CUDA_ARCH_LIST: expected numbers such as 9.0, but got {architecture!r}")
    return number


def reach_installed_torch() -> None:
    """Let a build that pip isolates see the torch beside which the package is installed.

    pip's isolation hides what is installed but builds with the interpreter of the environment. It comes last,
    after what the build requires. (uv isolates in an environment of its own: there nothing is found.)
    """
    if importlib.util.find_spec("torch") is None:
        sys.path += [sysconfig.get_path(name) for name in ("purelib", "platlib")]


def reason_against() -> str | None:
    """Why nothing can be compiled here, or None if it can."""
    reach_installed_torch()
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return (
            f"torch cannot be imported by the build ({error}); install torch first. A tool that builds in an "
            "environment of its own, such as uv, needs --no-build-isolation"
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        return f"the native library needs torch >= 2.10, the build sees torch {torch.__version__}"
    compiler = cpp_extension.get_cxx_compiler()
    return None if shutil.which(compiler) else f"no C++ compiler: {compiler!r} is not on PATH"


def find_toolkit() -> Toolkit | str:
    """The toolkit for the CUDA kernels, or why they are not built."""
    import torch

    if MODE == "cpu":
        return "FASTCLIP_BUILD=cpu"
    if MODE == "auto" and torch.version.cuda is None:
        return "this torch has no CUDA"
    try:
        toolkit = Toolkit.find()
        if toolkit is not None:
            toolkit.runtime()  # raises where it is not there
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return str(error)
    if toolkit is None:
        return "no nvcc (`pip install torch-fastclip[nvcc]` brings one)"
    if toolkit.version < (12, 1):
        return f"nvcc 12.1 or later is needed, {toolkit.nvcc} is {'.'.join(map(str, toolkit.version))}"
    return toolkit


def sources_of(folder: str) -> list[str]:
    """The C++ files of a folder of csrc, as paths that setuptools takes."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).glob("*.cpp"))


def build_command(toolkit: Toolkit | str) -> type:
    """The command that compiles the libraries, the kernels first, and says how it ended."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class Build(BuildExtension):
        no_cuda: str | None = toolkit if isinstance(toolkit, str) else None

        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                if MODE != "auto":
                    raise
                say(f"pure Python only, the native library did not compile: {error} (FASTCLIP_BUILD=auto)")
                self.extensions: list = []
                return
            cuda = f"no CUDA kernels: {self.no_cuda}" if self.no_cuda else f"CUDA kernels by {toolkit}"
            say(f"native CPU library, built with torch {torch.__version__}; {cuda} (FASTCLIP_BUILD={MODE})")

        def build_extensions(self) -> None:
            kernels = Path(self.build_temp) / "kernels.o"
            if isinstance(toolkit, Toolkit):
                try:
                    toolkit.compile(ROOT / "csrc" / "cuda" / "launch.cu", kernels)
                except RuntimeError as error:
                    if MODE == "cuda":
                        raise
                    self.no_cuda = f"nvcc failed: {error}"
                    self.extensions = [e for e in self.extensions if e.name != CUDA]
            for extension in self.extensions:
                if extension.name == CUDA:
                    extension.extra_objects = [str(kernels)]
            if self.no_cuda is not None:
                (ROOT / "fastclip" / "libfastclip_cuda.so").unlink(missing_ok=True)
            super().build_extensions()

    return Build.with_options(no_python_abi_suffix=True)


def native_extensions(toolkit: Toolkit | str) -> list:
    """The CPU library and, with a toolkit, the CUDA library."""
    import torch
    from torch.utils.cpp_extension import CppExtension

    common = sources_of("common")
    flags = [*FLAGS, f"-ffile-prefix-map={Path(torch.__file__).parent}=torch"]
    flags.append("-DTORCH_TARGET_VERSION=0x020a000000000000")
    extensions = [
        CppExtension(
            CPU,
            ["csrc/schemas.cpp", *common, *sources_of("cpu")],
            py_limited_api=True,
            extra_compile_args=flags,
        )
    ]
    if not isinstance(toolkit, str):
        # libtorch.so brings what torch has for CUDA, and is not there when a CPU torch builds this.
        runtime = [f"-L{toolkit.runtime()}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        extension = CppExtension(
            CUDA,
            [*common, *sources_of("cuda")],
            py_limited_api=True,
            include_dirs=[str(ROOT / "csrc" / "cuda")],
            extra_compile_args=[*flags, "-DUSE_CUDA"],
            extra_link_args=[*runtime, "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch"],
        )
        extensions.append(extension)
    return extensions


def native_build() -> dict:
    """The arguments of setup() that compile the native libraries."""
    toolkit = find_toolkit()
    if MODE == "cuda" and isinstance(toolkit, str):
        sys.exit(f"FASTCLIP_BUILD=cuda: {toolkit}")
    return {
        "ext_modules": native_extensions(toolkit),
        "cmdclass": {
            "build_ext": build_command(toolkit),
            "build_py": BuildLast,
            "bdist_wheel": AnyPython,
        },
    }


class BuildLast(build_py):
    """Collects the package's files after the compilation, so that the report tells how it ended."""

    def run(self) -> None:
        self.run_command("build_ext")
        super().run()


class AnyPython(bdist_wheel):
    """A wheel for this platform and any Python 3: the libraries know torch, and nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def decide() -> dict:
    if MODE not in MODES:
        sys.exit(f"FASTCLIP_BUILD: expected one of {', '.join(MODES)}, but got {MODE!r}")
    if DESCRIBING & set(sys.argv) and not BUILDING & set(sys.argv):
        return {}  # metadata and sources are the same everywhere; what was built stays as it is
    reason = "FASTCLIP_BUILD=none" if MODE == "none" else reason_against()
    if reason is None:
        return native_build()
    if MODE in ("cpu", "cuda"):
        sys.exit(f"FASTCLIP_BUILD={MODE}: {reason}")
    for library in ROOT.glob("fastclip/*.so"):
        library.unlink()
    say(f"pure Python only, no native library: {reason}")
    return {}


setup(**decide())
