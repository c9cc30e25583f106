# SPDX-License-Identifier: BSD-3-Clause
"""The options of fastclip.Monitor that a trainer's callback passes on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from ..monitor import Monitor

# Arguments of the Monitor that a callback takes from the Trainer.
FROM_THE_TRAINER = ("model", "optimizer", "scheduler", "scaler")


def require_monitor_options(options: Iterable[str], further: Iterable[str] = ()) -> None:
    """Raise TypeError for a keyword argument that is not an option, or that the Trainer provides.

    Args:
        options: names of the keyword arguments that a callback was given.
        further: names of the callback's own arguments, for the message.
    """
    known = set(inspect.signature(Monitor).parameters) - set(FROM_THE_TRAINER)
    for name in sorted(set(options) - known):
        reason = (
            "the Trainer provides it"
            if name in FROM_THE_TRAINER
            else f"expected one of {', '.join(sorted(known.union(further)))}"
        )
        raise TypeError(f"FastclipCallback got an unexpected argument {name!r}: {reason}")
