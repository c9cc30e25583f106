# SPDX-License-Identifier: BSD-3-Clause
"""On what a run was made, and of which commit: without this a figure says nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fastclip.bench import machine

_ROOT = Path(__file__).parent.parent


def commit() -> str:
    """The present commit, and whether the tree differs from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def describe() -> dict[str, str]:
    """What to print beside the figures, in order."""
    return {**machine.describe(), "commit": commit()}
