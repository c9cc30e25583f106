# SPDX-License-Identifier: BSD-3-Clause
"""Check whether logged runs went well: healthy, warnings, or exploded.

Events are those that the monitor reported; in logs of other programs they are inferred from loss, gradient
norm, limit and loss scale.

Exit status: 0 if all runs are healthy, 1 if one has warnings, 2 if one has exploded (its loss rose and did
not come back, or it has an event of severity "error", unless its step was skipped and the run went on), 3 if
one cannot be read or has no step. The highest status counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..logs import verdict_of
from ..logs.health import NO_STEPS
from ..monitor.sinks import LogError
from .log_argument import LOG_HELP, read_log_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", metavar="LOG", nargs="+", help=LOG_HELP)
    parser.add_argument("--json", action="store_true", help="print a JSON array with an object for each log")


def run(options: argparse.Namespace) -> int:
    results = [_check(log, quiet=options.json) for log in options.logs]
    if options.json:
        print(json.dumps(results, indent=1, allow_nan=False))
    return max(result["status"] for result in results)


def _check(log: str, quiet: bool) -> dict[str, Any]:
    try:
        logged = read_log_argument(log)
    except LogError as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return {"log": log, "verdict": "unreadable", "status": NO_STEPS, "error": str(error)}
    verdict = verdict_of(logged)
    if not quiet:
        steps = f": {verdict.steps} steps, {verdict.first_step} to {verdict.last_step}"
        print(f"{log}: {verdict.name}{steps if verdict.steps else ''} ({logged.source})")
        for line in verdict.lines():
            print(f"  {line}")
    return {"log": log, "source": logged.source, "warnings": logged.warnings, **verdict.to_dict()}
