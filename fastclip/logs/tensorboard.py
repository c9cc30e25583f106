# SPDX-License-Identifier: BSD-3-Clause
"""Reader of TensorBoard's event files; those of fastclip come back with their events.

tensorboard is imported only when such a file is read.
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
from .columns import USABLE, choose_columns, field_of, no_usable_column
from .merge_steps import complete_record, repeated_steps_warning, unix_time

_VERSION = b"brain.Event:"  # part of the first event of every file
_FRAME = 16  # bytes around each event: its length and two checksums
_PEEK = 2000  # events that are read to decide whether a file is of a training


def is_event_file(head: bytes) -> bool:
    """Return whether a file with these first bytes is an event file."""
    return _VERSION in head[12:64]


def event_files(directory: Path) -> list[Path]:
    """Return the event files in a directory, the oldest first by their names."""
    return sorted(path for path in directory.iterdir() if "tfevents" in path.name and path.is_file())


def holds_training(directory: Path) -> bool:
    """Return whether the event files in a directory have numbers of a training, not only its settings."""
    return any(map(_is_of_training, event_files(directory)))


def read_event_files(files: list[Path], warnings: list[str]) -> tuple[list[Record], dict[str, Any], bool]:
    """Return the records, which tag was read as which field, and whether they have the monitor's events.

    Raises:
        ImportError: tensorboard is not installed.
        LogError: a file cannot be read, or has no loss, gradient norm or loss scale.
    """
    series = _TagSeries()
    for file in files:
        for event in _events(file, warnings):
            series.add(event)
    if tensorboard_tags.MARKS & set(series.scalars):
        _warn_of_repeats(files, series, "gradient/nan_count", warnings)
        return _fastclip_records(series)
    chosen = choose_columns(series.scalars)
    if not any(field in chosen for field in USABLE):
        raise LogError(f"{files[0]}: {no_usable_column(series.scalars)}")
    _warn_of_repeats(files, series, next(chosen[field][0] for field in USABLE if field in chosen), warnings)
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
        complete_record(record)
    return found, {field: its[0] if len(its) == 1 else its for field, its in chosen.items()}, False


def _warn_of_repeats(files: list[Path], series: _TagSeries, tag: str, warnings: list[str]) -> None:
    if count := len(series.repeated.get(tag, ())):
        warnings.append(repeated_steps_warning(files[0].parent, count))


class _TagSeries:
    """Numbers by tag and step; of a step that appears again the number that was written last."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.texts: dict[int, str] = {}
        self.times: dict[int, float] = {}
        self.repeated: dict[str, set[int]] = {}

    def add(self, event: Any) -> None:
        """Add the numbers and texts of an event."""
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
        """Remove what was written from a step on: the run has been resumed there."""
        if first > 0:
            written: list[dict[int, Any]] = [*self.scalars.values(), self.texts, self.times]
            for its in written:
                for step in [step for step in its if step >= first]:
                    del its[step]


def _fastclip_records(series: _TagSeries) -> tuple[list[Record], dict[str, Any], bool]:
    records: dict[int, Record] = {}
    for tag, its in series.scalars.items():
        for step, value in its.items():
            record = records.setdefault(step, Record(step, time=series.times.get(step, 0.0)))
            tensorboard_tags.set_field(record, tag, value)
    for step, text in series.texts.items():
        record = records.setdefault(step, Record(step))
        record.events = tensorboard_tags.parse_events(text, step)
    counted = any(tag.startswith(f"{tensorboard_tags.EVENTS}/") for tag in series.scalars)
    # A writer without add_text has counted the events but not written them.
    return [records[step] for step in sorted(records)], {}, bool(series.texts) or not counted


def _number(value: Any) -> float | None:
    """Return the number in a summary: a field in the older form, a tensor with one element in the newer."""
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
    """Yield the events of a file up to where it is damaged."""
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
        pass  # the checksum is right, but it is not an event: as good as damaged
    if used < size and warnings is not None:
        if not used:
            raise LogError(f"{file}: not an event file of TensorBoard, or damaged from its beginning")
        warnings.append(f"{file}: incomplete or damaged after {used} of {size} bytes; read up to there")


def _tensorboard() -> tuple[Any, Any, type[Exception]]:
    """Return the reader of a file's events, the parser of one event, and the error that it raises."""
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
