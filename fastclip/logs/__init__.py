# SPDX-License-Identifier: BSD-3-Clause
"""Logs of runs, written by fastclip or by other programs, read as the monitor's records."""

from __future__ import annotations

from .health import Verdict, verdict_of
from .reader import Run, read_run

__all__ = ["Run", "Verdict", "read_run", "verdict_of"]
