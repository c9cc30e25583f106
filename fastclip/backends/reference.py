# SPDX-License-Identifier: BSD-3-Clause
"""The specification: every operation in plain PyTorch, on any device and for any floating dtype.

The other backends are held against this module. It also serves what they leave to it: norms other than
1, 2 and inf, complex gradients and sparse ones. torch.compile runs it as it is, outside of its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import checks

# A piece of this many elements lies in the cache as float64, and its memory is reused and not mapped anew.
_PIECE = 1 << 17


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot serve the device: it serves every device."""
    return None


def result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    """The dtype in which norms are told: float64 if any gradient is float64 or complex128, else float32."""
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.float64 if wide else torch.float32


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no float64."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def values_of(grad: Tensor) -> Tensor:
    """The elements to take a norm of: the summed values of a sparse gradient, else the gradient."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """Bounds the float64 copy on the CPU; elsewhere one kernel reads a whole gradient."""
    if values.device.type == "cpu":
        yield from values.reshape(-1).split(_PIECE)
    else:
        yield values


def _power_sum(magnitude: Tensor, norm_type: float) -> Tensor:
    """sum(|x| ** p); the extreme for p = ±inf, the number of non-zero elements for p = 0."""
    if magnitude.numel() == 0:
        return magnitude.new_full((), math.inf if norm_type == -math.inf else 0.0)
    if norm_type == math.inf:
        return magnitude.amax()
    if norm_type == -math.inf:
        return magnitude.amin()
    if norm_type == 0:
        # A NaN counts as non-zero, as in torch.linalg.vector_norm.
        return (magnitude != 0).sum().to(magnitude.dtype)
    if norm_type == 1:
        return magnitude.sum()
    if norm_type == 2:
        return (magnitude * magnitude).sum()
    return magnitude.pow(norm_type).sum()


def _combine(parts: Tensor, norm_type: float) -> Tensor:
    """Power sums of disjoint parts, combined along the first dimension."""
    if norm_type == math.inf:
        return parts.amax(0)
    if norm_type == -math.inf:
        return parts.amin(0)
    return parts.sum(0)


def _statistics_of_piece(piece: Tensor, norm_type: float, finite_only: bool) -> Tensor:
    """[3]: power sum, NaN count, Inf count."""
    magnitude = piece.abs().to(accumulation_dtype(piece.device))
    power_sum = _power_sum(magnitude, norm_type)
    # A finite sum of positive powers holds no NaN and no Inf; on the CPU a look at it costs no waiting.
    if piece.device.type == "cpu" and norm_type > 0 and bool(power_sum.isfinite()):
        return torch.nn.functional.pad(power_sum.reshape(1), (0, 2))
    nan, inf = piece.isnan(), piece.isinf()
    if finite_only:
        # What replaces a dropped element adds nothing: 0, or Inf under a negative power.
        neutral = math.inf if norm_type < 0 else 0.0
        power_sum = _power_sum(magnitude.masked_fill(nan | inf, neutral), norm_type)
    # An element that is NaN in one part and Inf in the other, of a complex number, is a NaN.
    return torch.stack([power_sum, nan.sum().to(power_sum), (inf & ~nan).sum().to(power_sum)])


def _statistics_of(grad: Tensor, norm_type: float, finite_only: bool) -> Tensor:
    """[3]: power sum, NaN count, Inf count of one gradient."""
    pieces = [_statistics_of_piece(p, norm_type, finite_only) for p in _pieces(values_of(grad))]
    if len(pieces) == 1:
        return pieces[0]
    return combine(torch.stack(pieces), norm_type)


def combine(stats: Tensor, norm_type: float) -> Tensor:
    """[3]: the statistics of all rows of [N, 3] together."""
    return torch.cat([_combine(stats[:, 0], norm_type).reshape(1), stats[:, 1:].sum(0)])


def statistics(grads: Sequence[Tensor], norm_type: float, finite_only: bool = False) -> Tensor:
    """[N, 3] in :func:`accumulation_dtype`: power sum, NaN count and Inf count of each gradient."""
    return torch.stack([_statistics_of(g, norm_type, finite_only) for g in grads])


def _by_group(column: Tensor, groups: Sequence[int], norm_type: float) -> Tensor:
    """[G]: the column of [N] combined group by group."""
    if not groups:
        return _combine(column, norm_type).reshape(1)
    if groups == range(len(column)):
        return column  # each its own group: no index to be sent to the device
    index = torch.tensor(groups, device=column.device)
    count = max(groups) + 1
    if math.isinf(norm_type):
        reduce = "amax" if norm_type > 0 else "amin"
        start = column.new_full((count,), 0.0 if norm_type > 0 else math.inf)
        return start.scatter_reduce(0, index, column, reduce)
    return column.new_zeros(count).index_add(0, index, column)


def totals(stats: Tensor, norm_type: float, groups: Sequence[int] = ()) -> Tensor:
    """[G]: the norm of each group, in the dtype of `stats`."""
    if norm_type == 0:
        # torch takes the 0-norm of the gradients' 0-norms: the number of gradients that are not all zero.
        return _by_group((stats[:, 0] != 0).to(stats.dtype), groups, 1.0)
    powers = _by_group(stats[:, 0], groups, norm_type)
    if norm_type == 1 or math.isinf(norm_type):
        return powers
    return powers.sqrt() if norm_type == 2 else powers.pow(1.0 / norm_type)


def grad_stats(
    grads: Sequence[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Norms of the groups, [G], and statistics of the gradients, [N, 3]. All gradients on one device.

    Column 0 of the statistics is sum(|x| ** norm_type), or the largest |x| for inf; with `finite_only` that
    of the finite elements. Columns 1 and 2 count NaN and Inf.
    """
    checks.require_gradients(grads)
    stats = statistics(grads, norm_type, finite_only)
    return totals(stats, norm_type, groups).to(result_dtype(grads)), stats


def clip_coefficient(total_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """min(1, max_norm / (total_norm + 1e-6)), with the rounding of torch.nn.utils.clip_grad_norm_."""
    if isinstance(max_norm, Tensor):
        if max_norm.device.type == "cpu" and max_norm.numel() == 1:
            max_norm = max_norm.item()  # as a number it reaches any device without a copy
        else:
            max_norm = max_norm.to(total_norm)
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def summarize(
    stats: Tensor,
    norm_type: float,
    max_norm: float | Tensor,
    groups: Sequence[int],
    inv_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[G, 3] in `dtype`: total norm, clip coefficient, and 1 where the group must not be applied."""
    total_norm = totals(stats, norm_type, groups)
    if inv_scale is not None:
        total_norm = total_norm * inv_scale.to(total_norm)
    total_norm = total_norm.to(dtype)
    coef = clip_coefficient(total_norm, max_norm)
    nonfinite = _by_group(stats[:, 1] + stats[:, 2], groups, 1.0) > 0
    found_inf = nonfinite | ~total_norm.isfinite() | ~(coef >= 0)
    return torch.stack([total_norm, coef, found_inf.to(dtype)], 1)


def factors(summary: Tensor, nonfinite: str, groups: Sequence[int], inv_scale: Tensor | None) -> Tensor:
    """[1] or [N]: what each gradient is multiplied with under the `nonfinite` mode."""
    factor = summary[:, 1]
    if inv_scale is not None:
        factor = factor * inv_scale.to(factor)
    if nonfinite == "skip":
        factor = torch.where((summary[:, 2] > 0).any(), 1.0, factor)
    if not groups:
        return factor
    return factor[torch.tensor(groups, device=factor.device)]


def scale_(grads: Sequence[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """Multiply in place by one factor, or by one factor a gradient, [N]; see the module of the ops."""
    checks.require_gradients(grads)
    checks.require_writable(grads)
    each = scale.reshape(-1).expand(len(grads)) if scale.numel() == 1 else scale
    for grad, factor in zip(grads, each.unbind(), strict=True):
        values = grad._values() if grad.is_sparse else grad
        if zero_nonfinite:
            values.masked_fill_(~values.isfinite(), 0)
        # Reading the factor costs nothing on the CPU, and saves a pass over the gradient.
        if factor.device.type != "cpu" or factor != 1:
            values.mul_(factor)


def clip_(
    grads: Sequence[Tensor],
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Statistics, coefficient and scaling. Returns the summary, [G, 3], and the statistics, [N, 3]."""
    checks.require_gradients(grads)
    checks.require_writable(grads)
    stats = statistics(grads, norm_type, nonfinite == "zero")
    summary = summarize(stats, norm_type, max_norm, groups, inv_scale, result_dtype(grads))
    scale_(grads, factors(summary, nonfinite, groups, inv_scale), nonfinite == "zero")
    return summary, stats


def clamp_(grads: Sequence[Tensor], limit: float) -> None:
    """Limit every element to [-limit, limit] in place; NaN stays, a NaN limit makes everything NaN."""
    checks.require_gradients(grads)
    checks.require_writable(grads)
    checks.require_real(grads)
    for grad in grads:
        if grad.is_sparse and not grad.is_coalesced():
            grad.copy_(grad.coalesce())  # duplicates are summed before they are limited
        values = grad._values() if grad.is_sparse else grad
        values.clamp_min_(-limit).clamp_max_(limit)
