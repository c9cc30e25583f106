# SPDX-License-Identifier: BSD-3-Clause
"""AdaGC: each gradient is clipped by a moving average of its own norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arguments import require_count, require_number
from .base import StatefulPolicy


class AdaGC(StatefulPolicy):
    """AdaGC (Wang et al. 2025, arXiv:2502.11034): one limit for each gradient.

    With n the norm of a gradient, n_all that of all together and t the step, from 1 on::

        t < warmup_steps:  h = min(absolute_limit / n_all, 1)        gamma = min(gamma, h * n)
        later:             h = min(relative_limit * gamma / n, 1)    gamma = beta * gamma + (1 - beta) * h * n

    Each gradient is multiplied by its h; T = h * n. A step in which any gradient is NaN or Inf moves no
    gamma, is not counted and leaves the limits unchanged.

    A gradient of exactly 0, such as that of an expert that got no tokens, does not move its gamma either. By
    the letter of the rule one such step in the warm-up would make gamma 0, and with it all later gradients of
    that parameter. A gradient that first appears after the warm-up starts with its own norm as gamma,
    unclipped.

    Args:
        absolute_limit: lambda_abs of the paper, > 0: the limit of the norm of all in the warm-up.
        relative_limit: lambda_rel, > 0: how far above gamma a norm may rise.
        beta: the weight of the past, in [0, 1).
        warmup_steps: T_start, >= 1; there are warmup_steps - 1 steps before it.

    Raises:
        TypeError, ValueError: an argument of another kind, or out of bounds.
    """

    per_tensor = True

    def __init__(
        self,
        absolute_limit: float = 1.0,
        relative_limit: float = 1.05,
        beta: float = 0.98,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__()
        self.absolute_limit = require_number("absolute_limit", absolute_limit, above=0.0)
        self.relative_limit = require_number("relative_limit", relative_limit, above=0.0)
        self.beta = require_number("beta", beta, below=1.0, least=0.0)
        self.warmup_steps = require_count("warmup_steps", warmup_steps, 1)

    def _initial(self, size: int) -> dict[str, tuple[tuple[int, ...], float]]:
        return {"threshold": ((size,), math.inf), "gamma": ((size,), math.inf), "count": ((1,), 0.0)}

    def _rule(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        gamma, count = self._state["gamma"], self._state["count"]
        finite = total_norm.isfinite().all() & norms.isfinite().all()
        count.add_(finite)
        warming = count < self.warmup_steps
        ratio = (self.absolute_limit / total_norm).clamp(max=1.0)
        limit = torch.where(warming, ratio * norms, torch.minimum(self.relative_limit * gamma, norms))
        known = gamma.isfinite()
        average = torch.where(known, self.beta * gamma + (1.0 - self.beta) * limit, limit)
        new_gamma = torch.where(warming, torch.minimum(gamma, limit), average)
        self._set("gamma", new_gamma, finite & (norms > 0))
        return self._set("threshold", limit, finite)

    def __repr__(self) -> str:
        return (
            f"AdaGC(absolute_limit={self.absolute_limit:g}, relative_limit={self.relative_limit:g}, "
            f"beta={self.beta:g}, warmup_steps={self.warmup_steps})"
        )
