# SPDX-License-Identifier: BSD-3-Clause
"""Write a log as one page of HTML: charts, events with what they come from, and a recommended max_norm.

The page needs nothing else: no network, no other file. A file that is there is replaced.

Exit status: 0, or 2 if the log cannot be read or the page cannot be written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..logs import read_run
from ..report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "log", help="log of a monitor, of Transformers, TensorBoard or a CSV file: see fastclip lint"
    )
    parser.add_argument(
        "-o", "--output", default="report.html", help="the file to write (default: %(default)s here)"
    )
    parser.add_argument("--incidents", metavar="DIR", help="the run's incidents (default: those in the log)")


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
