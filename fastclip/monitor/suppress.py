# SPDX-License-Identifier: BSD-3-Clause
"""What keeps a defect of the monitor out of the training."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

_told: set[str] = set()


def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result; None, and a warning for the first time, if it raises an Exception.

    The training does not depend on what is measured of it, so it goes on without. A person's own functions
    must not be called through this, nor collectives, which other processes wait for.
    """
    try:
        return function(*arguments)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        name = getattr(function, "__qualname__", type(function).__qualname__)
        if name not in _told:
            _told.add(name)
            warnings.warn(
                f"fastclip.Monitor: {name} failed with {type(error).__name__}: {error} (in {place.name}, "
                f"line {place.lineno} of {place.filename}). The training goes on, records lack what it "
                "measures; this is told once. Please report it",
                stacklevel=2,
            )
        return None
