# SPDX-License-Identifier: BSD-3-Clause
"""NaN and Inf in JSON, which has no such numbers: they are written as strings and read back as floats."""

from __future__ import annotations

import math
from typing import Any, NoReturn

_NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}

# Text under these keys stays text, even if it reads "NaN" ...
_TEXT_KEYS = frozenset({"name", "message", "kind", "severity", "sample_ids", "error", "tensor_names"})
# ... but not where the keys are names that a user chose: a loss may be called "error".
_USER_NAMED = frozenset(
    {"losses", "group_norms", "update_ratio", "activations", "batch", "token_ids", "values"}
)


def spell_nonfinite(value: Any) -> Any:
    """Return a copy of a JSON value in which strings stand for NaN and Inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: spell_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spell_nonfinite(item) for item in value]
    return value


def restore_nonfinite(value: Any, key: str = "", text: bool = False) -> Any:
    """Return a copy of a JSON value in which floats replace the strings "NaN", "Infinity" and "-Infinity".

    Args:
        value: what ``json.loads`` returned.
        key: the key under which it stands in its parent.
        text: whether its strings are text and stay as they are.
    """
    if isinstance(value, str):
        return value if text else _NONFINITE.get(value, value)
    if isinstance(value, list):
        return [restore_nonfinite(item, "", text) for item in value]
    if isinstance(value, dict):
        text_keys = frozenset() if key in _USER_NAMED else _TEXT_KEYS
        return {k: restore_nonfinite(item, k, text or k in text_keys) for k, item in value.items()}
    return value


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for the constants NaN and Infinity, which strict JSON does not have.

    To be passed to ``json.loads`` as ``parse_constant``.
    """
    raise ValueError(f"{constant} is not a JSON number")
