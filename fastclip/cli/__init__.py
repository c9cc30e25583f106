# SPDX-License-Identifier: BSD-3-Clause
"""The command line: `fastclip COMMAND`, or `python -m fastclip COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..monitor.sinks import LogError
from . import diagnose, doctor, recommend

_COMMANDS = (doctor, diagnose, recommend)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; without one, the doctor. Returns the exit status: 2 for what cannot be read."""
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
    except LogError as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return 2
