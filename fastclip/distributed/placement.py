# SPDX-License-Identifier: BSD-3-Clause
"""The placement of a DTensor on its mesh, and its local part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .all_reduce import Group


@dataclass(frozen=True, eq=False)  # one object for each layout of a list
class Layout:
    """The processes that hold a DTensor together.

    Attributes:
        groups: the groups over which its statistics are summed: one for each mesh dimension that it is
            sharded on. Replicas count once.
        is_partial: whether its values are partial sums that are not reduced yet.
    """

    groups: tuple[Group, ...] = ()
    is_partial: bool = False


PLAIN = Layout()


def dtensor_class() -> Any:
    """Return the class DTensor if torch.distributed is in use and the class was imported, else None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


# Layouts by the identity of a DTensor's spec, which each entry keeps alive. A spec outlives many steps, and
# looking at its mesh and placements takes longer than all else that is done to a gradient.
_known: dict[int, tuple[Any, Layout]] = {}
_layouts: dict[tuple, Layout] = {}
_MOST_KNOWN = 1 << 16


def layout_of(spec: Any) -> Layout:
    """Return the layout of a DTensor's spec, one object for each layout.

    Placements other than Replicate and Partial count as shards.
    """
    if (found := _known.get(id(spec))) is not None:
        return found[1]
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    mesh, placements = spec.mesh, spec.placements
    sharded = [i for i, p in enumerate(placements) if not p.is_replicate() and not p.is_partial()]
    groups = tuple(mesh.get_group(i) for i in sharded if mesh.size(i) > 1)
    is_partial = any(p.is_partial() for p in placements)
    layout = _layouts.setdefault((groups, is_partial), Layout(groups, is_partial))
    _known[id(spec)] = spec, layout
    return layout


def local_parts(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the local part of each DTensor: the memory itself, not a copy, and not part of any graph.

    The result is that of to_local() without autograd, at a tenth of the cost.
    """
    parts = [tensor._local_tensor for tensor in tensors]
    # The result of a collective may still be on its way.
    return [p if type(p) is Tensor or not hasattr(p, "wait") else p.wait() for p in parts]


def summed_part(tensor: Any) -> Tensor:
    """Return a copy of the local part in which partial sums are reduced."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    with torch.no_grad():
        return local_parts([tensor.redistribute(placements=placements)])[0]


def require_no_flat_shards(parameters: Sequence[Tensor]) -> None:
    """Raise RuntimeError for parameters of FSDP1: plain tensors that do not show that they are shards."""
    if "torch.distributed.fsdp._flat_param" not in sys.modules:
        return
    if any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        raise RuntimeError(
            "expected parameters that carry their sharding, but got flat shards of FullyShardedDataParallel "
            "(FSDP1): their norm would be that of this process alone. Pass "
            "process_group=model.process_group, call model.clip_grad_norm_, or move to fully_shard (FSDP2). "
            "Nothing was changed"
        )
