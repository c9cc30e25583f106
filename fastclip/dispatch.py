# SPDX-License-Identifier: BSD-3-Clause
"""One function for each operation on gradients: from a list of any kind to the backends that serve it.

Most lists hold dense real tensors of one device: one backend serves them in one call. Any other list is
composite. It measures its parts, their statistics are combined on one device, and the factors go back to the
parts: only statistics and factors cross devices and processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .backends import checks, native, reference, select


class Measurement(NamedTuple):
    """What one pass over a composite list found.

    Attributes:
        stats: statistics of the gradients, [N, 3], see :func:`fastclip.backends.reference.grad_stats`.
        totals: the statistics that the norm is computed from, [any, 3]; `stats` in most lists.
        norm_type: the order under which `totals` give the norm.
        dtype: the dtype of the norm.
    """

    stats: Tensor
    totals: Tensor
    norm_type: float
    dtype: torch.dtype


class CompositeGradients(Protocol):
    """A list that is served part by part: on several devices or layouts, or on several processes."""

    @property
    def tensors(self) -> list[Tensor]:
        """One tensor for each row of the statistics."""

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that are on this process."""

    def measure(self, norm_type: float, finite_only: bool) -> Measurement:
        """Read each gradient once."""

    def scale(self, factors: Tensor, zero_nonfinite: bool) -> None:
        """Multiply all gradients in place by one factor, [1], or each by its own, [N]."""

    def clamp(self, limit: float) -> None:
        """Limit every element to [-limit, limit] in place."""


GradientList = list[Tensor] | CompositeGradients


def tensors_of(grads: GradientList) -> list[Tensor]:
    """Return one tensor for each row of the statistics; the parameter where the gradient is elsewhere."""
    return grads if isinstance(grads, list) else grads.tensors


def run_stats(
    grads: GradientList, norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return norms and statistics; see :func:`fastclip.backends.reference.grad_stats`."""
    if isinstance(grads, list):
        result = _offer(grads, norm_type, "grad_stats", norm_type, finite_only, groups)
        if not isinstance(result, MixedGradients):
            return result
        grads = result
    stats, totals, order, dtype = grads.measure(norm_type, finite_only)
    return reference.totals(totals, order, groups).to(dtype), stats


def run_clip(
    grads: GradientList,
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Clip in place and return summary and statistics; see :func:`fastclip.backends.reference.clip_`."""
    if isinstance(grads, list):
        result = _offer(grads, norm_type, "clip_", max_norm, norm_type, nonfinite, groups, inv_scale)
        if not isinstance(result, MixedGradients):
            return result
        grads = result
    zero = nonfinite == "zero"
    stats, totals, order, dtype = grads.measure(norm_type, zero)
    summary = reference.summarize(totals, order, max_norm, groups, inv_scale, dtype)
    grads.scale(reference.factors(summary, nonfinite, groups, inv_scale), zero)
    return summary, stats


def run_scale(grads: GradientList, factors: Tensor, zero_nonfinite: bool = False) -> None:
    """Multiply all gradients in place by one factor, [1], or each by its own, [N], on any device.

    With `zero_nonfinite`, elements that are NaN or Inf become 0.
    """
    if isinstance(grads, list):
        result = _offer(grads, 2.0, "scale_", factors, zero_nonfinite)
        if not isinstance(result, MixedGradients):
            return
        grads = result
    grads.scale(factors, zero_nonfinite)


def run_clamp(grads: GradientList, limit: float) -> None:
    """Limit every element in place; see :func:`fastclip.backends.reference.clamp_`."""
    if isinstance(grads, list):
        result = _offer(grads, 2.0, "clamp_", limit)
        if not isinstance(result, MixedGradients):
            return
        grads = result
    grads.clamp(limit)


def _offer(grads: list[Tensor], norm_type: float, operation: str, *arguments: Any) -> Any:
    """Return what one backend made of the list, or the MixedGradients that no single backend serves.

    Looking at every gradient first would cost more than the call itself, so a backend is offered the list and
    refuses, before it writes anything, what it cannot serve.
    """
    if not isinstance(grads[0], Tensor):
        checks.require_tensor(grads[0], 0)
    backend = select(grads[0].device, norm_type)
    if torch.compiler.is_compiling() and backend is not native:  # only native ops can be part of a graph
        return torch.compiler.disable(_offer)(grads, norm_type, operation, *arguments)
    if backend is not reference:
        try:
            return getattr(backend, operation)(grads, *arguments)
        except (RuntimeError, TypeError) as refusal:
            mixed = MixedGradients(grads, norm_type)
            if mixed.backends == [backend]:
                raise refusal from None
            return mixed
    mixed = MixedGradients(grads, norm_type)
    return getattr(reference, operation)(grads, *arguments) if mixed.backends == [reference] else mixed


@dataclass
class _Part:
    """The gradients of a list that one backend serves on one device."""

    backend: ModuleType
    indices: list[int]
    grads: list[Tensor]


class MixedGradients:
    """A list of tensors, cut by device and by whether the device's backend can take the gradient.

    Raises:
        TypeError, NotImplementedError: a gradient that has no norm.
    """

    def __init__(self, grads: list[Tensor], norm_type: float) -> None:
        checks.require_gradients(grads)
        self.tensors = self.gradients = grads
        parts: dict[tuple[torch.device, bool], _Part] = {}
        for index, grad in enumerate(grads):
            backend = select(grad.device, norm_type) if checks.is_dense(grad) else reference
            part = parts.setdefault((grad.device, backend is reference), _Part(backend, [], []))
            part.indices.append(index)
            part.grads.append(grad)
        self._parts = list(parts.values())

    @property
    def backends(self) -> list[ModuleType]:
        """The backend of each part."""
        return [part.backend for part in self._parts]

    def measure(self, norm_type: float, finite_only: bool) -> Measurement:
        """Measure the parts and gather their rows on the first gradient's device, in the list's order."""
        device = self.tensors[0].device
        rows = [part.backend.grad_stats(part.grads, norm_type, finite_only)[1] for part in self._parts]
        order = torch.tensor([i for part in self._parts for i in part.indices], device=device)
        dtype = reference.accumulation_dtype(device)
        stats = torch.cat([r.to(device, dtype) for r in rows])[order.argsort()]
        return Measurement(stats, stats, norm_type, reference.result_dtype(self.tensors))

    def scale(self, factors: Tensor, zero_nonfinite: bool) -> None:
        """Multiply each part where it lies."""
        self._require_writable()
        for part in self._parts:
            own = factors
            if factors.numel() > 1:
                own = factors[torch.tensor(part.indices, device=factors.device)]
            part.backend.scale_(part.grads, own.to(part.grads[0].device), zero_nonfinite)

    def clamp(self, limit: float) -> None:
        """Limit the elements of each part."""
        checks.require_real(self.tensors)
        self._require_writable()
        for part in self._parts:
            part.backend.clamp_(part.grads, limit)

    def _require_writable(self) -> None:
        """Let every part refuse before any is written: an error must not leave half the list scaled."""
        for part in self._parts:
            if part.backend is reference:
                checks.require_writable(part.grads)
            else:
                part.backend.scale_(part.grads, torch.ones(1, device=part.grads[0].device))
