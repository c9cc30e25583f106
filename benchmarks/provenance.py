# SPDX-License-Identifier: BSD-3-Clause
"""The machine, the software and the commit of a run, printed beside its figures."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fastclip.bench import machine

ROOT = Path(__file__).parent.parent


def commit() -> str:
    """Return the current commit, marked if the tree differs from it; "unknown" outside a git checkout."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def describe() -> dict[str, str]:
    """Return what to print beside the figures, in order."""
    return {**machine.describe(), "commit": commit()}
