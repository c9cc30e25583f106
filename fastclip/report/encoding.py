# SPDX-License-Identifier: BSD-3-Clause
"""Encoding of numbers for the page: base64 of 32 or 64 bit floats, and places as runs."""

from __future__ import annotations

import base64
import itertools
import json
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from .series import Series, thinned, without_repeats

BUDGET = 1_000_000  # values in the charts of a page; each takes about 7 bytes, including its place
_LARGEST, _SMALLEST = 3.4e38, 1.2e-38  # the range in which float32 keeps seven digits


def encode_values(values: Sequence[float]) -> dict[str, str]:
    """Encode values as float32 if it can hold them, else as float64."""
    fits = all(
        value == 0 or _SMALLEST < abs(value) < _LARGEST or not math.isfinite(value) for value in values
    )
    return {"f4" if fits else "f8": _base64(array("f" if fits else "d", values))}


def encode_places(places: Sequence[int]) -> dict[str, Any]:
    """Encode places as runs (first, distance, count), or as the first and distances if that is shorter."""
    runs: list[list[int]] = []
    for place in places:
        if runs and (runs[-1][2] == 1 or place == runs[-1][0] + runs[-1][1] * runs[-1][2]):
            if runs[-1][2] == 1:
                runs[-1][1] = place - runs[-1][0]
            runs[-1][2] += 1
        else:
            runs.append([place, 1, 1])
    # A run takes about as many characters as ten small distances.
    if 10 * len(runs) <= len(places) + 10:
        return {"runs": runs}
    distances = [b - a for a, b in itertools.pairwise(places)]
    kind = "B" if max(distances) < 1 << 8 else "I"
    return {"first": places[0], "u1" if kind == "B" else "u4": _base64(array(kind, distances))}


def encode_series(series: Series, budget: int) -> dict[str, Any]:
    """Encode a series, thinned to about `budget` values."""
    less = thinned(without_repeats(series), budget)
    found: dict[str, Any] = {"label": series.label, "role": series.role}
    found |= {"at": encode_places(less.at), "values": encode_values(less.values)}
    if less.breaks:
        found["breaks"] = encode_places(less.breaks[:budget])
    if not series.shown:
        found["hidden"] = True
    return found


def _base64(numbers: array[Any]) -> str:
    if sys.byteorder == "big":  # the page's script expects little-endian numbers
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def script_json(value: Any) -> str:
    """Return JSON for a <script> element: nothing in it can end the element or start a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
