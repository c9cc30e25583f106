# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of which each process holds a part.

Each process reads its local parts once, and the statistics are summed over the processes. Gradients never
travel; only a few numbers for each do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends import reference
from ..dispatch import Measurement, run_clamp, run_scale, run_stats
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
    """The rows of one layout, in the order of the parameters.

    Attributes:
        indices: the position of each row's parameter in the caller's list.
        parameters: the parameters; the gradients themselves where only those are known.
        grads: the gradient of each, None where this process has none.
        locals: the local part of each gradient that is here.
        shapes: the shape of each whole gradient; empty for plain tensors.
    """

    indices: list[int]
    parameters: list[Tensor]
    grads: list[Tensor | None]
    locals: list[Tensor]
    shapes: list[tuple]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are here."""
        return [grad for grad in self.grads if grad is not None]


class ShardedGradients:
    """A list of gradients of which this process holds parts: a composite list for :mod:`fastclip.dispatch`.

    Rows are ordered by layout and, within a layout, by parameter. A DTensor parameter has a row even where
    its gradient is None, since another process may have it.

    Attributes:
        indices: the position of each row's parameter.
        nonfinite_per_rank: after a pass, the number of NaN and Inf that each process saw in its part,
            [world size].
        totals: after a pass, the statistics that the norm is computed from, [any, 3], and the order under
            which they give it. With process groups they are not those of the rows.
    """

    def __init__(self, segments: dict[Layout, _Segment], process_group: ProcessGroups) -> None:
        self.nonfinite_per_rank: Tensor | None = None
        self.totals: tuple[Tensor, float] | None = None
        self._segments = list(segments.items())
        self.indices = [index for part in segments.values() for index in part.indices]
        self._parameters = [parameter for part in segments.values() for parameter in part.parameters]
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
        self._process_groups, self._buckets = buckets_of(process_group, self._parameters)

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are here; DTensors as wholes."""
        return [grad for grad in self._grads if grad is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """The gradient of each row, or its parameter where the gradient is not here."""
        return [p if g is None else g for p, g in zip(self._parameters, self._grads, strict=True)]

    @property
    def _device(self) -> torch.device:
        """The device of the statistics: the first gradient's here, else the first parameter's."""
        if self._write:
            return self._write[0].device
        if not self._parameters:
            return torch.device("cpu")
        first = self._parameters[:1]
        return (first if self._segments[0][0] is PLAIN else local_parts(first))[0].device

    def measure(self, norm_type: float, finite_only: bool) -> Measurement:
        """Read the local parts once and sum their statistics over the processes; equal on every process."""
        if finite_only and self._is_partial:
            raise ValueError(
                "expected nonfinite='propagate', 'error' or 'skip' for gradients with Partial placements, "
                "but got 'zero'. Partial gradients are not reduced yet; redistribute them first"
            )
        stats, dtype = self._local_statistics(norm_type, finite_only)
        per_rank = stats.new_zeros(dist.get_world_size())
        per_rank[dist.get_rank()] = stats[:, 1:].sum()
        for group, pieces in self._reductions():
            shapes = tuple(shape for part, _, _ in pieces for shape in part.shapes)
            rows = torch.cat([stats[begin:end] for _, begin, end in pieces])
            rows, per_rank = sum_statistics(rows, per_rank, norm_type, group, hash((shapes, norm_type)))
            sizes = [end - begin for _, begin, end in pieces]
            for (_, begin, end), piece in zip(pieces, rows.split(sizes), strict=True):
                stats[begin:end] = piece
        totals, order = stats, norm_type
        if self._process_groups:
            totals, order, per_rank = self._sum_over_process_groups(stats, per_rank, norm_type)
        self.nonfinite_per_rank, self.totals = per_rank, (totals, order)
        return Measurement(stats, totals, order, dtype)

    def scale(self, factors: Tensor, zero_nonfinite: bool) -> None:
        """Multiply the local parts by one factor, [1], or by one for each row, [N]."""
        if not self._write or (
            factors.device.type == "cpu" and bool((factors == 1).all()) and not zero_nonfinite
        ):
            return
        if factors.numel() > 1 and len(self._write) < len(self._parameters):
            factors = factors[_index(self._present, factors.device)]
        run_scale(self._write, factors, zero_nonfinite)
        self._mark_as_written()

    def clamp(self, limit: float) -> None:
        """Limit the elements of the local parts."""
        if self._is_partial:
            raise NotImplementedError(
                "expected gradients without Partial placements to clip by value. Partial gradients are not "
                "reduced yet; redistribute them first"
            )
        if self._write:
            run_clamp(self._write, limit)
            self._mark_as_written()

    def _mark_as_written(self) -> None:
        """Bump the versions of the DTensors: the pass bumps only those of their local parts."""
        whole = [grad for layout, part in self._segments if layout is not PLAIN for grad in part.gradients]
        torch.autograd.graph.increment_version(whole)

    def _local_statistics(self, norm_type: float, finite_only: bool) -> tuple[Tensor, torch.dtype]:
        """Return the statistics of the local parts, [rows, 3], and the dtype of a norm.

        A row whose gradient is not here adds nothing to the sums.
        """
        if self._read:
            total_norm, found = run_stats(self._read, norm_type, finite_only)
            if len(self._read) == len(self._parameters):
                return found, total_norm.dtype
        stats = torch.zeros(len(self._parameters), 3, dtype=reference.accumulation_dtype(self._device))
        if norm_type == -torch.inf:
            stats[:, 0] = torch.inf
        stats = stats.to(self._device)
        if self._read:
            stats[_index(self._present, stats.device)] = found
        return stats, reference.result_dtype(self._parameters)

    def _reductions(self) -> list[tuple[Group, list[tuple[_Segment, int, int]]]]:
        """Return the groups to sum over, each with its segments and where their rows begin and end.

        The order is the one in which all processes of a group meet it. A row that is sharded on two
        dimensions is summed over the first and then, complete there, over the second. One collective serves
        all layouts of a group.
        """
        reductions: dict[Group, list[tuple[_Segment, int, int]]] = {}
        begin = 0
        for layout, part in self._segments:
            end = begin + len(part.indices)
            for group in layout.groups:
                reductions.setdefault(group, []).append((part, begin, end))
            begin = end
        return list(reductions.items())

    def _sum_over_process_groups(
        self, stats: Tensor, per_rank: Tensor, norm_type: float
    ) -> tuple[Tensor, float, Tensor]:
        """Return sums of the rows by bucket, [2 ** number of groups, 3], added over the groups of the bucket.

        The lists of the processes may differ; these numbers are as many on each. Also return the order under
        which they give the norm, and the non-finite counts of each process.
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
            flat, per_rank = sum_statistics(part.reshape(-1, 3), per_rank, norm_type, group)
            part.copy_(flat.reshape(part.shape))
        return table.reshape(-1, 3), norm_type, per_rank


def shard_gradients(
    parameters: Sequence[Tensor], grads: Sequence[Tensor | None], process_group: ProcessGroups = None
) -> ShardedGradients | None:
    """Return the list as ShardedGradients, or None if this process holds all of it.

    Args:
        parameters: the parameters.
        grads: the gradient of each, or None.
        process_group: further groups, as for :func:`fastclip.clip_grad_norm_`.

    Raises:
        RuntimeError: flat shards of FSDP1 without a process group; a process group, but torch.distributed is
            not initialized.
    """
    if process_group is None and torch.compiler.is_compiling():
        return None
    if process_group is not None:
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
    """Return the rows by layout, in the order in which the layouts first appear."""
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
    """Return the numbers as an index on the device, which is not waited for."""
    index = torch.tensor(numbers)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)
