# SPDX-License-Identifier: BSD-3-Clause
"""Report what is installed, what was built, and which backend serves which device and why."""

from __future__ import annotations

import argparse
import os
import platform
import sys

import torch

from .. import __version__, backends
from ..backends import libraries, native

_VARIABLES = ("FASTCLIP_BACKEND", "FASTCLIP_CPU_CAPABILITY")


def _devices() -> list[str]:
    # Before torch 2.7 current_accelerator() raises if there is none.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _backends_of(device: str) -> list[str]:
    """Return the lines of status(), or why it failed: the doctor must survive what it diagnoses."""
    try:
        lines = [f"{name:10} {state}" for name, state in backends.status(device).items()]
        if device == "cpu" and native.unavailable(torch.device("cpu")) is None:
            lines.append(f"native runs on {native.cpu_capability()}")
        return lines
    except (ValueError, RuntimeError) as error:
        return [f"problem    {error}"]


def report() -> str:
    """Return the report, one fact a line."""
    lines = [
        f"fastclip  {__version__} at {libraries.CPU_LIBRARY.parent}",
        f"torch     {torch.__version__}, {torch.get_num_threads()} threads",
        f"python    {sys.version.split()[0]} on {platform.system()} {platform.machine()}",
        f"build     {libraries.build_report()}",
    ]
    if (reason := libraries.reason_without_cuda()) is None:
        lines.append("cuda      the kernels are loaded")
    elif torch.version.cuda is not None or libraries.CUDA_LIBRARY.exists():
        lines.append(f"cuda      the kernels are not loaded: {reason}")
    lines += [f"set       {name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    for device in _devices():
        lines.append(f"\n{device}")
        lines += [f"  {line}" for line in _backends_of(device)]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the command takes no arguments."""


def run(options: argparse.Namespace) -> int:
    print(report())
    return 0
