# SPDX-License-Identifier: BSD-3-Clause
"""Where the monitor's records go: JSON lines, TensorBoard, any object that logs; and back from a log."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
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
    """What takes records. It may raise any Exception: the others and the training go on."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the record of a step. It is the other sinks' too and must stay as it is."""

    def flush(self) -> None:
        """Bring what was written to where it outlives this process and, if it can, the machine."""

    def close(self) -> None:
        """Flush and let go. A second call does nothing."""


def as_sink(target: object) -> Sink:
    """The object itself if it is a Sink; else a sink that writes to it.

    Args:
        target: a Sink; or a writer with ``add_scalar``, such as TensorBoard's SummaryWriter; or an object or
            module with ``log(dict, step=...)`` or ``log(dict)``, such as a run of W&B or Trackio.

    Raises:
        TypeError: it is none of these.
    """
    if not isinstance(target, type):
        # An open file has a sink's methods too, but takes text.
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


class _Guarded:
    """A sink, and how often it has failed."""

    def __init__(self, target: object) -> None:
        self.sink = as_sink(target)
        self.name = type(target).__qualname__
        self.first_step: object = None
        self.last = ""
        self.failures = 0

    def note(self, error: Exception, step: object) -> str | None:
        """Count it; the sentence to warn with, if it is the first."""
        self.failures += 1
        self.last = f"at step {step} with {type(error).__name__}: {error}"
        if self.failures > 1:
            return None
        self.first_step = step
        return (
            f"{self.name} failed {self.last}. It is called again for each further step, further failures are "
            "counted and told when it is closed, and the training goes on"
        )

    def summary(self) -> str | None:
        if self.failures < 2:
            return None
        return (
            f"{self.name} failed {self.failures - 1} more times after its first failure at step "
            f"{self.first_step}, the last one {self.last}"
        )


class SinkGroup:
    """Several sinks as one that never raises an Exception.

    A sink that fails is called again at the next step, since a disk that is full or a server that is away may
    come back; it has lost the records in between. Its first failure is a warning, further ones are counted
    and told when it is closed. KeyboardInterrupt and the like pass through.

    Args:
        sinks: what :func:`as_sink` takes, each.

    Attributes:
        failures: how many calls of sinks have failed.

    Raises:
        TypeError: one of them is no sink.
    """

    def __init__(self, sinks: Iterable[object] = ()) -> None:
        self._sinks = [_Guarded(sink) for sink in sinks]
        self._step: object = None
        self._closed = False

    @property
    def failures(self) -> int:
        return sum(guarded.failures for guarded in self._sinks)

    def write(self, record: dict[str, Any]) -> None:
        self._step = record.get("step")
        self._call(lambda sink: sink.write(record))

    def flush(self) -> None:
        self._call(lambda sink: sink.flush())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._call(lambda sink: sink.close())
        for guarded in self._sinks:
            if (message := guarded.summary()) is not None:
                warnings.warn(message, stacklevel=2)

    def _call(self, method: Callable[[Sink], None]) -> None:
        messages = []
        for guarded in self._sinks:
            try:
                method(guarded.sink)
            except Exception as error:
                messages.append(guarded.note(error, self._step))
        # After all have been called: a filter may make the warning an error.
        for message in messages:
            if message is not None:
                warnings.warn(message, stacklevel=3)
