# SPDX-License-Identifier: BSD-3-Clause
"""ZClip: norms far above a moving average are clipped to near it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arguments import require_count, require_limit, require_number
from .base import StatefulPolicy


class ZClip(StatefulPolicy):
    """ZClip (Kumar et al. 2025, arXiv:2504.02507), with its "adaptive scaling".

    Mean m and variance v start as those of the first `warmup_steps` norms (dividing by their number). Then,
    for a norm n with z = (n - m) / (sqrt(v) + eps)::

        T = m + z_threshold * sqrt(v) * z_threshold / z    if z > z_threshold, else T = n
        m = alpha * m + (1 - alpha) * T
        v = alpha * v + (1 - alpha) * (T - m) ** 2         with the new m

    The limit is min(T, max_grad_norm), in the warm-up max_grad_norm. With the default of 1 the fixed limit
    bounds every step, and ZClip only adds to it where norms are usually below 1. Steps with NaN or Inf move
    neither m nor v, are not counted for the warm-up and leave the limit unchanged; in the authors' code one
    NaN stays in the average.

    Args:
        alpha: the weight of the past, in [0, 1).
        z_threshold: z* of the paper, > 0.
        max_grad_norm: an upper bound of the limit, >= 0; None for none.
        warmup_steps: how many norms m and v start from, >= 1.
        eps: keeps z finite, > 0; in units of the norm.

    Raises:
        TypeError, ValueError: an argument of another kind, or out of bounds.
    """

    def __init__(
        self,
        alpha: float = 0.97,
        z_threshold: float = 2.5,
        max_grad_norm: float | None = 1.0,
        warmup_steps: int = 25,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.alpha = require_number("alpha", alpha, below=1.0, least=0.0)
        self.z_threshold = require_number("z_threshold", z_threshold, above=0.0)
        self.max_grad_norm = require_limit("max_grad_norm", max_grad_norm)
        self.warmup_steps = require_count("warmup_steps", warmup_steps, 1)
        self.eps = require_number("eps", eps, above=0.0)

    def _initial(self, size: int) -> dict[str, tuple[tuple[int, ...], float]]:
        return {
            "threshold": ((size,), self.max_grad_norm),
            "mean": ((size,), 0.0),
            "variance": ((size,), 0.0),
            "count": ((size,), 0.0),
        }

    def _rule(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        finite = total_norm.isfinite()
        mean, variance, count = (self._state[name] for name in ("mean", "variance", "count"))
        warm = count >= self.warmup_steps
        count.add_(finite)
        deviation = variance.sqrt()
        z = (total_norm - mean) / (deviation + self.eps)
        adaptive = mean + self.z_threshold * deviation / (z / self.z_threshold)
        effective = torch.where(z > self.z_threshold, adaptive, total_norm)
        # In the warm-up the k-th norm has the weight 1 / k: mean and variance are those of all k.
        weight = torch.where(warm, 1.0 - self.alpha, 1.0 / count.clamp(min=1.0))
        entering = torch.where(warm, effective, total_norm)
        new_mean = mean + weight * (entering - mean)
        # The mean before enters the plain variance of the warm-up, the mean after the moving one.
        from_mean = torch.where(warm, entering - new_mean, entering - mean)
        new_variance = (1.0 - weight) * variance + weight * from_mean * (entering - new_mean)
        self._set("mean", new_mean, finite)
        self._set("variance", new_variance, finite)
        limit = torch.where(warm, effective, math.inf).clamp(max=self.max_grad_norm)
        return self._set("threshold", limit, finite)

    def __repr__(self) -> str:
        bound = None if self.max_grad_norm == math.inf else self.max_grad_norm
        return (
            f"ZClip(alpha={self.alpha:g}, z_threshold={self.z_threshold:g}, max_grad_norm={bound}, "
            f"warmup_steps={self.warmup_steps}, eps={self.eps:g})"
        )
