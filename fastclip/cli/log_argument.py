# SPDX-License-Identifier: BSD-3-Clause
"""The argument LOG of the commands that read a run's log."""

from __future__ import annotations

import argparse
import sys

from ..logs import Run, read_run
from ..monitor.sinks import LogError

LOG_HELP = "file or directory: fastclip's log, trainer_state.json, TensorBoard event files, CSV, JSON lines"


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument `log`."""
    parser.add_argument("log", help=LOG_HELP)


def read_log_argument(path: str) -> Run:
    """Read a run's log, and print its warnings to standard error.

    Raises:
        LogError: the log cannot be read; the message names file, line and reason.
    """
    try:
        run = read_run(path)
    except ImportError as error:
        raise LogError(f"{path}: {error}") from None
    for warning in run.warnings:
        print(f"fastclip: {warning}", file=sys.stderr)
    if not any(run.records.values()):
        print(f"fastclip: {path}: no step has been logged yet", file=sys.stderr)
    return run
