# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `fastclip COMMAND`, or `python -m fastclip COMMAND`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..monitor.incidents.incident import IncidentError
from ..monitor.sinks import LogError
from . import bench, demo, diagnose, doctor, incidents, lint, recommend, replay, report, show

_COMMANDS = (doctor, demo, bench, lint, diagnose, recommend, report, incidents, show, replay)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default the doctor, and return its exit status: 2 if something cannot be read."""
    parser = argparse.ArgumentParser(
        prog="fastclip", description="Gradient clipping and training stability for PyTorch."
    )
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in _COMMANDS:
        text = (command.__doc__ or "").strip()
        name = command.__name__.rpartition(".")[2]
        one = commands.add_parser(name, help=text.splitlines()[0], description=text)
        command.add_arguments(one)
        one.set_defaults(run=command.run)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) if "run" in options else doctor.run(options)
    except (LogError, IncidentError) as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # as in `fastclip show ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
