# SPDX-License-Identifier: BSD-3-Clause
"""Tell whether logged runs went well: healthy, warnings, or exploded.

Events are those that the monitor told; in logs of others they are found afterwards in loss, gradient norm,
limit and loss scale.

Exit status: 0 if all are healthy, 1 if one has warnings, 2 if one has exploded (a loss that rose and did not
come back, any event of severity "error", unless its step was left out and the run went on), 3 if one cannot
be read or holds no step. Of several the highest counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..logs import verdict_of
from ..logs.health import EMPTY
from ..monitor.sinks import LogError
from .logs import LOG_HELP, run_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", metavar="LOG", nargs="+", help=LOG_HELP)
    parser.add_argument("--json", action="store_true", help="print a JSON array instead, an object a log")


def run(options: argparse.Namespace) -> int:
    results = [_linted(log, quiet=options.json) for log in options.logs]
    if options.json:
        print(json.dumps(results, indent=1, allow_nan=False))
    return max(result["status"] for result in results)


def _linted(log: str, quiet: bool) -> dict[str, Any]:
    try:
        its = run_of(log)
    except LogError as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return {"log": log, "verdict": "unreadable", "status": EMPTY, "error": str(error)}
    verdict = verdict_of(its)
    if not quiet:
        steps = f": {verdict.steps} steps, {verdict.first_step} to {verdict.last_step}"
        print(f"{log}: {verdict.name}{steps if verdict.steps else ''} ({its.source})")
        for line in verdict.lines():
            print(f"  {line}")
    return {"log": log, "source": its.source, "warnings": its.warnings, **verdict.to_dict()}
