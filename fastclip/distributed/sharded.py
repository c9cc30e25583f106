# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of which each process holds a part.

Each is measured where it lies: its local part is read once, and the statistics are summed over the processes.
Gradients never travel, only a few numbers for each do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import dispatch
from ..backends import reference
from .all_reduce import Group, sum_statistics
from .placement import (
    PLAIN,
    Layout,
    dtensor_class,
    layout_of,
    local_parts,
    require_no_flat_shards,
    summed_part,
)
from .process_groups import ProcessGroups, buckets_of, require_process_group


@dataclass(slots=True)
class _Segment:
    """Rows of one layout, in the order of the parameters."""

    indices: list[int]  # of the parameters
    holders: list[Tensor]  # the parameters; where only gradients are known, those
    grads: list[Tensor | None]
    locals: list[Tensor]  # the parts of the gradients that are here
    shapes: list[tuple]  # of the wholes

    @property
    def gradients(self) -> list[Tensor]:
        return [grad for grad in self.grads if grad is not None]


class ShardedGradients:
    """A list of gradients of which this process holds parts, in the place of a list of tensors.

    Rows stand by layout, within one in the order of the parameters. A DTensor parameter has a row also where
    its gradient is None, since another process may have it.

    Attributes:
        indices: for each row the position of its parameter.
        nonfinite_per_rank: after a pass, [world size]: how many NaN and Inf each process saw in its part.
        totals: after a pass, statistics of all that counts, [any, 3], and the order under which they give the
            norm. With process groups they are not those of the rows.
    """

    def __init__(self, segments: dict[Layout, _Segment], process_group: ProcessGroups) -> None:
        self.nonfinite_per_rank: Tensor | None = None
        self.totals: tuple[Tensor, float] | None = None
        self._segments = list(segments.items())
        self.indices = [index for part in segments.values() for index in part.indices]
        self._holders = [holder for part in segments.values() for holder in part.holders]
        self._grads = [grad for part in segments.values() for grad in part.grads]
        self._present = [row for row, grad in enumerate(self._grads) if grad is not None]
        self._write = [local for part in segments.values() for local in part.locals]
        self._read = self._write
        self._is_partial = any(layout.is_partial for layout in segments)
        if self._is_partial:
            self._read = [
                summed_part(grad) if layout.is_partial else local
                for layout, part in segments.items()
                for grad, local in zip(part.gradients, part.locals, strict=True)
            ]
        self._process_groups, self._buckets = buckets_of(process_group, self._holders)

    @property
    def gradients(self) -> list[Tensor]:
        """Those that are here, DTensors as wholes."""
        return [grad for grad in self._grads if grad is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """For each row the gradient, or where it is not here, what would hold it."""
        return [h if g is None else g for h, g in zip(self._holders, self._grads, strict=True)]

    @property
    def _device(self) -> torch.device:
        """Of the statistics: that of the first gradient here, else of the first parameter."""
        if self._write:
            return self._write[0].device
        if not self._holders:
            return torch.device("cpu")
        first = self._holders[:1]
        return (first if self._segments[0][0] is PLAIN else local_parts(first))[0].device

    # The operations of a list.

    def grad_stats(
        self, norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """See :func:`fastclip.dispatch.grad_stats`; the same on every process."""
        stats, totals, over, dtype = self._measure(norm_type, finite_only)
        return reference.totals(totals, over, groups).to(dtype), stats

    def clip_(
        self,
        max_norm: float | Tensor,
        norm_type: float,
        nonfinite: str,
        groups: Sequence[int] = (),
        inv_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See :func:`fastclip.dispatch.clip_`; the same on every process."""
        zero = nonfinite == "zero"
        stats, totals, over, dtype = self._measure(norm_type, zero)
        summary = reference.summarize(totals, over, max_norm, groups, inv_scale, dtype)
        self._scale(reference.factors(summary, nonfinite, groups, inv_scale), zero)
        return summary, stats

    def scale_(self, scale: Tensor, zero_nonfinite: bool = False) -> None:
        """Multiply what is here by one factor, or by one for each row."""
        self._scale(scale, zero_nonfinite)

    def clamp_(self, limit: float) -> None:
        """Limit the elements that are here."""
        if self._is_partial:
            raise NotImplementedError(
                "expected gradients without Partial placements to clip by value: their elements are sums "
                "that have not been made yet"
            )
        if self._write:
            dispatch.clamp_(self._write, limit)
            self._mark_as_written()

    def _scale(self, factors: Tensor, zero_nonfinite: bool) -> None:
        if not self._write or (
            factors.device.type == "cpu" and bool((factors == 1).all()) and not zero_nonfinite
        ):
            return
        if factors.numel() > 1 and len(self._write) < len(self._holders):
            factors = factors[_index(self._present, factors.device)]
        dispatch.scale_(self._write, factors, zero_nonfinite)
        self._mark_as_written()

    def _mark_as_written(self) -> None:
        """The version of a DTensor is its own; the pass has told that of its local part."""
        whole = [grad for layout, part in self._segments if layout is not PLAIN for grad in part.gradients]
        torch.autograd.graph.increment_version(whole)

    # The pass.

    def _measure(self, norm_type: float, finite_only: bool) -> tuple[Tensor, Tensor, float, torch.dtype]:
        """Statistics of the rows; those the norm comes from, the order under which it does, and its dtype."""
        if finite_only and self._is_partial:
            raise ValueError(
                "expected nonfinite='propagate', 'error' or 'skip' for gradients with Partial placements, "
                "but got 'zero': their elements are sums that have not been made yet"
            )
        stats, dtype = self._statistics_here(norm_type, finite_only)
        nonfinite_per_rank = stats.new_zeros(dist.get_world_size())
        nonfinite_per_rank[dist.get_rank()] = stats[:, 1:].sum()
        for group, pieces in self._steps():
            shapes = tuple(shape for part, _, _ in pieces for shape in part.shapes)
            sizes = [end - begin for _, begin, end in pieces]
            part = torch.cat([stats[begin:end] for _, begin, end in pieces])
            part, nonfinite_per_rank = sum_statistics(
                part, nonfinite_per_rank, norm_type, group, hash((shapes, norm_type))
            )
            for (_, begin, end), piece in zip(pieces, part.split(sizes), strict=True):
                stats[begin:end] = piece
        totals, over = stats, norm_type
        if self._process_groups:
            totals, over, nonfinite_per_rank = self._add_process_groups(stats, nonfinite_per_rank, norm_type)
        self.nonfinite_per_rank, self.totals = nonfinite_per_rank, (totals, over)
        return stats, totals, over, dtype

    def _statistics_here(self, norm_type: float, finite_only: bool) -> tuple[Tensor, torch.dtype]:
        """[rows, 3] of the local parts, and the dtype of a norm. What is not here adds nothing."""
        if self._read:
            total_norm, found = dispatch.grad_stats(self._read, norm_type, finite_only)
            if len(self._read) == len(self._holders):
                return found, total_norm.dtype
        stats = torch.zeros(len(self._holders), 3, dtype=reference.accumulation_dtype(self._device))
        if norm_type == -torch.inf:
            stats[:, 0] = torch.inf
        stats = stats.to(self._device)
        if self._read:
            stats[_index(self._present, stats.device)] = found
        return stats, reference.result_dtype(self._holders)

    def _steps(self) -> list[tuple[Group, list[tuple[_Segment, int, int]]]]:
        """The groups to sum over, in the order in which all their processes meet them; each with its segments
        and where their rows begin and end.

        A row that is sharded on two dimensions is summed over the first and then, complete there, over the
        second. One collective serves all layouts of a group.
        """
        steps: dict[Group, list[tuple[_Segment, int, int]]] = {}
        begin = 0
        for layout, part in self._segments:
            end = begin + len(part.indices)
            for group in layout.groups:
                steps.setdefault(group, []).append((part, begin, end))
            begin = end
        return list(steps.items())

    def _add_process_groups(
        self, stats: Tensor, nonfinite_per_rank: Tensor, norm_type: float
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
        for bucket in set(self._buckets):
            own = [row for row, number in enumerate(self._buckets) if number == bucket]
            rows = stats if len(own) == len(self._buckets) else stats[_index(own, stats.device)]
            table[bucket] = reference.combine(rows, norm_type)
        table = table.reshape([2] * count + [3])
        for number, group in enumerate(self._process_groups):
            part = table.select(count - 1 - number, 1)  # the buckets with this bit
            flat, nonfinite_per_rank = sum_statistics(
                part.reshape(-1, 3), nonfinite_per_rank, norm_type, group
            )
            part.copy_(flat.reshape(part.shape))
        return table.reshape(-1, 3), norm_type, nonfinite_per_rank


def shard_gradients(
    parameters: Sequence[Tensor], grads: Sequence[Tensor | None], process_group: ProcessGroups = None
) -> ShardedGradients | None:
    """The list as one that is spread over processes, or None if all of it is here.

    `grads` are those of the parameters, one by one.

    Raises:
        RuntimeError: FSDP1's flat shards without a process group; a process group without processes.
    """
    if process_group is None and torch.compiler.is_compiling():
        return None
    process_group = require_process_group(process_group)
    if not dist.is_available() or not dist.is_initialized():
        return None
    dtensor = dtensor_class()
    if process_group is None:
        types = {*map(type, parameters), *map(type, grads)}
        if types != {dtensor}:
            require_no_flat_shards(parameters)
        if dtensor not in types:
            return None
    return ShardedGradients(_segments_of(parameters, grads, dtensor), process_group)


def _segments_of(
    parameters: Sequence[Tensor], grads: Sequence[Tensor | None], dtensor: Any
) -> dict[Layout, _Segment]:
    # The loops over thousands of DTensors are most of a call's cost: attributes, not properties, and no call.
    known: list[Any] = [p if g is None else g for p, g in zip(parameters, grads, strict=True)]
    layouts = [layout_of(tensor._spec) if type(tensor) is dtensor else PLAIN for tensor in known]
    segments: dict[Layout, _Segment] = {}
    for layout in dict.fromkeys(layouts):
        indices = [
            i
            for i, own in enumerate(layouts)
            if own is layout and (layout is not PLAIN or grads[i] is not None)
        ]
        here = [known[i] for i in indices if grads[i] is not None]
        segments[layout] = _Segment(
            indices,
            [parameters[i] for i in indices],
            [grads[i] for i in indices],
            here if layout is PLAIN else local_parts(here),
            [] if layout is PLAIN else [known[i]._spec.tensor_meta.shape for i in indices],
        )
    return segments


def _index(numbers: list[int], device: torch.device) -> Tensor:
    index = torch.tensor(numbers)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
