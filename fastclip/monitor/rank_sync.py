# SPDX-License-Identifier: BSD-3-Clause
"""Exchanging a few numbers of each process in every step of a training."""

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
_RECORDED = ("loss", "batch_nonfinite", "seconds", "requests")
TIMEOUT = 60.0  # seconds

_made = 0  # by this process; every process makes its monitors in the same order


class RankSync:
    """All processes of the default group, each with a monitor, which make the same steps.

    If one runs out of batches while others continue, as torch's Join allows, the others hang: such a training
    needs ``compare_ranks=False``.

    Args:
        acts: whether this process has actions that all have to take together.
        skipped_kinds: the kinds of events for which it skips steps.

    Attributes:
        acts: whether any of the processes has such actions.

    Raises:
        RuntimeError: another process makes no monitor within TIMEOUT, so that collectives would hang.
        ValueError: not all processes skip steps for the same kinds: their parameters would diverge.
    """

    def __init__(self, acts: bool, skipped_kinds: frozenset[str]) -> None:
        global _made
        from torch.distributed import distributed_c10d  # absent where torch was built without it

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        store = distributed_c10d._get_default_store()
        keys = [f"fastclip_monitor/{_made}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], json.dumps([acts, sorted(skipped_kinds)]))
        try:
            store.wait(keys, timedelta(seconds=TIMEOUT))
        except RuntimeError:
            store.delete_key(keys[self.rank])  # or a process that comes later would take it for present
            raise RuntimeError(
                f"expected a Monitor on each of the {self.world} processes, but not all made one within "
                f"{TIMEOUT:g} seconds; make one on every rank, or pass compare_ranks=False"
            ) from None
        _made += 1
        theirs = [json.loads(sent) for sent in store.multi_get(keys)]
        self.acts = any(acts for acts, _ in theirs)
        for rank, (_, kinds) in enumerate(theirs):
            if kinds != sorted(skipped_kinds):
                raise ValueError(
                    f"expected the action 'skip' for the same kinds of events on every rank, but got "
                    f"{sorted(skipped_kinds)} on rank {self.rank} and {kinds} on rank {rank}"
                )

    def gather(self, numbers: Mapping[str, Value | None], device: torch.device) -> Tensor:
        """Return the numbers of all processes, in one all_reduce for which the host does not wait on a GPU.

        Args:
            numbers: those of this process by KEYS.
            device: where the result is.

        Returns:
            [world, 7], float64, in the order of KEYS; NaN for what a process does not know.
        """
        # A sum, to which the others add 0 in this row, also works with gradients offloaded to the CPU.
        everyone = torch.zeros(self.world, len(KEYS), dtype=torch.float64, device=device)
        row, known = everyone[self.rank], [numbers.get(key) for key in KEYS]
        here = torch.tensor([_on_host(value) for value in known], dtype=torch.float64)
        row.copy_(here.pin_memory() if device.type == "cuda" else here, non_blocking=True)
        for place, value in enumerate(known):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                row[place : place + 1].copy_(value.detach().reshape(1), non_blocking=True)
        return all_reduce(everyone, dist.group.WORLD)


def _on_host(value: Value | None) -> float:
    """Return the number, or NaN where reading it would wait for a device."""
    if value is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return math.nan
    return float(value)


def loss_and_norm(everyone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss, whether any process gave a loss, and the largest norm, [] each.

    They have the same bits on every process. NaN on one is NaN in the mean.

    Args:
        everyone: what :meth:`RankSync.gather` returned.
    """
    columns = dict(zip(KEYS, everyone.unbind(1), strict=True))
    given = columns["losses_given"] > 0
    mean = torch.where(given, columns["loss"], 0.0).sum() / given.sum()
    return mean, given.any(), columns["total_norm"].amax()


def ranks_of(everyone: list[list[float]]) -> dict[str, list[float]]:
    """Return the record's numbers by rank. Losses are omitted unless all ranks gave one."""
    columns = dict(zip(KEYS, (list(column) for column in zip(*everyone, strict=True)), strict=True))
    unknown = {"seconds"} if any(map(math.isnan, columns["seconds"])) else set()
    if not all(columns["losses_given"]):
        unknown.add("loss")
    if all(map(math.isnan, columns["batch_nonfinite"])):
        unknown.add("batch_nonfinite")
    return {key: columns[key] for key in _RECORDED if key not in unknown}
