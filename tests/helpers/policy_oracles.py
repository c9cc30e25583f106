# SPDX-License-Identifier: BSD-3-Clause
"""The published rules of fastclip.policies once more, in plain Python floats, one series at a time.

Each takes the norms of a run and gives the limit of every step. Where a norm is NaN or Inf the rule is not
asked: the limit stays what it was, and nothing is remembered.
"""

from __future__ import annotations

import math
import random
import statistics


def series(steps: int, seed: int = 0, size: float = 1.0) -> list[float]:
    """Norms that fall, scatter and spike, as float32 would hold them; some are NaN or Inf, early ones too."""
    generator = random.Random(seed)
    norms = []
    for step in range(steps):
        norm = size * (0.5 + 2.0 / (1 + step / 20)) * math.exp(generator.gauss(0, 0.25))
        if generator.random() < 0.03:
            norm *= generator.choice([3.0, 20.0, 1000.0, 0.01])
        norms.append(norm)
    for step in (0, 4, 5, 17, 60, 61, 99, 130, 131, 200):
        if step < steps:
            norms[step] = math.nan if step % 2 else math.inf
    return norms


def percentile_limits(norms: list[float], percent: float, window: int, minimum: int) -> list[float]:
    limits, seen, limit = [], [], math.inf
    for norm in norms:
        if math.isfinite(norm):
            seen.append(norm)
            if len(seen) >= minimum:
                ordered = sorted(seen[-window:])
                rank = percent / 100 * (len(ordered) - 1)
                low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
                limit = low + (high - low) * (rank - math.floor(rank))
        limits.append(limit)
    return limits


def zclip_limits(
    norms: list[float], alpha=0.97, z_threshold=2.5, max_grad_norm=1.0, warmup_steps=25, eps=1e-6
) -> list[float]:
    bound = math.inf if max_grad_norm is None else max_grad_norm
    limits, first, limit = [], [], bound
    mean = variance = 0.0
    for norm in norms:
        if not math.isfinite(norm):
            limits.append(limit)
            continue
        if len(first) < warmup_steps:
            first.append(norm)
            mean, variance = statistics.fmean(first), statistics.pvariance(first)
            limit = bound
        else:
            z = (norm - mean) / (math.sqrt(variance) + eps)
            entering = (
                mean + z_threshold * math.sqrt(variance) / (z / z_threshold) if z > z_threshold else norm
            )
            mean = alpha * mean + (1 - alpha) * entering
            variance = alpha * variance + (1 - alpha) * (entering - mean) ** 2
            limit = min(entering, bound)
        limits.append(limit)
    return limits


def adagc_limits(
    rows: list[list[float]], absolute=1.0, relative=1.05, beta=0.98, warmup_steps=100
) -> list[list[float]]:
    """Of the norms of all gradients step by step; the total norm is that of these."""
    count = len(rows[0])
    gamma = [None] * count
    limits, limit, step = [], [math.inf] * count, 0
    for norms in rows:
        total = math.sqrt(sum(norm * norm for norm in norms))
        if math.isfinite(total):
            step += 1
            limit = []
            for i, norm in enumerate(norms):
                if step < warmup_steps:
                    clipped = min(absolute / total, 1.0) * norm
                    new = clipped if gamma[i] is None else min(gamma[i], clipped)
                else:
                    clipped = norm if gamma[i] is None else min(relative * gamma[i], norm)
                    new = clipped if gamma[i] is None else beta * gamma[i] + (1 - beta) * clipped
                if norm > 0:
                    gamma[i] = new
                limit.append(clipped)
        limits.append(limit)
    return limits


def spike_bounds(values: list[float], sigma=6.0, window=128, minimum=64) -> list[float]:
    """The bound of each step by the values before it; every finite value enters, also one above its bound."""
    bounds, seen, bound = [], [], math.inf
    for value in values:
        if math.isfinite(value):
            if len(seen) + 1 >= minimum:
                last = seen[-window:]
                bound = statistics.fmean(last) + sigma * statistics.stdev(last)
            seen.append(value)
        bounds.append(bound)
    return bounds


def coefficient(norm: float, limit: float) -> float:
    return 1.0 if norm <= limit else limit / norm
