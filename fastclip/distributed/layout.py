# SPDX-License-Identifier: BSD-3-Clause
"""How a DTensor lies on its mesh, and the part of it that is here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .collectives import Group


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


def layout_of(tensor: Any) -> Layout:
    """Of a DTensor; placements other than Replicate and Partial are shards."""
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = [i for i, p in enumerate(placements) if not p.is_replicate() and not p.is_partial()]
    groups = tuple(mesh.get_group(i) for i in sharded if mesh.size(i) > 1)
    return Layout(groups, any(p.is_partial() for p in placements))


def local_part(tensor: Any) -> Tensor:
    """What of a DTensor is on this process: the memory itself, not a copy. To be called without autograd."""
    local = tensor.to_local()
    if type(local) is not Tensor and hasattr(local, "wait"):
        return local.wait()  # the result of a collective on its way
    return local


def summed_part(tensor: Any) -> Tensor:
    """A copy of the local part in which sums that had not been made yet are made. Without autograd too."""
    from torch.distributed.tensor import Replicate

    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return local_part(tensor.redistribute(placements=placements))


def require_no_flat_shards(parameters: list[Tensor]) -> None:
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
