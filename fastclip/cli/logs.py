# SPDX-License-Identifier: BSD-3-Clause
"""Logged runs, for the commands that read them."""

from __future__ import annotations

import argparse
import sys

from ..logs import Run, read_run
from ..monitor import Record
from ..monitor.sinks import LogError

LOG_HELP = "file or directory: fastclip's log, trainer_state.json, TensorBoard event files, CSV, JSON lines"


def add_log(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help=LOG_HELP)


def records_of(path: str) -> dict[int, list[Record]]:
    """By rank, in the order of the steps. What was wrong but could be passed over is told on stderr.

    Raises:
        LogError: which file cannot be read, in which line, and why.
    """
    return run_of(path).records


def run_of(path: str) -> Run:
    """As :func:`records_of`, with what else is known of the run."""
    try:
        run = read_run(path)
    except ImportError as error:
        raise LogError(f"{path}: {error}") from None
    for warning in run.warnings:
        print(f"fastclip: {warning}", file=sys.stderr)
    if not any(run.records.values()):
        print(f"fastclip: {path}: no step has been logged yet", file=sys.stderr)
    return run
