# SPDX-License-Identifier: BSD-3-Clause
"""What the processes of a training tell each other in every step: a handful of numbers each."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.all_reduce import all_reduce
from .async_copy import Value

KEYS = ("loss", "losses_given", "batch_nonfinite", "seconds", "total_norm", "requests", "request_step")
_TOLD = ("loss", "batch_nonfinite", "seconds", "requests")  # those that a record keeps
TIMEOUT = 60.0  # seconds

_made = 0  # by this process; every process makes its monitors in the same order


class Ranks:
    """All processes of the default group, each with a monitor, which make the same steps.

    One that has no more batches while others go on, as torch's Join allows, would be waited for: there
    ``compare_ranks=False`` is due.

    Args:
        acts: whether this process has actions that all have to take together.
        held: the kinds of events for which it leaves steps out.

    Attributes:
        acts: whether any of the processes has such actions.

    Raises:
        RuntimeError: another process makes no monitor within TIMEOUT; the collectives of this one would wait
            for it for ever.
        ValueError: not all processes leave steps out for the same kinds: their parameters would part.
    """

    def __init__(self, acts: bool, held: frozenset[str]) -> None:
        global _made
        from torch.distributed import distributed_c10d  # absent where torch was built without it

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        store = distributed_c10d._get_default_store()
        keys = [f"fastclip_monitor/{_made}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], json.dumps([acts, sorted(held)]))
        try:
            store.wait(keys, timedelta(seconds=TIMEOUT))
        except RuntimeError:
            store.delete_key(keys[self.rank])  # or one that comes later would take this process for present
            raise RuntimeError(
                f"expected a Monitor on each of the {self.world} processes, but some made none within "
                f"{TIMEOUT:g} seconds; make one on every rank, or pass compare_ranks=False"
            ) from None
        _made += 1
        theirs = [json.loads(told) for told in store.multi_get(keys)]
        self.acts = any(acts for acts, _ in theirs)
        for rank, (_, kinds) in enumerate(theirs):
            if kinds != sorted(held):
                raise ValueError(
                    f"expected the action 'skip' for the same kinds of events on every rank, but got "
                    f"{sorted(held)} on rank {self.rank} and {kinds} on rank {rank}"
                )

    def gather(self, numbers: Mapping[str, Value | None], device: torch.device) -> Tensor:
        """[world, 7]: each process's numbers, float64 in the order of KEYS; NaN for what it does not know.

        One all_reduce, on a GPU without waiting for it on the host.
        """
        # A sum, to which the others add 0 in this row: it serves gradients offloaded to the CPU too.
        everyone = torch.zeros(self.world, len(KEYS), dtype=torch.float64, device=device)
        row, known = everyone[self.rank], [numbers.get(key) for key in KEYS]
        here = torch.tensor([_on_host(value) for value in known], dtype=torch.float64)
        row.copy_(here.pin_memory() if device.type == "cuda" else here, non_blocking=True)
        for place, value in enumerate(known):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                row[place : place + 1].copy_(value.detach().reshape(1), non_blocking=True)
        return all_reduce(everyone, dist.group.WORLD)


def _on_host(value: Value | None) -> float:
    """The number where reading it costs no waiting, else NaN."""
    if value is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return math.nan
    return float(value)


def loss_and_norm(everyone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[] each: the mean loss, whether any process has told one, and the largest norm.

    The same bits on every process. NaN on one is NaN in the mean.
    """
    columns = dict(zip(KEYS, everyone.unbind(1), strict=True))
    told = columns["losses_given"] > 0
    mean = torch.where(told, columns["loss"], 0.0).sum() / told.sum()
    return mean, told.any(), columns["total_norm"].amax()


def ranks_of(everyone: list[list[float]]) -> dict[str, list[float]]:
    """What a record tells of the other processes. Losses are left out where not all have told one."""
    columns = dict(zip(KEYS, (list(column) for column in zip(*everyone, strict=True)), strict=True))
    unknown = {"seconds"} if any(map(math.isnan, columns["seconds"])) else set()
    if not all(columns["losses_given"]):
        unknown.add("loss")
    if all(map(math.isnan, columns["batch_nonfinite"])):
        unknown.add("batch_nonfinite")
    return {key: columns[key] for key in _TOLD if key not in unknown}
