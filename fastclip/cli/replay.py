# SPDX-License-Identifier: BSD-3-Clause
"""Replay the step of an incident and look for the sample or setting that causes it.

The function is called without arguments and returns (model, optimizer, loss_function), or an object with
these attributes and optionally scheduler and scaler; see fastclip.replay. Modules of the working directory
can be imported.

Exit status: 0 if the step is reproduced, 1 if not, 2 if it cannot be run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..replay.replay import ReplayError, replay
from .building import function_named, importable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("incident", help="directory of the incident, or of one rank in it")
    parser.add_argument(
        "build", metavar="MODULE:FUNCTION", help="function that builds the model, such as train:build"
    )
    parser.add_argument("--rank", type=int, help="replay the batches of this rank only (default: all ranks)")
    parser.add_argument(
        "--steps",
        nargs="?",
        const="all",
        choices=["1", "all"],
        default="1",
        help="1, or all for all steps from the snapshot on too",
    )
    parser.add_argument("--json", metavar="FILE", help="write the result to this file")
    parser.add_argument("--no-variants", action="store_true", help="do not look for the cause")


def run(options: argparse.Namespace) -> int:
    try:
        with importable(os.getcwd()), _progress() as progress:
            result = replay(
                options.incident,
                function_named(options.build),
                rank=options.rank,
                steps="all" if options.steps == "all" else 1,
                variants=not options.no_variants,
                progress=progress,
            )
        print(result)
        if options.json is not None:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(result.to_dict(), file, indent=1, allow_nan=False)
                file.write("\n")
    except (ReplayError, OSError) as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return 2
    return 0 if result.reproduced else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], None] | None]:
    """Show a progress bar on a terminal, if tqdm is installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield None
        return
    with tqdm(unit=" runs", leave=False) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        yield advance
