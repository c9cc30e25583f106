# SPDX-License-Identifier: BSD-3-Clause
"""The compiled libraries: whether each is available, why it is not, and how it is loaded.

The CPU library holds the schemas of all ops and their CPU implementations. The CUDA library holds only
implementations and is not loaded where it cannot run.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import torch

OLDEST_TORCH = (2, 10)
CPU_LIBRARY = Path(__file__).parent.parent / "libfastclip_cpu.so"
CUDA_LIBRARY = CPU_LIBRARY.with_name("libfastclip_cuda.so")

# Written by setup.py: what it compiled, what it did not compile, and why.
BUILD_REPORT = CPU_LIBRARY.with_name("_build_report.txt")

# Kernel parameters of more than 4 KB need CUDA 12.1, that is driver R530. A CUDA runtime runs on every driver
# for the same or a later major version.
_OLDEST_DRIVER = (12, 1)


def torch_version() -> tuple[int, int]:
    """Return the major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def build_report() -> str:
    """Return the line that setup.py wrote about what it compiled."""
    if not BUILD_REPORT.exists():
        return "no build report: the package was not installed by its setup.py"
    return BUILD_REPORT.read_text(encoding="utf-8").strip()


def reason_without_cpu() -> str | None:
    """Return why the CPU library cannot be used, or None if it can."""
    if torch_version() < OLDEST_TORCH:
        return f"the library needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, this is {torch.__version__}"
    if not CPU_LIBRARY.exists():
        return f"the library was not built ({build_report()})"
    return None


def _driver_version() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports, or (0, 0) without a driver.

    Creates no context on a GPU.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return 0, 0
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _needed_driver() -> tuple[int, int]:
    """Return the CUDA version that the driver must support for the library that was built."""
    built = re.search(r"by CUDA (\d+)\.\d+", build_report())
    return max(_OLDEST_DRIVER, (int(built[1]), 0)) if built else _OLDEST_DRIVER


def reason_without_cuda() -> str | None:
    """Return why the CUDA library cannot be used, or None if it can."""
    if (reason := reason_without_cpu()) is not None:
        return reason
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not CUDA_LIBRARY.exists():
        return f"the CUDA library was not built ({build_report()})"
    driver, needed = _driver_version(), _needed_driver()
    if driver == (0, 0):
        return "no CUDA driver"
    if driver < needed:
        return (
            f"the CUDA driver supports CUDA {driver[0]}.{driver[1]}, "
            f"the library needs one for CUDA {needed[0]}.{needed[1]} or later"
        )
    return None


def reason_against_gpu(capability: tuple[int, int]) -> str | None:
    """Return why a GPU of this compute capability cannot run the kernels, or None if it can.

    Machine code runs on GPUs of its major version and the same or a higher minor version, PTX on all later
    GPUs.
    """
    built = re.findall(r"sm_(\d+)(\d)[af]?(\+PTX)?", build_report())
    for major, minor, ptx in built:
        version = int(major), int(minor)
        if version <= capability and (ptx or version[0] == capability[0]):
            return None
    names = ", ".join(f"{major}.{minor}{ptx}" for major, minor, ptx in built)
    return (
        f"the GPU has compute capability {capability[0]}.{capability[1]}, the kernels were built for {names}"
    )


def missing_on(device: torch.device) -> str | None:
    """Return why the library for this device is missing, or None if it is there or not expected."""
    if torch_version() < OLDEST_TORCH or "FASTCLIP_BUILD=none" in build_report():
        return None
    if device.type == "cpu":
        return reason_without_cpu()
    if device.type == "cuda" and torch.version.cuda is not None:
        return reason_without_cuda()
    return None


def _already_defined() -> bool:
    return bool(torch._C._jit_get_schemas_for_operator("fastclip::clip_"))


def load() -> bool:
    """Load the libraries once and return whether this call defined the ops.

    Raises:
        ImportError: another copy of the library has already defined the ops; torch would abort the process.
    """
    if reason_without_cpu() is not None or str(CPU_LIBRARY) in torch.ops.loaded_libraries:
        return False
    if _already_defined():
        others = [p for p in torch.ops.loaded_libraries if Path(p).name == CPU_LIBRARY.name]
        raise ImportError(
            f"expected to load {CPU_LIBRARY}, but its ops are already defined by "
            f"{', '.join(others) or 'another library'}; a process can use only one copy of fastclip"
        )
    torch.ops.load_library(CPU_LIBRARY)
    if reason_without_cuda() is None:
        torch.ops.load_library(CUDA_LIBRARY)
    return True
