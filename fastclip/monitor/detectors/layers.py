# SPDX-License-Identifier: BSD-3-Clause
"""Activations that explode or die."""

from __future__ import annotations

import math
from typing import Any

from ..record import Event, Record
from .base import Detector
from .trailing_window import TrailingWindow


class Activations(Detector):
    """Outputs of a module that are not finite, explode or die.

    They explode if their rms is `factor` times its trailing median, and die if they are all zero in `dead`
    consecutive samples although they had not been. The factor is above what warm-up does to a healthy
    transformer (about 3 within 20 samples) and far below what precedes an overflow of float16 at 65504.
    Until the window is full the largest rms takes the place of the median: outputs that start at zero, as
    those of LoRA and of zero-initialised residual branches, grow with the square of the step in a warm-up.
    Outputs that are infinite from the first sample on while loss and gradients are finite belong to a mask.
    """

    kind = "activations"
    STATE = ("windows", "zeros")

    def __init__(self, factor: float = 10.0, dead: int = 3, window: int = 30, minimum: int = 3) -> None:
        super().__init__()
        self.factor, self.dead, self.minimum, self.size = factor, dead, minimum, window
        self.windows: dict[str, TrailingWindow] = {}
        self.zeros: dict[str, int] = {}

    def check(self, record: Record) -> Event | None:
        found = [
            p
            for name, a in record.activations.items()
            if (p := self._check_module(name, a, record.is_finite))
        ]
        if not found:
            return None
        # Modules are in the order of the forward pass: the first one is nearest to the cause.
        severity, message, numbers = min(found, key=lambda problem: problem[0] != "error")
        more = f", and {len(found) - 1} more modules" if len(found) > 1 else ""
        return self.event(record, severity, message + more, **numbers)

    def _check_module(
        self, name: str, activation: dict[str, float], finite: bool
    ) -> tuple[str, str, dict[str, Any]] | None:
        rms, largest = activation.get("rms", math.nan), activation.get("max", math.nan)
        count = activation.get("nonfinite", 0)
        if name not in self.windows:
            self.windows[name] = TrailingWindow(self.size)
        window = self.windows[name]
        known = len(window) >= self.minimum
        usual = math.inf
        if known:
            usual = window.median() if window.is_full else window.largest()
            self.zeros[name] = self.zeros.get(name, 0) + 1 if largest == 0 else 0
        problem = None
        numbers = {"module": name, "rms": rms, "usual": usual, "max": largest}
        if count and (len(window) or not finite):
            problem = "error", f"the output of {name} holds {count:.0f} NaN or Inf", numbers
        elif rms > self.factor * usual > 0:
            message = f"the output of {name} has rms {rms:.3g}, {rms / usual:.0f} times its usual {usual:.3g}"
            problem = "warning", message, numbers
        elif self.zeros.get(name, 0) >= self.dead:
            problem = "warning", f"the output of {name} is all zero; its usual rms is {usual:.3g}", numbers
        if not count and largest > 0:
            window.add(rms)
        return problem
