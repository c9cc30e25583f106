# SPDX-License-Identifier: BSD-3-Clause
"""Checks of the arguments of policies."""

from __future__ import annotations

import math
from numbers import Integral, Real


def require_number(
    name: str,
    value: float,
    above: float = -math.inf,
    below: float = math.inf,
    *,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Return the argument as a float.

    Raises:
        TypeError: not a number.
        ValueError: not finite, or not in (above, below) and [least, most].
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"expected {name} to be a number, but got {type(value).__name__}")
    number = float(value)
    if math.isfinite(number) and above < number < below and least <= number <= most:
        return number
    bounds = [
        *([f"> {above:g}"] if above > -math.inf else []),
        *([f">= {least:g}"] if least > -math.inf else []),
        *([f"< {below:g}"] if below < math.inf else []),
        *([f"<= {most:g}"] if most < math.inf else []),
    ]
    raise ValueError(f"expected {name} to be a finite number {' and '.join(bounds)}, but got {number:g}")


def require_count(name: str, value: int, least: int, most: int | None = None) -> int:
    """Return the argument as an int of at least `least` and at most `most`.

    Raises:
        TypeError: not a whole number.
        ValueError: out of bounds.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"expected {name} to be an int, but got {type(value).__name__}")
    if value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"expected {name} to be {bounds}, but got {value}")
    return int(value)


def require_limit(name: str, value: float | None) -> float:
    """Return a limit >= 0; None stands for no limit and becomes Inf.

    Raises:
        TypeError, ValueError: as :func:`require_number`.
    """
    return math.inf if value is None else require_number(name, value, least=0.0)
