# SPDX-License-Identifier: BSD-3-Clause
"""Lists of gradients that no single backend call serves.

A list is one of tensors, which may lie on several devices and be dense, complex or sparse; or a
`ShardedGradients`, of which other processes hold parts too. These functions take either.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import dispatch
from .process_groups import ProcessGroups, require_process_group
from .sharded import ShardedGradients, shard_gradients

__all__ = [
    "GradientList",
    "ProcessGroups",
    "ShardedGradients",
    "clamp_",
    "clip_",
    "grad_stats",
    "require_process_group",
    "scale_",
    "shard_gradients",
]

GradientList = list[Tensor] | ShardedGradients


def grad_stats(
    grads: GradientList, norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.grad_stats`."""
    if isinstance(grads, ShardedGradients):
        return grads.grad_stats(norm_type, finite_only, groups)
    return dispatch.grad_stats(grads, norm_type, finite_only, groups)


def clip_(
    grads: GradientList,
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.clip_`."""
    if isinstance(grads, ShardedGradients):
        return grads.clip_(max_norm, norm_type, nonfinite, groups, inv_scale)
    return dispatch.clip_(grads, max_norm, norm_type, nonfinite, groups, inv_scale)


def scale_(grads: GradientList, scale: Tensor, zero_nonfinite: bool = False) -> None:
    """Multiply all gradients in place by one factor, or each by its own: [1] or [N] on any device.

    With `zero_nonfinite` elements that are NaN or Inf become 0.
    """
    if isinstance(grads, ShardedGradients):
        grads.scale_(scale, zero_nonfinite)
    else:
        dispatch.scale_(grads, scale, zero_nonfinite)


def clamp_(grads: GradientList, limit: float) -> None:
    """See :func:`fastclip.backends.reference.clamp_`."""
    if isinstance(grads, ShardedGradients):
        grads.clamp_(limit)
    else:
        dispatch.clamp_(grads, limit)
