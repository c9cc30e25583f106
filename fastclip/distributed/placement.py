# SPDX-License-Identifier: BSD-3-Clause
"""How a DTensor lies on its mesh, and the part of it that is here."""

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
        groups: those over which its statistics are summed: one for each mesh dimension that it is sharded on.
            Replicas count once.
        is_partial: whether its values are sums over processes that have not been made yet.
    """

    groups: tuple[Group, ...] = ()
    is_partial: bool = False


PLAIN = Layout()


def dtensor_class() -> Any:
    """torch.distributed.tensor.DTensor, if processes talk to one another and somebody has imported it."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


# Of the specs of DTensors, by identity, which each entry keeps alive. A spec outlives many steps, and looking
# at its mesh and placements takes longer than all else that is done to a gradient.
_known: dict[int, tuple[Any, Layout]] = {}
_layouts: dict[tuple, Layout] = {}
_MOST_KNOWN = 1 << 16


def layout_of(spec: Any) -> Layout:
    """Of a DTensor's spec; one object a layout. Placements other than Replicate and Partial are shards."""
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
    """What of each DTensor is on this process: the memory itself, not a copy, and not a part of any graph.

    As to_local() gives it without autograd, at a tenth of the cost.
    """
    parts = [tensor._local_tensor for tensor in tensors]
    # The result of a collective may still be on its way.
    return [p if type(p) is Tensor or not hasattr(p, "wait") else p.wait() for p in parts]


def summed_part(tensor: Any) -> Tensor:
    """A copy of the local part in which sums that had not been made yet are made."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    with torch.no_grad():
        return local_parts([tensor.redistribute(placements=placements)])[0]


def require_no_flat_shards(parameters: Sequence[Tensor]) -> None:
    """Raise RuntimeError for parameters of FSDP1, whose plain tensors do not tell that they are shards."""
    if "torch.distributed.fsdp._flat_param" not in sys.modules:
        return
    if any(getattr(p, "_fsdp_flattened", False) for p in parameters):
        raise RuntimeError(
            "expected parameters that know how they are sharded, but got flat shards of "
            "FullyShardedDataParallel (FSDP1), whose norm would be that of this process alone. Pass "
            "process_group=model.process_group, call model.clip_grad_norm_, or move to fully_shard (FSDP2). "
            "Nothing was changed"
        )
