# SPDX-License-Identifier: BSD-3-Clause
"""The base class of all detectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..record import SEVERITIES, Event, Record
from .trailing_window import TrailingWindow


class Detector(ABC):
    """Looks at one record after the other and reports what a person should know.

    A subclass has a `kind`, which names its events and its entry in a state_dict, and lists in `STATE` the
    attributes that it remembers from step to step: numbers, strings, lists, dicts, and TrailingWindows. A
    persistent condition is reported when it starts, when it becomes more severe, and every `COOLDOWN` steps.
    It persists as long as no two of its steps are more than `COOLDOWN` / 10 apart. `SUBJECT` names the
    values of an event that tell conditions apart, such as the process: each combination is reported on its
    own.
    """

    kind: str
    STATE: tuple[str, ...] = ()
    COOLDOWN = 100
    SUBJECT: tuple[str, ...] = ()

    def __init__(self) -> None:
        # By subject: the step last reported, the step last seen, and the severity reported.
        self.reported: dict[str, list[Any]] = {}

    @abstractmethod
    def check(self, record: Record) -> Event | None:
        """Return the event that the record shows, or None."""

    def update(self, record: Record) -> Event | None:
        """Return the event to report now, or None. Must be called once for each step, in order."""
        event = self.check(record)
        if event is None:
            return None
        subject = "/".join(str(event.values.get(key, "")) for key in self.SUBJECT)
        if subject in self.reported:
            step, seen, severity = self.reported[subject]
            # A step before the one last seen belongs to a run that was restarted.
            persists = (
                seen <= record.step <= seen + self.COOLDOWN // 10 and record.step < step + self.COOLDOWN
            )
            if persists and SEVERITIES.index(event.severity) <= SEVERITIES.index(severity):
                self.reported[subject][1] = record.step
                return None
        self.reported[subject] = [record.step, record.step, event.severity]
        return event

    def event(self, record: Record, severity: str, message: str, **values: Any) -> Event:
        """Return an event of this detector's kind in the record's step and rank."""
        return Event(self.kind, record.step, severity, message, values, record.rank)

    @classmethod
    def _attributes(cls) -> dict[str, str]:
        """Return the attribute behind each key of a state; saved states call `reported` "told"."""
        return {name: name for name in cls.STATE} | {"told": "reported"}

    def state_dict(self) -> dict[str, Any]:
        """Return what the detector remembers, as numbers, strings, lists and dicts."""
        return {key: _pack(getattr(self, name)) for key, name in self._attributes().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: the keys are not those of this detector; nothing has been changed then.
        """
        attributes = self._attributes()
        if set(state) != set(attributes):
            raise ValueError(
                f"expected the state of {type(self).__name__} to have the keys {sorted(attributes)}, "
                f"but got {sorted(state)}"
            )
        for key, value in state.items():
            setattr(self, attributes[key], _unpack(value))


def _pack(value: Any) -> Any:
    if isinstance(value, TrailingWindow):
        return {"window": value.size, "values": value.values()}
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    return [_pack(item) for item in value] if isinstance(value, list) else value


def _unpack(value: Any) -> Any:
    # The types are checked too, since tensors and modules may have these names.
    if isinstance(value, dict) and set(value) == {"window", "values"} and isinstance(value["window"], int):
        if isinstance(value["values"], list):
            return TrailingWindow(value["window"], value["values"])
    if isinstance(value, dict):
        return {key: _unpack(item) for key, item in value.items()}
    return [_unpack(item) for item in value] if isinstance(value, list) else value
