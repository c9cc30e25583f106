# SPDX-License-Identifier: BSD-3-Clause
"""Statistics summed over the processes of a group."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any  # torch.distributed.ProcessGroup, which is absent where torch was built without it

_agreed: set[str] = set()  # names of the groups whose processes have once compared their lists
_HEADER = 3


def all_reduce(numbers: Tensor, group: Group, op: Any = None) -> Tensor:
    """Return the sum over the group, or what `op` says, on the device of `numbers`, which may be overwritten.

    Numbers on a device that the group does not serve, such as those of gradients offloaded to the CPU, go to
    one that it serves and come back.
    """
    devices = [device.type for device in group._device_types]
    served = numbers.device.type in devices
    sent = numbers.contiguous() if served else numbers.to(torch.device(devices[0]))
    dist.all_reduce(sent, op=dist.ReduceOp.SUM if op is None else op, group=group)
    return sent.to(numbers.device)


def sum_statistics(
    stats: Tensor, nonfinite_per_rank: Tensor, norm_type: float, group: Group, signature: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return statistics, [R, 3], and non-finite counts, [world size], summed over the processes of the group.

    It takes one all_reduce; two for an extreme, whose first column is not a sum.

    Args:
        stats: the statistics of this process, [R, 3].
        nonfinite_per_rank: the non-finite counts so far, [world size].
        norm_type: the order p of the norm.
        group: the processes.
        signature: a hash of the list that the rows stand for, which must be the same on every process.

    Raises:
        RuntimeError: the lists differ; raised on every process. Where the device would have to be waited for,
            only the first call of a group raises; a later one makes all statistics NaN.
    """
    if signature is not None and group.group_name not in _agreed:
        _require_same(all_reduce(_header(signature, stats), group), group)
        _agreed.add(group.group_name)
    header = _header(signature or 0, stats)
    if not math.isinf(norm_type):
        header, flat, nonfinite_per_rank = _sum(header, stats.reshape(-1), nonfinite_per_rank, group)
        total = flat.reshape(stats.shape)
    else:
        extreme = _extreme(stats[:, 0], norm_type > 0, group)
        header, flat, nonfinite_per_rank = _sum(header, stats[:, 1:].reshape(-1), nonfinite_per_rank, group)
        counts = flat.reshape(-1, 2)
        if norm_type > 0:
            extreme = torch.where(counts[:, 1] > 0, math.inf, extreme)
        extreme = torch.where(counts[:, 0] > 0, math.nan, extreme)
        total = torch.cat([extreme.unsqueeze(1), counts], 1)
    if header.device.type == "cpu":
        _require_same(header, group)
    else:
        total = torch.where(_are_same(header), total, math.nan)
    return total, nonfinite_per_rank


def _sum(
    header: Tensor, numbers: Tensor, nonfinite_per_rank: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum all three in one collective.

    It is padded to a power of two: where the lists of the processes differ, the collective library must still
    get equal sizes, or it aborts the process before the reason can be reported.
    """
    used = _HEADER + len(numbers) + len(nonfinite_per_rank)
    padding = numbers.new_zeros(_padded(used) - used)
    summed = all_reduce(torch.cat([header, nonfinite_per_rank, numbers, padding]), group)
    start = _HEADER + len(nonfinite_per_rank)
    return summed[:_HEADER], summed[start : start + len(numbers)], summed[_HEADER:start]


def _extreme(column: Tensor, largest: bool, group: Group) -> Tensor:
    """Return the extreme of each row. Collective libraries differ on NaN, so only finite numbers are sent."""
    neutral = 0.0 if largest else math.inf
    finite = torch.where(column.isfinite(), column, neutral)
    finite = torch.nn.functional.pad(finite, (0, _padded(len(column)) - len(column)))
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN
    return all_reduce(finite, group, op)[: len(column)]


def _padded(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _header(signature: int, like: Tensor) -> Tensor:
    """Return 1, the signature and its square, whose sums show whether all signatures are the same.

    The sums are exact, since only a few bits of the signature enter.
    """
    low = float(signature & (0xFFFF if like.dtype is torch.float64 else 0x3F))
    header = like.new_ones(_HEADER)
    header[1] = low  # filled in on the device, which is not waited for
    header[2] = low * low
    return header


def _are_same(header: Tensor) -> Tensor:
    """Return whether the signatures have no variance, [], bool."""
    return header[0] * header[2] == header[1] * header[1]


def _require_same(header: Tensor, group: Group) -> None:
    """Raise RuntimeError if the processes passed different lists."""
    if not bool(_are_same(header)):
        raise RuntimeError(
            f"expected the same sharded parameters on each of the {group.size()} processes that share them, "
            "but the lists differ. Pass all parameters of the model on every process, in the same order, "
            "whether they have gradients or not. Nothing was changed"
        )
