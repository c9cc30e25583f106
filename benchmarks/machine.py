# SPDX-License-Identifier: BSD-3-Clause
"""On what a run was made: without this a figure says nothing."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch

import fastclip
from fastclip.backends import native

_ROOT = Path(__file__).parent.parent


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


def available_memory() -> int:
    """Bytes that can be had without swapping; where the system does not tell, enough for anything."""
    value = _fields("/proc/meminfo").get("MemAvailable")
    return int(value.split()[0]) * 1024 if value else 1 << 62


def status_bytes(key: str) -> int | None:
    """VmRSS, VmHWM and so on of this process; None where there is no /proc."""
    value = _fields("/proc/self/status").get(key)
    return int(value.split()[0]) * 1024 if value else None


def commit() -> str:
    """The present commit, and whether the tree differs from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def load() -> float | None:
    """Processes that ran or wanted to, averaged over the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def describe() -> dict[str, str]:
    """What to print beside the figures, in order."""
    backend = next(name for name, status in fastclip.backends.status().items() if status == "in use")
    capability = f" ({native.cpu_capability()})" if backend == "native" else ""
    return {
        "cpu": _fields("/proc/cpuinfo").get("model name") or platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load before": "unknown" if (before := load()) is None else f"{before:.1f}",
        "memory available": f"{available_memory() / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": f"{torch.__version__} ({torch.backends.cpu.get_cpu_capability()})",
        "fastclip": f"{fastclip.__version__}, {backend}{capability}",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
