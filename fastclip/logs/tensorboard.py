# SPDX-License-Identifier: BSD-3-Clause
"""TensorBoard's event files: fastclip's own, read back completely, and those of others.

tensorboard is imported when such a file is read, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..monitor.record import Record
from ..monitor.sinks import LogError
from . import tensorboard_tags
from .columns import USABLE, choose, field_of, told
from .merge_steps import complete, repeats_told, unix_time

_VERSION = b"brain.Event:"  # stands in the first event of every file
_FRAME = 16  # bytes round each event: its length and two checksums
_PEEK = 2000  # events that tell whether a file is of a training


def is_event_file(head: bytes) -> bool:
    return _VERSION in head[12:64]


def event_files(directory: Path) -> list[Path]:
    """Those of one directory, the oldest first, as their names tell."""
    return sorted(path for path in directory.iterdir() if "tfevents" in path.name and path.is_file())


def is_of_training(directory: Path) -> bool:
    """Whether the event files in a directory hold numbers of a training, and not only its settings."""
    return any(map(_is_of_training, event_files(directory)))


def read_event_files(files: list[Path], warnings: list[str]) -> tuple[list[Record], dict[str, Any], bool]:
    """The records, which tag was taken for which field, and whether fastclip's events are in them.

    Raises:
        ImportError: tensorboard is not installed.
        LogError: a file cannot be read or holds no loss, gradient norm or loss scale.
    """
    series = _Series()
    for file in files:
        for event in _events(file, warnings):
            series.take(event)
    if tensorboard_tags.MARKS & set(series.scalars):
        _tell_repeats(files, series, "gradient/nan_count", warnings)
        return _own(series)
    chosen = choose(series.scalars)
    if not any(field in chosen for field in USABLE):
        raise LogError(f"{files[0]}: {told(series.scalars)}")
    _tell_repeats(files, series, next(chosen[field][0] for field in USABLE if field in chosen), warnings)
    records: dict[int, Record] = {}
    for field, its in chosen.items():
        for tag in its if field not in ("step", "time") else ():
            for step, value in series.scalars[tag].items():
                record = records.setdefault(step, Record(step, time=series.times.get(step, 0.0)))
                if field == "lr":
                    record.lr.append(value)
                else:
                    setattr(record, field, value)
    found = [records[step] for step in sorted(records)]
    for record in found:
        complete(record)
    return found, {field: its[0] if len(its) == 1 else its for field, its in chosen.items()}, False


def _tell_repeats(files: list[Path], series: _Series, tag: str, warnings: list[str]) -> None:
    if count := len(series.repeated.get(tag, ())):
        warnings.append(repeats_told(files[0].parent, count))


class _Series:
    """Numbers by tag and step; of a step that comes again the one that was written last."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.texts: dict[int, str] = {}
        self.times: dict[int, float] = {}
        self.repeated: dict[str, set[int]] = {}

    def take(self, event: Any) -> None:
        if event.HasField("session_log") and event.session_log.status == event.session_log.START:
            self._purge(event.step)
        for value in event.summary.value:
            if value.tag == f"{tensorboard_tags.EVENTS}/text_summary":
                self.texts[event.step] = b"\n".join(value.tensor.string_val).decode("utf-8", "replace")
            elif (number := _number(value)) is not None:
                its = self.scalars.setdefault(value.tag, {})
                if event.step in its:
                    self.repeated.setdefault(value.tag, set()).add(event.step)
                its[event.step] = number
                self.times.setdefault(event.step, unix_time(event.wall_time))

    def _purge(self, first: int) -> None:
        """A run has resumed: what it had written from there on is void."""
        if first > 0:
            written: list[dict[int, Any]] = [*self.scalars.values(), self.texts, self.times]
            for its in written:
                for step in [step for step in its if step >= first]:
                    del its[step]


def _own(series: _Series) -> tuple[list[Record], dict[str, Any], bool]:
    records: dict[int, Record] = {}
    for tag, its in series.scalars.items():
        for step, value in its.items():
            record = records.setdefault(step, Record(step, time=series.times.get(step, 0.0)))
            tensorboard_tags.put(record, tag, value)
    for step, text in series.texts.items():
        record = records.setdefault(step, Record(step))
        record.events = tensorboard_tags.events_of(text, step)
    counted = any(tag.startswith(f"{tensorboard_tags.EVENTS}/") for tag in series.scalars)
    # A writer without add_text has counted the events but not told them.
    return [records[step] for step in sorted(records)], {}, bool(series.texts) or not counted


def _number(value: Any) -> float | None:
    """Of a summary: the older form is a field of its own, the newer one a tensor of one element."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    from tensorboard.util import tensor_util

    if value.tensor.string_val or any(d.size != 1 for d in value.tensor.tensor_shape.dim):
        return None
    try:
        return float(tensor_util.make_ndarray(value.tensor).item())
    except (TypeError, ValueError):
        return None


def _events(file: Path, warnings: list[str] | None) -> Iterator[Any]:
    """The events of a file up to where it is whole."""
    loader, event_of, decode_error = _tensorboard()
    used = 0
    try:
        size = file.stat().st_size
        for content in loader(str(file)).Load():
            yield event_of(content)
            used += len(content) + _FRAME
    except OSError as error:
        raise LogError(f"{file}: {error.strerror or error}") from None
    except decode_error:
        pass  # whole by its checksum, but no event: as good as damaged
    if used < size and warnings is not None:
        if not used:
            raise LogError(f"{file}: not an event file of TensorBoard, or damaged from its beginning")
        warnings.append(f"{file}: incomplete or damaged after {used} of {size} bytes, and read up to there")


def _tensorboard() -> tuple[Any, Any, type[Exception]]:
    """What reads the events of a file, what parses one, and what that raises."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto import event_pb2

        protobuf = importlib.import_module("google.protobuf.message")
    except ImportError as error:
        raise ImportError(
            "reading TensorBoard's event files needs tensorboard, which is not installed: "
            'pip install "torch-fastclip[report]"'
        ) from error
    return RawEventFileLoader, event_pb2.Event.FromString, protobuf.DecodeError


def _is_of_training(file: Path) -> bool:
    events = islice(_events(file, None), _PEEK)
    return any(field_of(value.tag) in USABLE for event in events for value in event.summary.value)
