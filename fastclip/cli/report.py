# SPDX-License-Identifier: BSD-3-Clause
"""Write a log as one HTML page: charts, events with their likely causes, and a recommended max_norm.

The page is self-contained: it needs no network and no other file. An existing file is replaced.

Exit status: 0, or 2 if the log cannot be read or the page cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..logs import read_run
from ..report import write_report
from .log_argument import LOG_HELP


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", help=LOG_HELP)
    parser.add_argument(
        "-o", "--output", default="report.html", help="the file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--incidents", metavar="DIR", help="the run's incidents (default: those in the log's directory)"
    )


def run(options: argparse.Namespace) -> int:
    logged = read_run(options.log)
    for warning in logged.warnings:
        print(f"fastclip: {warning}", file=sys.stderr)
    try:
        path = write_report(logged, options.output, log=options.log, incidents=options.incidents)
    except OSError as error:
        print(f"fastclip: {options.output}: {error.strerror or error}", file=sys.stderr)
        return 2
    size = f"{Path(path).stat().st_size / 2**20:.1f} MiB"
    print(f"{path}: {size}")
    return 0
