# SPDX-License-Identifier: BSD-3-Clause
"""Ring buffers on the device: the last W finite numbers of each of several series."""

from __future__ import annotations

import torch
from torch import Tensor


def push(window: Tensor, count: Tensor, values: Tensor, where: Tensor) -> None:
    """Write one number of each series over its oldest, where the mask is True.

    Selection instead of an index waits for nothing and is deterministic on every device.

    Args:
        window: the buffers, [S, W], changed in place.
        count: how many numbers were ever written, [S]; changed in place.
        values, where: the numbers and the mask, [S].
    """
    positions = torch.arange(window.shape[1], device=window.device)
    here = positions == (count % window.shape[1]).unsqueeze(1)
    window.copy_(torch.where(here & where.unsqueeze(1), values.unsqueeze(1), window))
    count.add_(where)


def percentile(window: Tensor, count: Tensor, percent: float) -> Tensor:
    """Return the percentile of each series, [S], linear between neighbours as numpy.percentile; NaN if empty.

    Args:
        window: the buffers, [S, W], with Inf where nothing was written yet, so that it sorts last.
        count: how many numbers were ever written, [S].
    """
    ordered = window.sort(1).values
    last = count.clamp(max=window.shape[1]) - 1
    rank = (last * (percent / 100.0)).clamp(min=0.0)
    low = rank.floor()
    high = torch.minimum(low + 1, last.clamp(min=0.0))
    below, above = (ordered.gather(1, r.long().unsqueeze(1)).squeeze(1) for r in (low, high))
    return below + (above - below) * (rank - low)


def mean_and_std(window: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and sample standard deviation (n - 1) of each series, [S]; NaN from less than two."""
    used = torch.arange(window.shape[1], device=window.device) < count.unsqueeze(1)
    size = count.clamp(max=window.shape[1])
    mean = torch.where(used, window, 0.0).sum(1) / size
    # Two passes: the difference of large sums of squares would lose a small deviation, or go below 0.
    squares = torch.where(used, window - mean.unsqueeze(1), 0.0).square().sum(1)
    return mean, (squares / (size - 1)).sqrt()
