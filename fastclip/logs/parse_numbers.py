# SPDX-License-Identifier: BSD-3-Clause
"""Parsing of numbers as logs spell them."""

from __future__ import annotations

import re
from typing import Any

_NOTHING = frozenset({"", "-", "none", "null", "na", "n/a", "<na>"})
# The text of a tensor with one element, which a training loop has logged by mistake.
_TENSOR = re.compile(r"tensor\(\[?([^\],)]+)\]?.*\)", re.DOTALL)
_LARGEST_STEP = 2**53


def parse_number(value: Any) -> float | None:
    """Return a number, or None for an empty cell.

    Raises:
        ValueError: the value is something else.
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
    raise ValueError(f"expected a number, but got {short_repr(value)}")


def _from_text(text: str) -> float | None:
    stripped = text.strip()
    if stripped.lower() in _NOTHING:
        return None
    if (match := _TENSOR.fullmatch(stripped)) is not None:
        stripped = match[1].strip()
    try:
        return float(stripped)
    except ValueError:
        raise ValueError(f"expected a number, but got {short_repr(text)}") from None


def parse_step(value: Any) -> int | None:
    """Return a step, which is a whole number, or None for an empty cell.

    Raises:
        ValueError: the value is something else.
    """
    number = parse_number(value)
    if number is None:
        return None
    if not abs(number) <= _LARGEST_STEP or number != int(number):
        raise ValueError(f"expected a whole number as step, but got {short_repr(value)}")
    return int(number)


def short_repr(value: Any) -> str:
    """Return repr(value), shortened to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
