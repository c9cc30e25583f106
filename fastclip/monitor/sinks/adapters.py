# SPDX-License-Identifier: BSD-3-Clause
"""A sink for objects with ``log(dict, step=...)``, such as a run of W&B or Trackio, or their modules."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

from .scalars import count_events, scalars_of

PREFIX = "fastclip/"


class LogSink:
    """Logs the numbers of each record as one flat dict.

    The names are TensorBoardSink's tags with the prefix "fastclip/", which keeps them together and apart from
    the user's: ``{"fastclip/step": 17, "fastclip/loss": 2.3, "fastclip/gradient/total_norm": 0.8, ...}``.
    Events are logged as running counts by kind; text and lists are omitted. The run remains the caller's: it
    is neither flushed nor closed.

    W&B drops numbers whose step is lower than one it has seen, and on a GPU a record comes one step late. So
    if the training logs with ``step=`` too, it has to count optimizer steps and log after
    ``optimizer.step()``. Otherwise no one may pass a step, or W&B drops the training's own numbers: use
    ``LogSink(run, pass_step=False)`` and ``run.define_metric("fastclip/*", step_metric="fastclip/step")``.

    Args:
        target: an object with ``log``.
        pass_step: whether to pass the argument ``step`` too. None: if ``log`` takes it.

    Raises:
        TypeError: target has no ``log`` that takes a dict, or, with pass_step, none that takes ``step``.
    """

    def __init__(self, target: Any, *, pass_step: bool | None = None) -> None:
        if not takes_log(target, pass_step):
            wanted = "log(dict, step=...)" if pass_step else "log(dict)"
            raise TypeError(f"expected an object with {wanted}, but got {type(target).__qualname__}")
        self._target = target
        self._pass_step = _binds(target.log, step=0) if pass_step is None else pass_step
        self._events: Counter[str] = Counter()

    def write(self, record: dict[str, Any]) -> None:
        numbers = {**scalars_of(record), **count_events(record, self._events)}
        data: dict[str, float] = {PREFIX + tag: value for tag, value in numbers.items()}
        step = record.get("step")
        if step is not None:
            data[PREFIX + "step"] = step
        if self._pass_step:
            self._target.log(data, step=step)
        else:
            self._target.log(data)

    def flush(self) -> None:
        """Do nothing: the run decides when to flush."""

    def close(self) -> None:
        """Do nothing: the caller finishes the run."""


def takes_log(target: object, pass_step: bool | None = None) -> bool:
    """Return whether target has a ``log`` that takes a dict, and ``step`` if pass_step; a logger has not."""
    log = getattr(target, "log", None)
    if not callable(log):
        return False
    with_step, alone = _binds(log, step=0), _binds(log)
    return with_step or alone if pass_step is None else with_step if pass_step else alone


def _binds(log: Any, **arguments: int) -> bool:
    try:
        signature = inspect.signature(log)
    except (TypeError, ValueError):  # compiled functions have none, such as the logarithm of a tensor
        return False
    try:
        signature.bind({}, **arguments)
    except TypeError:
        return False
    return True
