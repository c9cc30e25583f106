# SPDX-License-Identifier: BSD-3-Clause
"""The build: decide what to compile, report what and why; the rest is in pyproject.toml.

FASTCLIP_BUILD selects what is compiled. "auto" compiles what this machine supports and reports what it cannot
and why; "cpu" compiles the CPU library or fails; "cuda" compiles both libraries or fails, even if torch was
built without CUDA; "none" makes the pure Python package. TORCH_CUDA_ARCH_LIST selects other GPUs, such as
"9.0;10.0+PTX".
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


def report_outcome(message: str) -> None:
    """Print what was built and why, and save it for `fastclip doctor`."""
    bar = "*" * 100
    print(f"{bar}\nfastclip: {message}\n{bar}", file=sys.stderr)
    REPORT.write_text(message + "\n", encoding="utf-8")


def output_of(*command: str) -> str:
    """Run a tool and return what it prints on both streams."""
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


class Toolkit:
    """A CUDA toolkit, located by its compiler."""

    def __init__(self, nvcc: str) -> None:
        self.nvcc = nvcc
        # nvcc may be a wrapper script; the real nvcc prints its root directory.
        top = re.search(r"^#\$ TOP=(.*)$", output_of(nvcc, "--dryrun", "kernels.cu"), re.MULTILINE)
        self.root = Path(top.group(1) if top else Path(nvcc).resolve().parent.parent).resolve()
        version = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
        if version is None:
            raise RuntimeError(f"the version of {nvcc} is unknown: --version prints no release")
        self.version = (int(version[1]), int(version[2]))

    @classmethod
    def find(cls) -> "Toolkit | None":
        """Find a toolkit in CUDA_HOME, on PATH, or among NVIDIA's packages installed with torch."""
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
        places = [Path(home) / "bin" / "nvcc"] if home else []
        places += [Path(found)] if (found := shutil.which("nvcc")) else []
        places += sorted(packages.glob("cu*/bin/nvcc"), reverse=True)
        return next((cls(str(place)) for place in places if place.exists()), None)

    def runtime(self) -> Path:
        """Return the folder of the static runtime; raise RuntimeError if there is none."""
        folders = ("lib64", "lib", "targets/*/lib", "lib/x64")
        found = [p for f in folders for p in self.root.glob(f"{f}/libcudart_static.a")]
        if not found:
            raise RuntimeError(f"no libcudart_static.a under {self.root}")
        return found[0].parent

    def architectures(self) -> list[str]:
        """Return the GPUs to build for: TORCH_CUDA_ARCH_LIST, or the defaults that this compiler supports."""
        named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
        if named:
            return named
        known = output_of(self.nvcc, "--list-gpu-arch")
        return [a for a in ARCHITECTURES if f"compute_{digits(a)}\n" in known + "\n"]

    def compile(self, source: Path, target: Path) -> None:
        """Compile the kernels for all GPUs into one object file."""
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
    """Return the digits of an architecture, such as 90 for 9.0+PTX."""
    number = architecture.removesuffix("+PTX").replace(".", "")
    if not re.fullmatch(r"\d+[af]?", number):
        raise RuntimeError(f"TORCH_CUDA_ARCH_LIST: expected numbers such as 9.0, but got {architecture!r}")
    return number


def reach_installed_torch() -> None:
    """Make the installed torch importable in a build that pip isolates.

    pip's isolation hides the installed packages but runs the environment's interpreter, so that their folders
    are known. They are searched last, after the build's requirements. uv isolates in an environment of its
    own, where torch cannot be found.
    """
    if importlib.util.find_spec("torch") is None:
        sys.path += [sysconfig.get_path(name) for name in ("purelib", "platlib")]


def reason_not_to_compile() -> str | None:
    """Return why nothing can be compiled here; None if it can."""
    reach_installed_torch()
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return (
            f"torch cannot be imported by the build ({error}). Install torch first; a tool that builds in a "
            "separate environment, such as uv, also needs --no-build-isolation"
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        return f"the native library needs torch >= 2.10, but the build uses torch {torch.__version__}"
    compiler = cpp_extension.get_cxx_compiler()
    return None if shutil.which(compiler) else f"no C++ compiler: {compiler!r} is not on PATH"


def find_toolkit() -> Toolkit | str:
    """Return the toolkit for the CUDA kernels, or why they are not built."""
    import torch

    if MODE == "cpu":
        return "FASTCLIP_BUILD=cpu"
    if MODE == "auto" and torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        toolkit = Toolkit.find()
        if toolkit is not None:
            toolkit.runtime()  # raises if it is missing
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return str(error)
    if toolkit is None:
        return "no nvcc (`pip install torch-fastclip[nvcc]` installs one)"
    if toolkit.version < (12, 1):
        found = ".".join(map(str, toolkit.version))
        return f"nvcc 12.1 or later is required, but {toolkit.nvcc} is {found}"
    return toolkit


def sources_of(folder: str) -> list[str]:
    """Return the C++ files of a folder of csrc, relative to the root as setuptools requires."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc" / folder).glob("*.cpp"))


def build_command(toolkit: Toolkit | str) -> type:
    """Return the command that compiles the kernels, then the libraries, and reports the outcome."""
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
                report_outcome(
                    f"pure Python only, the native library did not compile: {error} (FASTCLIP_BUILD=auto)"
                )
                self.extensions: list = []
                return
            cuda = f"CUDA kernels built with {toolkit}"
            if self.no_cuda:
                cuda = f"no CUDA kernels: {self.no_cuda}"
            report_outcome(
                f"native CPU library built with torch {torch.__version__}; {cuda} (FASTCLIP_BUILD={MODE})"
            )

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
    """Return the extensions: the CPU library and, with a toolkit, the CUDA library."""
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
        # libtorch.so loads torch's CUDA libraries. They cannot be linked directly, as a CPU build of torch,
        # which may compile this, does not have them.
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
    """Return the arguments of setup() that compile the native libraries."""
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
    """Collect the package's files after compiling, so that the build report is among them."""

    def run(self) -> None:
        self.run_command("build_ext")
        super().run()


class AnyPython(bdist_wheel):
    """A wheel for this platform and any Python 3: the libraries use torch's API, not Python's."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def setup_arguments() -> dict:
    """Decide what to compile and return the arguments of setup()."""
    if MODE not in MODES:
        sys.exit(f"FASTCLIP_BUILD: expected one of {', '.join(MODES)}, but got {MODE!r}")
    if DESCRIBING & set(sys.argv) and not BUILDING & set(sys.argv):
        return {}  # metadata and sources do not depend on the build; keep what was built
    reason = "FASTCLIP_BUILD=none" if MODE == "none" else reason_not_to_compile()
    if reason is None:
        return native_build()
    if MODE in ("cpu", "cuda"):
        sys.exit(f"FASTCLIP_BUILD={MODE}: {reason}")
    for library in ROOT.glob("fastclip/*.so"):
        library.unlink()
    report_outcome(f"pure Python only, no native library: {reason}")
    return {}


setup(**setup_arguments())
