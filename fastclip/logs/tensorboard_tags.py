# SPDX-License-Identifier: BSD-3-Clause
"""The fields of a record behind the tags of fastclip's TensorBoardSink."""

from __future__ import annotations

import math
import re
from typing import Any

from ..monitor.record import SEVERITIES, Event, Record
from ..monitor.sinks.scalars import TAGS

# Tags that only fastclip writes.
MARKS = frozenset({"gradient/nan_count", "amp/skipped_steps", "step/held"})
EVENTS = "events"

_WHOLE = frozenset(("nan_count", "inf_count", "overflows", "skipped_steps"))
_FLAGS = frozenset(("applied", "held"))
_PLAIN = {tag: key for key, tag in TAGS.items() if key not in ("losses", "lr")}
# Prefixes of the tags of mappings, which end with a key, and of mappings in mappings.
_NAMED = {"loss": "losses", "gradient/group_norm": "group_norms"}
_NAMED |= {"update_ratio": "update_ratio", "memory": "memory"}
_NESTED = ("batch", "token_ids")
_LINE = re.compile(rf"- ({'|'.join(SEVERITIES)}) (\w+): (.*)")


def set_field(record: Record, tag: str, value: float) -> None:
    """Set the field of a record that a tag belongs to. Other tags are ignored."""
    if (key := _PLAIN.get(tag)) is not None and key not in (*_NAMED.values(), *_NESTED):
        _set_plain(record, key, value)
        return
    first, _, rest = tag.partition("/")
    if first == "lr" and rest.isdecimal() and len(rest) < 5:
        record.lr += [math.nan] * (int(rest) + 1 - len(record.lr))
        record.lr[int(rest)] = value
    elif first in _NESTED and "/" in rest:
        name, _, statistic = rest.rpartition("/")
        getattr(record, first).setdefault(name, {})[statistic] = _whole(value)
    elif first.startswith("activation_") and rest:
        record.activations.setdefault(rest, {})[first.removeprefix("activation_")] = value
    else:
        for prefix, key in _NAMED.items():
            if tag.startswith(prefix + "/"):
                name = tag.removeprefix(prefix + "/")
                getattr(record, key)[name] = _whole(value) if key == "memory" else value
                return


def _set_plain(record: Record, key: str, value: float) -> None:
    if key in _FLAGS:
        setattr(record, key, value != 0)
    elif key not in _WHOLE:
        setattr(record, key, value)
    elif math.isfinite(value):
        setattr(record, key, int(value))


def _whole(value: float) -> Any:
    return int(value) if math.isfinite(value) and value == int(value) else value


def parse_events(text: str, step: int) -> list[Event]:
    """Return the events of a step, from the text of the tag "events"."""
    found = (_LINE.fullmatch(line) for line in text.split("\n"))
    return [Event(match[2], step, match[1], match[3]) for match in found if match is not None]
