# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of which each process holds a part.

Each is measured where it lies: its local part is read once, and the statistics are summed over the processes.
Gradients never travel, only a few numbers for each do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import reference
from . import lists
from .collectives import Group, require_agreement, sum_statistics
from .layout import PLAIN, Layout, dtensor_class, layout_of, local_part, require_no_flat_shards, summed_part

ProcessGroups = Group | Sequence[Group] | Mapping[Group, Iterable[Tensor]] | None


@dataclass(slots=True)
class _Row:
    """One gradient of the list, wherever it lies."""

    index: int  # of its parameter
    holder: Tensor  # the parameter; where only gradients are known, the gradient
    grad: Tensor | None  # None where another process may have it
    layout: Layout
    bucket: int = 0  # bit k: its sum is added over the further process group k


class Spread:
    """A list of gradients of which this process holds parts, in the place of a list of tensors.

    Rows stand by layout, within one in the order of the parameters. A DTensor parameter has a row also where
    its gradient is None, since another process may have it.

    Attributes:
        alarms: after a pass, [world size]: how many NaN and Inf each process saw in what it holds.
    """

    @torch.no_grad()
    def __init__(self, rows: list[_Row], process_groups: list[Group]) -> None:
        order = {layout: number for number, layout in enumerate(dict.fromkeys(r.layout for r in rows))}
        self._rows = sorted(rows, key=lambda row: order[row.layout]) if len(order) > 1 else rows
        self._process_groups = process_groups
        self._present = [number for number, row in enumerate(self._rows) if row.grad is not None]
        here = [(row.grad, row.layout) for row in self._rows if row.grad is not None]
        self._write = [grad if layout is PLAIN else local_part(grad) for grad, layout in here]
        self._read = [
            summed_part(grad) if layout.is_partial else local
            for (grad, layout), local in zip(here, self._write, strict=True)
        ]
        self.alarms: Tensor | None = None

    @property
    def indices(self) -> list[int]:
        """For each row the position of its parameter."""
        return [row.index for row in self._rows]

    @property
    def gradients(self) -> list[Tensor]:
        """Those that are here, DTensors as wholes."""
        return [row.grad for row in self._rows if row.grad is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """For each row the gradient, or where it is not here, what would hold it."""
        return [row.holder if row.grad is None else row.grad for row in self._rows]

    @property
    def device(self) -> torch.device:
        """Of the statistics: that of the first gradient here, else of the first parameter."""
        if self._write:
            return self._write[0].device
        if not self._rows:
            return torch.device("cpu")
        first = self._rows[0]
        return (first.holder if first.layout is PLAIN else local_part(first.holder)).device

    # The operations of a list.

    def grad_stats(
        self, norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """See :func:`fastclip.distributed.lists.grad_stats`; the same on every process."""
        stats, totals, over = self._measure(norm_type, finite_only)
        total_norm = reference.totals(totals, over, groups)
        return total_norm.to(reference.result_dtype([row.holder for row in self._rows])), stats

    def clip_(
        self,
        max_norm: float | Tensor,
        norm_type: float,
        nonfinite: str,
        groups: Sequence[int] = (),
        inv_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`fastclip.distributed.lists.clip_`; the same on every process."""
        zero = nonfinite == "zero"
        if zero and any(row.layout.is_partial for row in self._rows):
            raise ValueError(
                "expected nonfinite='propagate', 'error' or 'skip' for gradients with Partial placements, "
                "but got 'zero': their elements are sums that have not been made yet"
            )
        stats, totals, over = self._measure(norm_type, zero)
        dtype = reference.result_dtype([row.holder for row in self._rows])
        summary = reference.summarize(totals, over, max_norm, groups, inv_scale, dtype)
        self._scale(reference.factors(summary, nonfinite, groups, inv_scale), zero)
        return summary, stats

    def scale_(self, scale: Tensor) -> None:
        """Multiply what is here by one factor."""
        self._scale(scale, False)

    def clamp_(self, limit: float) -> None:
        """Limit the elements that are here."""
        if any(row.layout.is_partial for row in self._rows):
            raise NotImplementedError(
                "expected gradients without Partial placements to clip by value: their elements are sums "
                "that have not been made yet"
            )
        if self._write:
            lists.clamp_(self._write, limit)
            self._mark_as_written()

    def _scale(self, factors: Tensor, zero_nonfinite: bool) -> None:
        if not self._write:
            return
        if factors.numel() > 1 and len(self._write) < len(self._rows):
            factors = factors[_index(self._present, factors.device)]
        lists.scale_(self._write, factors, zero_nonfinite)
        self._mark_as_written()

    def _mark_as_written(self) -> None:
        """The version of a DTensor is its own; the pass has told that of its local part."""
        whole = [r.grad for r in self._rows if r.grad is not None and r.layout is not PLAIN]
        torch.autograd.graph.increment_version(whole)

    # The pass.

    def _measure(self, norm_type: float, finite_only: bool) -> tuple[Tensor, Tensor, float]:
        """Statistics of the rows, those the total norm comes from, and the order under which it does."""
        stats = self._statistics_here(norm_type, finite_only)
        alarms = stats.new_zeros(dist.get_world_size())
        alarms[dist.get_rank()] = stats[:, 1:].sum()
        for group, pieces in self._steps():
            shapes = [self._rows[i].holder.shape for begin, end in pieces for i in range(begin, end)]
            require_agreement(hash((len(shapes), tuple(shapes), norm_type)), group, stats.device)
            part = torch.cat([stats[begin:end] for begin, end in pieces])
            part, alarms = sum_statistics(part, alarms, norm_type, group)
            sizes = [end - begin for begin, end in pieces]
            for (begin, end), piece in zip(pieces, part.split(sizes), strict=True):
                stats[begin:end] = piece
        totals, over = stats, norm_type
        if self._process_groups:
            totals, over, alarms = self._add_process_groups(stats, alarms, norm_type)
        self.alarms = alarms
        return stats, totals, over

    def _statistics_here(self, norm_type: float, finite_only: bool) -> Tensor:
        """[rows, 3] of the local parts. What is not here adds nothing."""
        if self._read:
            found = lists.grad_stats(self._read, norm_type, finite_only)[1]
            if len(self._read) == len(self._rows):
                return found
        stats = torch.zeros(len(self._rows), 3, dtype=reference.accumulation_dtype(self.device))
        if norm_type == -torch.inf:
            stats[:, 0] = torch.inf
        stats = stats.to(self.device)
        if self._read:
            stats[_index(self._present, stats.device)] = found
        return stats

    def _steps(self) -> list[tuple[Group, list[tuple[int, int]]]]:
        """The groups to sum over, in the order in which all their processes meet them, and the rows of each.

        A row that is sharded on two dimensions is summed over the first and then, complete there, over the
        second. One collective serves all layouts of a group.
        """
        pieces: dict[Group, list[tuple[int, int]]] = {}
        begin = 0
        while begin < len(self._rows):
            layout = self._rows[begin].layout
            end = begin
            while end < len(self._rows) and self._rows[end].layout is layout:
                end += 1
            for group in layout.groups:
                pieces.setdefault(group, []).append((begin, end))
            begin = end
        return list(pieces.items())

    def _add_process_groups(
        self, stats: Tensor, alarms: Tensor, norm_type: float
    ) -> tuple[Tensor, float, Tensor]:
        """Sums of the rows by bucket, [2 ** number of groups, 3], each added over the groups in its name.

        The lists of the processes may differ; these numbers are as many on each.
        """
        if norm_type == 0:  # torch counts the gradients that are not all zero; their counts add up
            stats = torch.cat([(stats[:, :1] != 0).to(stats.dtype), stats[:, 1:]], 1)
            norm_type = 1.0
        count = len(self._process_groups)
        table = stats.new_zeros(2**count, 3)
        if norm_type == -torch.inf:
            table[:, 0] = torch.inf
        for bucket in {row.bucket for row in self._rows}:
            own = [i for i, row in enumerate(self._rows) if row.bucket == bucket]
            rows = stats if len(own) == len(self._rows) else stats[_index(own, stats.device)]
            table[bucket] = reference.combine(rows, norm_type)
        table = table.reshape([2] * count + [3])
        for number, group in enumerate(self._process_groups):
            part = table.select(count - 1 - number, 1)  # the buckets with this bit
            flat, alarms = sum_statistics(part.reshape(-1, 3), alarms, norm_type, group)
            part.copy_(flat.reshape(part.shape))
        return table.reshape(-1, 3), norm_type, alarms


def spread(
    parameters: Sequence[Tensor], grads: Sequence[Tensor | None], process_group: ProcessGroups = None
) -> Spread | None:
    """The list as one that is spread over processes, or None if all of it is here.

    `grads` are those of the parameters, one by one.

    Raises:
        RuntimeError: FSDP1's flat shards without a process group; a process group without processes.
    """
    if process_group is None and torch.compiler.is_compiling():
        return None
    dtensor = dtensor_class()
    if process_group is not None and not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("expected torch.distributed to be initialized, as process_group was given")
    if process_group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        require_no_flat_shards(list(parameters))
        if dtensor is None or not ({*map(type, parameters), *map(type, grads)} & {dtensor}):
            return None
    rows = _rows_of(parameters, grads, dtensor)
    return Spread(rows, _numbered(process_group, rows))


def _rows_of(parameters: Sequence[Tensor], grads: Sequence[Tensor | None], dtensor: Any) -> list[_Row]:
    rows = []
    layouts: dict[tuple, Layout] = {}  # looking at a mesh takes longer than all else
    for index, (holder, grad) in enumerate(zip(parameters, grads, strict=True)):
        known: Any = holder if grad is None else grad
        if dtensor is None or not isinstance(known, dtensor):
            if grad is not None:
                rows.append(_Row(index, holder, grad, PLAIN))
            continue
        key = (id(known.device_mesh), known.placements)
        if (layout := layouts.get(key)) is None:
            layout = layouts[key] = layout_of(known)
        rows.append(_Row(index, holder, grad, layout))
    return rows


def _numbered(process_group: ProcessGroups, rows: list[_Row]) -> list[Group]:
    """The further groups in their order; marks the rows that each of them adds up."""
    if process_group is None:
        return []
    if isinstance(process_group, Mapping):
        for number, parameters in enumerate(process_group.values()):
            own = {id(parameter) for parameter in parameters}
            for row in rows:
                row.bucket |= (id(row.holder) in own) << number
        return list(process_group)
    groups = list(process_group) if isinstance(process_group, Sequence) else [process_group]
    for row in rows:
        row.bucket = 2 ** len(groups) - 1
    return groups


def _index(numbers: list[int], device: torch.device) -> Tensor:
    index = torch.tensor(numbers)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
