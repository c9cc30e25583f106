# SPDX-License-Identifier: BSD-3-Clause
"""Numbers as logs spell them."""

from __future__ import annotations

import re
from typing import Any

_NOTHING = frozenset({"", "-", "none", "null", "na", "n/a", "<na>"})
# The text of a tensor of one element, which a trainer has logged by mistake.
_TENSOR = re.compile(r"tensor\(\[?([^\],)]+)\]?.*\)", re.DOTALL)
_LARGEST_STEP = 2**53


def number_of(value: Any, depth: int = 2) -> float | None:
    """A number, None for a cell that is empty; of a list or mapping of one number that number.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, str):
        return _from_text(value)
    if value is None:
        return None
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("expected a number, but got one that is too large") from None
    if isinstance(value, (list, dict)) and len(value) == 1 and depth:
        return number_of(next(iter(value.values() if isinstance(value, dict) else value)), depth - 1)
    raise ValueError(f"expected a number, but got {shown(value)}")


def _from_text(text: str) -> float | None:
    stripped = text.strip()
    if stripped.lower() in _NOTHING:
        return None
    if (match := _TENSOR.fullmatch(stripped)) is not None:
        stripped = match[1].strip()
    try:
        return float(stripped)
    except ValueError:
        raise ValueError(f"expected a number, but got {shown(text)}") from None


def step_of(value: Any) -> int | None:
    """A step: a whole number; None for a cell that is empty.

    Raises:
        ValueError: it is something else.
    """
    number = number_of(value)
    if number is None:
        return None
    if not abs(number) <= _LARGEST_STEP or number != int(number):
        raise ValueError(f"expected a whole number as step, but got {shown(value)}")
    return int(number)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
