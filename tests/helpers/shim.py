# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA kernels on a CPU: csrc/cuda compiled by g++ against the headers of tests/backends/cuda_shim.

The library defines the ops a second time, as torch.ops.fastclip_shim, from the sources of the CUDA library
except the header that gets the stream from torch. Metadata, launches, kernels and the last block's work are
executed, with every thread of a block as a fiber.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock  # a dependency of torch

from fastclip.backends import libraries, native

ROOT = Path(__file__).parents[2]
HEADERS = ROOT / "tests" / "backends" / "cuda_shim"
SOURCES = [
    ROOT / "csrc" / "schemas.cpp",
    *sorted((ROOT / "csrc" / "common").glob("*.cpp")),
    *sorted((ROOT / "csrc" / "cuda").glob("*.cpp")),
    ROOT / "csrc" / "cuda" / "launch.cu",
    HEADERS / "fibers.cpp",
    HEADERS / "configure.cpp",
]
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-Wall"]


def reason_against() -> str | None:
    """Return why the kernels cannot be run on this CPU, or None if they can."""
    if libraries.torch_version() < libraries.OLDEST_TORCH:
        return f"torch {torch.__version__} has no stable ABI that the sources could use"
    if not shutil.which(COMPILER):
        return f"no C++ compiler: {COMPILER!r} is not on PATH"
    return None


def call(*command: object) -> None:
    """Run a command; raise RuntimeError with its error output if it fails."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stderr[-6000:]}")


@functools.cache
def library() -> Path:
    """Return the library, built unless build/ has one from the same sources, torch and compiler."""
    include = Path(torch.__file__).parent / "include"
    flags = [*FLAGS, f"-I{HEADERS}", f"-I{ROOT / 'csrc' / 'cuda'}", "-isystem", str(include)]
    flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DFASTCLIP_NAMESPACE=fastclip_shim"]
    read = [p for folder in (ROOT / "csrc", HEADERS) for p in sorted(folder.rglob("*.*"))]
    text = b"".join(p.read_bytes() for p in read) + repr((torch.__version__, COMPILER, flags)).encode()
    target = ROOT / "build" / "cuda_shim" / hashlib.sha256(text).hexdigest()[:16] / "libfastclip_shim.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    # The processes of one test run share the library: the first one builds it, the others wait.
    with FileLock(target.with_suffix(".lock")):
        if not target.exists():
            _build(target, flags, include)
    return target


def _build(target: Path, flags: list[str], include: Path) -> None:
    objects = [target.parent / f"{source.name}.o" for source in SOURCES]

    def compile_one(source: Path, out: Path) -> None:
        call(COMPILER, *flags, "-x", "c++", "-c", source, "-o", out)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, SOURCES, objects))
    linked = target.with_suffix(".linked")
    torch_libraries = f"-L{include.parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"
    call(COMPILER, "-shared", *objects, "-o", linked, "-Wl,--no-as-needed", *torch_libraries)
    linked.rename(target)


@functools.cache
def backend() -> ModuleType:
    """Return a copy of the native backend that calls the ops of the shim, for tensors on the CPU."""
    torch.ops.load_library(library())
    spec = importlib.util.spec_from_file_location("fastclip.backends.native_on_shim", native.__file__)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ops = torch.ops.fastclip_shim
    module.unavailable = lambda device: None if device.type == "cpu" else "the shim runs on the CPU"
    return module


def configure(blocks: int = 3, seed: int = 0) -> None:
    """Set the largest grid, and the seed of the order of blocks and threads; 0 is their natural order."""
    ctypes.CDLL(str(library())).fastclip_shim_configure(blocks, ctypes.c_uint(seed))
