# SPDX-License-Identifier: BSD-3-Clause
"""Keeping defects of the monitor out of the training."""

from __future__ import annotations

import traceback
import warnings
from types import TracebackType

_warned: set[str] = set()


class suppress_errors:
    """Turn an Exception of a ``with`` block into a warning, the first time for each task.

    The training does not depend on what is measured, so it continues without it. A user's own functions must
    not be called in such a block, nor collectives, which other processes wait for.

    Args:
        task: what the block does, in the imperative, such as "measure the batch".
    """

    __slots__ = ("_task",)

    def __init__(self, task: str) -> None:
        self._task = task

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is None or not isinstance(error, Exception):
            return False
        warn_once(self._task, error)
        return True


def warn_once(task: str, error: Exception) -> None:
    """Warn of a defect of the monitor, the first time for each task."""
    if task in _warned:
        return
    _warned.add(task)
    place, kind = traceback.extract_tb(error.__traceback__)[-1], type(error)
    warnings.warn(
        f"fastclip.Monitor: failed to {task}: {kind.__name__}: {error} (in {place.name}, line {place.lineno} "
        f"of {place.filename}). Training continues, but records lack what this measures. This warning is "
        "shown once; please report it",
        stacklevel=3,
    )
