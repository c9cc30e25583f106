# SPDX-License-Identifier: BSD-3-Clause
"""The last W finite numbers of each of several series, kept in rings on the device."""

from __future__ import annotations

import torch
from torch import Tensor


def push(window: Tensor, count: Tensor, values: Tensor, where: Tensor) -> None:
    """Put one number at the end of each series, in place of the oldest, where the mask says so.

    By selection and not by an index: that needs no waiting and is deterministic on every device.

    Args:
        window: [S, W], changed in place. count: [S], how many numbers were ever put in; changed in place.
        values, where: [S].
    """
    slots = torch.arange(window.shape[1], device=window.device)
    here = slots == (count % window.shape[1]).unsqueeze(1)
    window.copy_(torch.where(here & where.unsqueeze(1), values.unsqueeze(1), window))
    count.add_(where)


def percentile(window: Tensor, count: Tensor, percent: float) -> Tensor:
    """[S]: the percentile of each series, linear between neighbours as numpy.percentile. NaN if it is empty.

    Args:
        window: [S, W], with Inf in the slots not yet used, so that they sort last. count: [S].
    """
    ordered = window.sort(1).values
    last = count.clamp(max=window.shape[1]) - 1
    rank = (last * (percent / 100.0)).clamp(min=0.0)
    low = rank.floor()
    high = torch.minimum(low + 1, last.clamp(min=0.0))
    below, above = (ordered.gather(1, r.long().unsqueeze(1)).squeeze(1) for r in (low, high))
    return below + (above - below) * (rank - low)


def mean_and_std(window: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """[S] each: mean and sample standard deviation (n - 1) of each series; NaN of fewer than two numbers."""
    used = torch.arange(window.shape[1], device=window.device) < count.unsqueeze(1)
    size = count.clamp(max=window.shape[1])
    mean = torch.where(used, window, 0.0).sum(1) / size
    # Two passes: the difference of large sums of squares would lose a small deviation, or go below 0.
    squares = torch.where(used, window - mean.unsqueeze(1), 0.0).square().sum(1)
    return mean, (squares / (size - 1)).sqrt()
