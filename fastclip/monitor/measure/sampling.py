# SPDX-License-Identifier: BSD-3-Clause
"""Which steps are sampled by measurements that cost too much for every step."""

from __future__ import annotations

EARLY = (0, 1, 2, 4, 8, 16, 32)  # steps that are always sampled: a rate too high shows at once


def is_due(step: int, every: int) -> bool:
    """Return whether a step is sampled; `every` of 0 samples none."""
    return every > 0 and (step % every == 0 or step in EARLY)
