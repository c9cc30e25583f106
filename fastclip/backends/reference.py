# SPDX-License-Identifier: BSD-3-Clause
"""The specification: every operation in plain PyTorch, on any device and for any floating dtype.

The other backends are tested against this module. It also serves what they do not support: norms other than
1, 2 and inf, complex gradients and sparse gradients. torch.compile runs it outside its graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import checks

# A piece of this many elements fits the cache as float64, and the allocator reuses its memory.
_PIECE = 1 << 17


def unavailable(device: torch.device) -> str | None:
    """Return None, as this backend serves every device."""
    return None


def result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype of norms: float64 if any gradient is float64 or complex128, else float32."""
    wide = any(g.dtype in (torch.float64, torch.complex128) for g in grads)
    return torch.float64 if wide else torch.float32


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device does not support float64."""
    if device.type == "mps":
        return torch.float32
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def values_of(grad: Tensor) -> Tensor:
    """Return the elements to take a norm of: the coalesced values of a sparse gradient, else the gradient."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _pieces(values: Tensor) -> Iterator[Tensor]:
    """Yield pieces that bound the float64 copy on the CPU; on other devices yield the whole gradient."""
    if values.device.type == "cpu":
        yield from values.reshape(-1).split(_PIECE)
    else:
        yield values


def _power_sum(magnitude: Tensor, norm_type: float) -> Tensor:
    """Return sum(|x| ** p), or the extreme for p = ±inf, or the number of non-zero elements for p = 0."""
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
    """Combine the power sums of disjoint parts along the first dimension."""
    if norm_type == math.inf:
        return parts.amax(0)
    if norm_type == -math.inf:
        return parts.amin(0)
    return parts.sum(0)


def _statistics_of_piece(piece: Tensor, norm_type: float, finite_only: bool) -> Tensor:
    """Return the power sum, NaN count and Inf count of one piece as [3]."""
    magnitude = piece.abs().to(accumulation_dtype(piece.device))
    power_sum = _power_sum(magnitude, norm_type)
    # A finite sum of positive powers holds no NaN and no Inf. On the CPU this check needs no synchronization.
    if piece.device.type == "cpu" and norm_type > 0 and bool(power_sum.isfinite()):
        return torch.nn.functional.pad(power_sum.reshape(1), (0, 2))
    nan, inf = piece.isnan(), piece.isinf()
    if finite_only:
        # The value that does not change a power sum: 0, or Inf for a negative power.
        neutral = math.inf if norm_type < 0 else 0.0
        power_sum = _power_sum(magnitude.masked_fill(nan | inf, neutral), norm_type)
    # A complex element with a NaN part and an Inf part counts as NaN.
    return torch.stack([power_sum, nan.sum().to(power_sum), (inf & ~nan).sum().to(power_sum)])


def _statistics_of(grad: Tensor, norm_type: float, finite_only: bool) -> Tensor:
    """Return the power sum, NaN count and Inf count of one gradient as [3]."""
    pieces = [_statistics_of_piece(p, norm_type, finite_only) for p in _pieces(values_of(grad))]
    if len(pieces) == 1:
        return pieces[0]
    return combine(torch.stack(pieces), norm_type)


def combine(stats: Tensor, norm_type: float) -> Tensor:
    """Combine the rows of [N, 3] into the statistics [3] of all gradients together."""
    return torch.cat([_combine(stats[:, 0], norm_type).reshape(1), stats[:, 1:].sum(0)])


def statistics(grads: Sequence[Tensor], norm_type: float, finite_only: bool = False) -> Tensor:
    """Return the power sum, NaN count and Inf count of each gradient.

    The result is [N, 3] in :func:`accumulation_dtype`.
    """
    return torch.stack([_statistics_of(g, norm_type, finite_only) for g in grads])


def _by_group(column: Tensor, groups: Sequence[int], norm_type: float) -> Tensor:
    """Combine a column [N] group by group into [G]."""
    if not groups:
        return _combine(column, norm_type).reshape(1)
    if groups == range(len(column)):
        return column  # one gradient per group: needs no index on the device
    index = torch.tensor(groups, device=column.device)
    count = max(groups) + 1
    if math.isinf(norm_type):
        reduce = "amax" if norm_type > 0 else "amin"
        start = column.new_full((count,), 0.0 if norm_type > 0 else math.inf)
        return start.scatter_reduce(0, index, column, reduce)
    return column.new_zeros(count).index_add(0, index, column)


def totals(stats: Tensor, norm_type: float, groups: Sequence[int] = ()) -> Tensor:
    """Return the norm of each group, [G], in the dtype of `stats`."""
    if norm_type == 0:
        # As in torch, the 0-norm of the gradients' 0-norms: the number of gradients that are not all zero.
        return _by_group((stats[:, 0] != 0).to(stats.dtype), groups, 1.0)
    powers = _by_group(stats[:, 0], groups, norm_type)
    if norm_type == 1 or math.isinf(norm_type):
        return powers
    return powers.sqrt() if norm_type == 2 else powers.pow(1.0 / norm_type)


def grad_stats(
    grads: Sequence[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Return the norms of the groups, [G], and the statistics of the gradients, [N, 3].

    All gradients are on one device. Column 0 of the statistics is sum(|x| ** norm_type), or the largest |x|
    for inf; with `finite_only` it covers the finite elements only. Columns 1 and 2 count NaN and Inf.
    """
    checks.require_gradients(grads)
    stats = statistics(grads, norm_type, finite_only)
    return totals(stats, norm_type, groups).to(result_dtype(grads)), stats


def clip_coefficient(total_norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """Return min(1, max_norm / (total_norm + 1e-6)), rounded as in torch.nn.utils.clip_grad_norm_."""
    if isinstance(max_norm, Tensor):
        if max_norm.device.type == "cpu" and max_norm.numel() == 1:
            max_norm = max_norm.item()  # a number needs no copy to the device
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
    """Return the total norm, the clip coefficient and found_inf of each group, [G, 3] in `dtype`.

    found_inf is 1 if the group holds NaN or Inf, or if its norm is not finite or its coefficient not >= 0.
    """
    total_norm = totals(stats, norm_type, groups)
    if inv_scale is not None:
        total_norm = total_norm * inv_scale.to(total_norm)
    total_norm = total_norm.to(dtype)
    coef = clip_coefficient(total_norm, max_norm)
    nonfinite = _by_group(stats[:, 1] + stats[:, 2], groups, 1.0) > 0
    found_inf = nonfinite | ~total_norm.isfinite() | ~(coef >= 0)
    return torch.stack([total_norm, coef, found_inf.to(dtype)], 1)


def factors(summary: Tensor, nonfinite: str, groups: Sequence[int], inv_scale: Tensor | None) -> Tensor:
    """Return the factors of the gradients in the given `nonfinite` mode: [1] for all, or [N]."""
    factor = summary[:, 1]
    if inv_scale is not None:
        factor = factor * inv_scale.to(factor)
    if nonfinite == "skip":
        factor = torch.where((summary[:, 2] > 0).any(), 1.0, factor)
    if not groups:
        return factor
    return factor[torch.tensor(groups, device=factor.device)]


def scale_(grads: Sequence[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """Multiply in place by one factor, [1], or by one factor per gradient, [N].

    With `zero_nonfinite`, NaN and Inf become 0 whatever the factor.
    """
    checks.require_gradients(grads)
    checks.require_writable(grads)
    each = scale.reshape(-1).expand(len(grads)) if scale.numel() == 1 else scale
    for grad, factor in zip(grads, each.unbind(), strict=True):
        values = grad._values() if grad.is_sparse else grad
        if zero_nonfinite:
            values.masked_fill_(~values.isfinite(), 0)
        # On the CPU reading the factor is free, and a factor of 1 saves a pass over the gradient.
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
    """Clip the gradients in place; return the summary, [G, 3], and the statistics, [N, 3].

    The columns of the summary are those of :func:`summarize`, those of the statistics those of
    :func:`grad_stats`.
    """
    checks.require_gradients(grads)
    checks.require_writable(grads)
    stats = statistics(grads, norm_type, nonfinite == "zero")
    summary = summarize(stats, norm_type, max_norm, groups, inv_scale, result_dtype(grads))
    scale_(grads, factors(summary, nonfinite, groups, inv_scale), nonfinite == "zero")
    return summary, stats


def clamp_(grads: Sequence[Tensor], limit: float) -> None:
    """Clamp every element to [-limit, limit] in place; NaN stays, and a NaN limit makes all elements NaN."""
    checks.require_gradients(grads)
    checks.require_writable(grads)
    checks.require_real(grads)
    for grad in grads:
        if grad.is_sparse and not grad.is_coalesced():
            grad.copy_(grad.coalesce())  # duplicates are summed before they are clamped
        values = grad._values() if grad.is_sparse else grad
        values.clamp_min_(-limit).clamp_max_(limit)
