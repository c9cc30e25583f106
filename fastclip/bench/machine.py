# SPDX-License-Identifier: BSD-3-Clause
"""The machine and the software of a run, printed beside its figures."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

from .. import __version__, backends
from ..backends import native
from .workloads import CPU

# A higher load average means that other processes were running.
_IDLE_LOAD = 0.5


def _fields(path: str) -> dict[str, str]:
    """Return the first value of each key of a "key: value" file under /proc; empty if there is no file."""
    if not (file := Path(path)).exists():
        return {}
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def available_memory(device: torch.device = CPU) -> int:
    """Return the bytes available without swapping; if the system does not report them, a huge number."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    value = _fields("/proc/meminfo").get("MemAvailable") if device.type == "cpu" else None
    return int(value.split()[0]) * 1024 if value else 1 << 62


def status_bytes(key: str) -> int | None:
    """Return VmRSS, VmHWM or the like of this process in bytes; None without /proc."""
    value = _fields("/proc/self/status").get(key)
    return int(value.split()[0]) * 1024 if value else None


def load() -> float | None:
    """Return the load average of the last minute; None if the system does not report it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def is_busy() -> bool:
    """Return whether other processes ran during the last minute; call it before measuring."""
    return (load() or 0.0) > _IDLE_LOAD


def describe(device: torch.device = CPU) -> dict[str, str]:
    """Return what to print beside the figures, in order."""
    states = backends.status(device).items()
    backend = next((name for name, state in states if state == "in use"), "no backend")
    gpu = {"cuda": torch.cuda.get_device_name}.get(device.type, str)
    native_cpu = backend == "native" and device.type == "cpu"
    capability = f" ({native.cpu_capability()})" if native_cpu else ""
    return {
        "cpu": _fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine(),
        **({} if device.type == "cpu" else {"device": gpu(device)}),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load before": "unknown" if (before := load()) is None else f"{before:.1f}",
        "memory available": f"{available_memory(device) / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
        "fastclip": f"{__version__}, {backend}{capability}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
