# SPDX-License-Identifier: BSD-3-Clause
"""What all detectors share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..record import SEVERITIES, Event, Record
from .trailing_window import Window


class Detector(ABC):
    """Looks at one record after the other and tells what a person should know.

    A class has a `kind`, which names its events and its entry in a state_dict, and lists in `STATE` the
    attributes that it remembers from step to step: numbers, strings, lists, dicts, and Windows. An event that
    lasts is told when it begins, when it becomes more severe, and every `COOLDOWN` steps. It lasts as long as
    no more than a tenth of that lies between two steps of it; `SUBJECT` names the values in which it has to
    be the same, such as the process: another one's is another event.
    """

    kind: str
    STATE: tuple[str, ...] = ()
    COOLDOWN = 100
    SUBJECT: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.told: dict[str, list[Any]] = {}  # by subject: step last told, step last seen, severity told

    @abstractmethod
    def check(self, record: Record) -> Event | None:
        """What the record shows, None if nothing."""

    def update(self, record: Record) -> Event | None:
        """An event that is to be told now, else None. Called once for each step, in their order."""
        event = self.check(record)
        if event is None:
            return None
        subject = "/".join(str(event.values.get(key, "")) for key in self.SUBJECT)
        if subject in self.told:
            told, seen, severity = self.told[subject]
            # A step before the one last seen is that of a run that began anew.
            lasts = seen <= record.step <= seen + self.COOLDOWN // 10 and record.step < told + self.COOLDOWN
            if lasts and SEVERITIES.index(event.severity) <= SEVERITIES.index(severity):
                self.told[subject][1] = record.step
                return None
        self.told[subject] = [record.step, record.step, event.severity]
        return event

    def event(self, record: Record, severity: str, message: str, **values: Any) -> Event:
        return Event(self.kind, record.step, severity, message, values, record.rank)

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return (*cls.STATE, "told")

    def state_dict(self) -> dict[str, Any]:
        return {name: _pack(getattr(self, name)) for name in self._names()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError if the state is that of something else; then nothing is changed."""
        if set(state) != set(self._names()):
            raise ValueError(
                f"expected the state of {type(self).__name__} to hold {sorted(self._names())}, "
                f"but got {sorted(state)}"
            )
        for name, value in state.items():
            setattr(self, name, _unpack(value))


def _pack(value: Any) -> Any:
    if isinstance(value, Window):
        return {"window": value.size, "values": value.values()}
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpack(value: Any) -> Any:
    # The types, since tensors and modules may have these names as well.
    if isinstance(value, dict) and set(value) == {"window", "values"} and isinstance(value["window"], int):
        if isinstance(value["values"], list):
            return Window(value["window"], value["values"])
    if isinstance(value, dict):
        return {key: _unpack(item) for key, item in value.items()}
    return [_unpack(item) for item in value] if isinstance(value, list) else value
