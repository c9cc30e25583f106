# SPDX-License-Identifier: BSD-3-Clause
"""Statistics summed over the processes of a group."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any  # torch.distributed.ProcessGroup, which is absent where torch was built without it

# (name of the group, signature) of what its processes have been found to agree on.
_agreed: set[tuple[str, int]] = set()


def all_reduce(numbers: Tensor, group: Group, op: Any = None) -> Tensor:
    """The sum (or what `op` says) over the group, where `numbers` lie, which may be overwritten.

    Those of a device that the group does not serve, such as of gradients offloaded to the CPU, go to one that
    it serves and come back.
    """
    devices = [device.type for device in group._device_types]
    served = numbers.device.type in devices
    sent = numbers.contiguous() if served else numbers.to(torch.device(devices[0]))
    dist.all_reduce(sent, op=dist.ReduceOp.SUM if op is None else op, group=group)
    return sent.to(numbers.device)


def sum_statistics(stats: Tensor, alarms: Tensor, norm_type: float, group: Group) -> tuple[Tensor, Tensor]:
    """Statistics, [R, 3], and alarms, [world size], of all processes of the group together.

    One all_reduce; two for an extreme, whose first column is no sum.
    """
    if not math.isinf(norm_type):
        packed = all_reduce(torch.cat([stats.reshape(-1), alarms]), group)
        return packed[: stats.numel()].reshape(stats.shape), packed[stats.numel() :]
    largest = norm_type > 0
    # What a maximum makes of NaN depends on the library below; the counts tell the truth about them.
    neutral = 0.0 if largest else math.inf
    extreme = torch.where(stats[:, 0].isfinite(), stats[:, 0], neutral)
    extreme = all_reduce(extreme, group, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN)
    packed = all_reduce(torch.cat([stats[:, 1:].reshape(-1), alarms]), group)
    counts = packed[: 2 * len(stats)].reshape(-1, 2)
    if largest:
        extreme = torch.where(counts[:, 1] > 0, math.inf, extreme)
    extreme = torch.where(counts[:, 0] > 0, math.nan, extreme)
    return torch.cat([extreme.unsqueeze(1), counts], 1), packed[2 * len(stats) :]


def require_agreement(signature: int, group: Group, device: torch.device) -> None:
    """The first time a group meets a list, see that all its processes have come with the same one.

    They would add up numbers of different gradients otherwise, or wait for one another forever.

    Raises:
        RuntimeError: on every process of the group, if their lists differ.
    """
    key = (group.group_name, signature)
    if key in _agreed:
        return
    low = float(signature & 0xFFFF)  # small enough for exact sums of squares
    count, total, squares = all_reduce(
        torch.tensor([1.0, low, low * low], dtype=torch.float64, device=device), group
    ).tolist()
    if count * squares != total * total:
        raise RuntimeError(
            f"expected the same sharded parameters on each of the {int(count)} processes that share them, "
            f"but the lists differ (this one's signature: {int(low)}). Pass all parameters of the model on "
            "every process, in the same order, whether they have gradients or not. Nothing was changed"
        )
    _agreed.add(key)
