# SPDX-License-Identifier: BSD-3-Clause
"""Sinks of the monitor's records: JSON lines, TensorBoard, any object that logs. A log can be read back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from .adapters import LogSink, takes_log
from .jsonl import JsonlSink
from .log_reader import Log, LogError, read_log
from .tensorboard import TensorBoardSink

__all__ = [
    "JsonlSink",
    "Log",
    "LogError",
    "LogSink",
    "Sink",
    "SinkGroup",
    "TensorBoardSink",
    "as_sink",
    "read_log",
]


@runtime_checkable
class Sink(Protocol):
    """Takes records. It may raise any Exception: other sinks and the training continue."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the record of a step, which other sinks get too: it must not be changed."""

    def flush(self) -> None:
        """Make what was written outlive this process and, if possible, a crash of the machine."""

    def close(self) -> None:
        """Flush and release all resources. A second call does nothing."""


def as_sink(target: object) -> Sink:
    """Return the object itself if it is a Sink, else a sink that writes to it.

    Args:
        target: a Sink; or a writer with ``add_scalar``, such as TensorBoard's SummaryWriter; or an object or
            module with ``log(dict, step=...)`` or ``log(dict)``, such as a run of W&B or Trackio.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(target, type):
        # An open file has the methods of a sink too, but takes text.
        if isinstance(target, Sink) and not hasattr(target, "readline"):
            return target
        if callable(getattr(target, "add_scalar", None)):
            return TensorBoardSink(target)
        if takes_log(target):
            return LogSink(target)
    got = f"the class {target.__qualname__}" if isinstance(target, type) else f"{type(target).__qualname__}"
    raise TypeError(
        "expected a sink to have write, flush and close, or add_scalar as a TensorBoard writer has, or "
        f"log(dict, step=...) as a run of W&B or Trackio has, but got {got}"
    )


class _CountedSink:
    """A sink, and how often it has failed."""

    def __init__(self, target: object) -> None:
        self.sink = as_sink(target)
        self.name = type(target).__qualname__
        self.first_step: object = None
        self.last = ""
        self.failures = 0

    def count(self, error: Exception, step: object) -> str | None:
        """Count a failure; return a warning if it is the first."""
        self.failures += 1
        self.last = f"at step {step} with {type(error).__name__}: {error}"
        if self.failures > 1:
            return None
        self.first_step = step
        return (
            f"{self.name} failed {self.last}. Training continues. The sink is called again in each step; the "
            "number of further failures is reported when it is closed"
        )

    def summary(self) -> str | None:
        """Return a warning of all failures but the first, if there were any."""
        if self.failures < 2:
            return None
        return (
            f"{self.name} failed {self.failures - 1} more times after its first failure at step "
            f"{self.first_step}, the last one {self.last}"
        )


class SinkGroup:
    """Several sinks as one that never raises an Exception.

    A sink that fails is called again in the next step, since a full disk or an unreachable server may
    recover; it loses the records in between. Its first failure is a warning, the number of further ones is
    reported when it is closed. KeyboardInterrupt and the like are not caught.

    Args:
        sinks: objects that :func:`as_sink` takes.

    Attributes:
        failures: how many calls of sinks have failed.

    Raises:
        TypeError: one of them is not a sink.
    """

    def __init__(self, sinks: Iterable[object] = ()) -> None:
        self._sinks = [_CountedSink(sink) for sink in sinks]
        self._step: object = None
        self._closed = False

    @property
    def failures(self) -> int:
        return sum(counted.failures for counted in self._sinks)

    def write(self, record: dict[str, Any]) -> None:
        self._step = record.get("step")
        self._call("write", record)

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._call("close")
        for counted in self._sinks:
            if (message := counted.summary()) is not None:
                warnings.warn(message, stacklevel=2)

    def _call(self, method: str, *arguments: Any) -> None:
        messages = []
        for counted in self._sinks:
            try:
                getattr(counted.sink, method)(*arguments)
            except Exception as error:
                messages.append(counted.count(error, self._step))
        # After all have been called: a filter may make the warning an error.
        for message in messages:
            if message is not None:
                warnings.warn(message, stacklevel=3)
