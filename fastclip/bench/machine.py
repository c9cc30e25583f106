# SPDX-License-Identifier: BSD-3-Clause
"""On what a run was made: without this a figure says nothing."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

from .. import __version__, backends
from ..backends import native
from .workloads import CPU

# Above this load other processes have run.
_QUIET_LOAD = 0.5


def _fields(path: str) -> dict[str, str]:
    """The first value of each key of a file of "key: value" lines under /proc; empty where there is none."""
    if not (file := Path(path)).exists():
        return {}
    found: dict[str, str] = {}
    for line in file.read_text().splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def available_memory(device: torch.device = CPU) -> int:
    """Bytes that can be had without swapping; where the system does not tell, enough for anything."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    value = _fields("/proc/meminfo").get("MemAvailable") if device.type == "cpu" else None
    return int(value.split()[0]) * 1024 if value else 1 << 62


def status_bytes(key: str) -> int | None:
    """VmRSS, VmHWM and so on of this process; None where there is no /proc."""
    value = _fields("/proc/self/status").get(key)
    return int(value.split()[0]) * 1024 if value else None


def load() -> float | None:
    """Processes that ran or wanted to, averaged over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def is_busy() -> bool:
    """Whether other processes have run in the last minute: call it before anything is measured."""
    return (load() or 0.0) > _QUIET_LOAD


def describe(device: torch.device = CPU) -> dict[str, str]:
    """What to print beside the figures, in order."""
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
