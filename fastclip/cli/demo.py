# SPDX-License-Identifier: BSD-3-Clause
"""Train a small language model with torch's clipping and with fastclip's, then catch a poisoned batch.

The text comes from the standard library (pydoc_data.topics). The demo runs on the CPU and takes about a
minute on two cores, with --quick seconds. It needs the extra "demo". With a directory, the monitor saves its
log and the poisoned step there for the other commands.

Exit status: 0, 1 if the two trainings differ by more than rounding or if fastclip does not name exactly the
gradients that hold NaN, 2 if it cannot start.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

import torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", nargs="?", help="a new or empty directory for the monitor's log (default: none)"
    )
    parser.add_argument("--quick", action="store_true", help="use a smaller model and fewer steps")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and batches (default: 0)")
    parser.add_argument("--threads", type=_count, metavar="N", help="CPU threads (default: torch's choice)")


def run(options: argparse.Namespace) -> int:
    try:
        from ..demo.program import demonstrate

        if options.directory is not None:
            _make_empty(Path(options.directory))
    except (ImportError, OSError) as error:
        print(f"fastclip: {error}", file=sys.stderr)
        return 2
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # For a pipe, Python may choose an encoding without the chart's characters, and it buffers lines.
        sys.stdout.reconfigure(errors="replace", line_buffering=True)
    return 1 if demonstrate(options.quick, options.seed, options.directory) else 0


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, but got {count}")
    return count


def _make_empty(directory: Path) -> None:
    """Create the directory; raise OSError if it is not empty, since an old log would be continued."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"expected a new or empty directory, but got {directory}")
    directory.mkdir(parents=True, exist_ok=True)
