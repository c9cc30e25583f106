# SPDX-License-Identifier: BSD-3-Clause
"""Propose a max_norm from the gradient norms of a log.

Exit status: 0 with a proposal, 1 if there are too few steps, 2 if the log cannot be read.
"""

from __future__ import annotations

import argparse

from ..monitor import recommend
from .log_argument import add_log, read_log_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_log(parser)


def run(options: argparse.Namespace) -> int:
    records = read_log_argument(options.log).records
    # Norms are global, so every rank has the same.
    proposal = recommend(records[min(records)])
    print(proposal)
    return 1 if proposal.max_norm is None else 0
