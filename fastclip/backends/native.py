# SPDX-License-Identifier: BSD-3-Clause
"""The compiled ops: calls of them, and the shapes of their results for torch.compile.

Errors in C++ are raised before anything is written. The calls increment the gradients' version counters,
since writes through raw pointers do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import libraries
from .transfer import scalars_on

NORM_TYPES = (1.0, 2.0, float("inf"))

ops = torch.ops.fastclip


def load() -> None:
    """Load the libraries and register the shapes of their ops for torch.compile."""
    if libraries.load():
        _register_fakes()


def unavailable(device: torch.device) -> str | None:
    """Return why this backend cannot serve the device, or None if it can."""
    if device.type == "cpu":
        return libraries.reason_without_cpu()
    if device.type != "cuda" or torch.version.cuda is None:
        return f"no kernels for {'ROCm' if device.type == 'cuda' else device.type}"
    if (reason := libraries.reason_without_cuda()) is not None:
        return reason
    return libraries.reason_against_gpu(torch.cuda.get_device_capability(device))


def cpu_capability() -> str:
    """Return the instruction set of the CPU loops: the best, or the one in FASTCLIP_CPU_CAPABILITY."""
    return ops.cpu_capability()


def _register_fakes() -> None:
    def stats_like(grads: list[Tensor]) -> Tensor:
        return grads[0].new_empty((len(grads), 3), dtype=torch.float64)

    def result_like(grads: list[Tensor], *sizes: int) -> Tensor:
        wide = any(g.dtype == torch.float64 for g in grads)
        return grads[0].new_empty(sizes, dtype=torch.float64 if wide else torch.float32)

    def group_count(groups: Sequence[int]) -> int:
        return max(groups) + 1 if groups else 1

    @torch.library.register_fake("fastclip::grad_stats")
    def _(
        grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        return result_like(grads, group_count(groups)), stats_like(grads)

    @torch.library.register_fake("fastclip::clip_")
    def _(
        grads: list[Tensor],
        max_norm: float,
        norm_type: float,
        nonfinite: str,
        groups: Sequence[int] = (),
        max_norm_tensor: Tensor | None = None,
        inv_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        return result_like(grads, group_count(groups), 3), stats_like(grads)

    @torch.library.register_fake("fastclip::scale_")
    def _(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
        return None

    @torch.library.register_fake("fastclip::clamp_")
    def _(grads: list[Tensor], limit: float) -> None:
        return None


def _mark_as_written(grads: list[Tensor]) -> None:
    """Increment the version counters; torch.compile does so itself for what an op of its graph writes."""
    if not torch.compiler.is_compiling():
        torch.autograd.graph.increment_version(grads)


def grad_stats(
    grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.grad_stats`."""
    return ops.grad_stats.default(grads, norm_type, finite_only, groups)


def scale_(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """See :func:`fastclip.backends.reference.scale_`."""
    ops.scale_.default(grads, scalars_on(grads[0].device, scale), zero_nonfinite)
    _mark_as_written(grads)


def clip_(
    grads: list[Tensor],
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.clip_`."""
    max_norm_tensor: Tensor | None = None
    if isinstance(max_norm, Tensor):
        max_norm_tensor = scalars_on(grads[0].device, max_norm)
        max_norm = 0.0
    if inv_scale is not None:
        inv_scale = scalars_on(grads[0].device, inv_scale)
    results = ops.clip_.default(grads, max_norm, norm_type, nonfinite, groups, max_norm_tensor, inv_scale)
    _mark_as_written(grads)
    return results


def clamp_(grads: list[Tensor], limit: float) -> None:
    """See :func:`fastclip.backends.reference.clamp_`."""
    if limit != limit:  # as in torch, a NaN limit makes everything NaN
        return scale_(grads, torch.tensor(limit))
    ops.clamp_.default(grads, limit)
    _mark_as_written(grads)
