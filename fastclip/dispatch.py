# SPDX-License-Identifier: BSD-3-Clause
"""The operations of a backend for any list of gradients.

Most lists lie on one device and hold dense real gradients: they go to one backend in one call. Any other is
cut into parts that one backend can serve; statistics of the parts are put together on the first gradient's
device, and the coefficient is sent back to the parts. Only statistics and coefficients change devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from .backends import checks, native, reference, select

Result = TypeVar("Result")


@dataclass
class _Part:
    backend: ModuleType
    indices: list[int]
    grads: list[Tensor]


def _parts(grads: Sequence[Tensor], norm_type: float) -> list[_Part]:
    """The list by device and, on each, by whether the device's backend can take the gradient."""
    checks.require_gradients(grads)
    parts: dict[tuple[torch.device, bool], _Part] = {}
    for index, grad in enumerate(grads):
        backend = select(grad.device, norm_type) if checks.is_dense(grad) else reference
        part = parts.setdefault((grad.device, backend is reference), _Part(backend, [], []))
        part.indices.append(index)
        part.grads.append(grad)
    return list(parts.values())


def _run(
    grads: list[Tensor],
    norm_type: float,
    whole: Callable[[ModuleType], Result],
    by_parts: Callable[[list[_Part]], Result],
) -> Result:
    """One call for the whole list if its backend takes it, else the way by parts.

    Looking at every gradient first would cost more than the call itself, so a backend is offered the list
    and refuses, before it writes anything, what it cannot serve.
    """
    checks.require_tensor(grads[0], 0)
    backend = select(grads[0].device, norm_type)
    if backend is not reference:
        try:
            return whole(backend)
        except (RuntimeError, TypeError) as refusal:
            parts = _parts(grads, norm_type)
            if len(parts) == 1 and parts[0].backend is backend:
                raise refusal from None
    else:
        parts = _parts(grads, norm_type)
        if len(parts) == 1:
            return whole(reference)
    return by_parts(parts)


def _gather(parts: list[_Part], rows: list[Tensor], device: torch.device) -> Tensor:
    """[N, 3]: the parts' statistics in the order of the gradients."""
    order = torch.tensor([i for part in parts for i in part.indices], device=device)
    dtype = reference.accumulation_dtype(device)
    return torch.cat([r.to(device, dtype) for r in rows])[order.argsort()]


def _statistics(parts: list[_Part], norm_type: float, finite_only: bool, device: torch.device) -> Tensor:
    rows = [part.backend.grad_stats(part.grads, norm_type, finite_only)[1] for part in parts]
    return _gather(parts, rows, device)


def _scale_parts(parts: list[_Part], scale: Tensor, zero_nonfinite: bool) -> None:
    for part in parts:
        own = scale if scale.numel() == 1 else scale[torch.tensor(part.indices, device=scale.device)]
        part.backend.scale_(part.grads, own.to(part.grads[0].device), zero_nonfinite)


def _require_writable(parts: list[_Part]) -> None:
    """Let every part refuse before any is written: one error must not leave half the gradients scaled."""
    for part in parts:
        if part.backend is reference:
            checks.require_writable(part.grads)
        else:
            part.backend.scale_(part.grads, torch.ones(1, device=part.grads[0].device))


def _is_traceable(grads: list[Tensor], norm_type: float = 2.0) -> bool:
    """Whether the call can be part of a graph, if torch.compile is tracing it: only native ops can."""
    return not torch.compiler.is_compiling() or select(grads[0].device, norm_type) is native


def grad_stats(
    grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.grad_stats`; gradients on any devices."""
    if not _is_traceable(grads, norm_type):
        return torch.compiler.disable(grad_stats)(grads, norm_type, finite_only, groups)

    def by_parts(parts: list[_Part]) -> tuple[Tensor, Tensor]:
        stats = _statistics(parts, norm_type, finite_only, grads[0].device)
        total_norm = reference.totals(stats, norm_type, groups)
        return total_norm.to(reference.result_dtype(grads)), stats

    return _run(grads, norm_type, lambda b: b.grad_stats(grads, norm_type, finite_only, groups), by_parts)


def clip_(
    grads: list[Tensor],
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.clip_`; gradients on any devices."""
    if not _is_traceable(grads, norm_type):
        return torch.compiler.disable(clip_)(grads, max_norm, norm_type, nonfinite, groups, inv_scale)

    def by_parts(parts: list[_Part]) -> tuple[Tensor, Tensor]:
        _require_writable(parts)
        zero = nonfinite == "zero"
        stats = _statistics(parts, norm_type, zero, grads[0].device)
        dtype = reference.result_dtype(grads)
        summary = reference.summarize(stats, norm_type, max_norm, groups, inv_scale, dtype)
        _scale_parts(parts, reference.factors(summary, nonfinite, groups, inv_scale), zero)
        return summary, stats

    return _run(
        grads,
        norm_type,
        lambda b: b.clip_(grads, max_norm, norm_type, nonfinite, groups, inv_scale),
        by_parts,
    )


def scale_(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """Multiply all gradients in place by one factor, or each by its own: [1] or [N] on any device."""
    if not _is_traceable(grads):
        return torch.compiler.disable(scale_)(grads, scale, zero_nonfinite)

    def by_parts(parts: list[_Part]) -> None:
        _require_writable(parts)
        _scale_parts(parts, scale, zero_nonfinite)

    _run(grads, 2.0, lambda b: b.scale_(grads, scale, zero_nonfinite), by_parts)


def clamp_(grads: list[Tensor], limit: float) -> None:
    """See :func:`fastclip.backends.reference.clamp_`; gradients on any devices."""
    if not _is_traceable(grads):
        return torch.compiler.disable(clamp_)(grads, limit)

    def by_parts(parts: list[_Part]) -> None:
        checks.require_real(grads)
        _require_writable(parts)
        for part in parts:
            part.backend.clamp_(part.grads, limit)

    _run(grads, 2.0, lambda b: b.clamp_(grads, limit), by_parts)
