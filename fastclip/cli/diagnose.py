# SPDX-License-Identifier: BSD-3-Clause
"""Explain an event in a log: the data first, then learning rate and loss scale, then the model.

Exit status: 0 if there is no event, 1 if there is one, 2 if the log cannot be read.
"""

from __future__ import annotations

import argparse
import sys

from ..monitor import Event, diagnose
from ..monitor.diagnosis.diagnose import worst_event
from .log_argument import add_log, read_log_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log(parser)
    parser.add_argument("--step", type=int, help="explain the event of this step (default: the worst one)")
    parser.add_argument("--events", action="store_true", help="list all events first")


def run(options: argparse.Namespace) -> int:
    logged = read_log_argument(options.log)
    records = logged.records
    events = sorted((e for its in records.values() for r in its for e in r.events), key=lambda e: e.step)
    if options.events:
        for event in events:
            print(f"rank {event.rank}: {event}")
        print()
    chosen: Event | None = None
    if options.step is not None:
        chosen = worst_event([e for e in events if e.step == options.step], least="info")
        if chosen is None:
            steps = sorted({e.step for e in events})
            shown = ", ".join(map(str, steps[:20])) + (", ..." if len(steps) > 20 else "")
            print(f"fastclip: {options.log} has no event in step {options.step}", file=sys.stderr)
            print(f"fastclip: steps with events: {shown or 'none'}", file=sys.stderr)
            return 2
    diagnosis = diagnose(records, chosen)
    print(diagnosis)
    if logged.inferred and diagnosis.event is not None:
        print(f"The log ({logged.source}) has no information on batches, parameters or modules.")
    return 0 if diagnosis.event is None else 1
