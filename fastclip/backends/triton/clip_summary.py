# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernel that computes norms and clip coefficients from the statistics of gradients."""

import triton
import triton.language as tl

from .elements import COMBINE_BLOCK, METADATA_COLUMNS, NORM_2, NORM_INF, is_finite, larger, reduce


@triton.jit
def _root(x):
    """Return the square root rounded to nearest, which tl.sqrt of a float32 may not be."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def _divide(a, b):
    """Return the quotient rounded to nearest, which `/` of float32 may not be."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit(do_not_specialize=["count", "max_norm_stride"])
def summarize(
    metadata,
    count,
    stats,
    max_norms,
    inv_scale,
    result,
    factors,
    max_norm_stride,
    norm: tl.constexpr,
    wide: tl.constexpr,
    real: tl.constexpr,
    clip: tl.constexpr,
    max_norm_is_tensor: tl.constexpr,
):
    """Compute the norm of each group or, with `clip`, its summary and its factor; one program per group."""
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COMBINE_BLOCK], wide)
    nonfinite = tl.zeros([COMBINE_BLOCK], wide)
    for start in range(0, count, COMBINE_BLOCK):
        at = start + tl.arange(0, COMBINE_BLOCK).to(tl.int64)
        inside = at < count
        own = inside & (tl.load(metadata + at * METADATA_COLUMNS + 4, mask=inside, other=-1) == group)
        value = tl.load(stats + 3 * at, mask=own, other=0.0)
        total = larger(total, value) if norm == NORM_INF else total + value
        nonfinite += tl.load(stats + 3 * at + 1, mask=own, other=0.0)
        nonfinite += tl.load(stats + 3 * at + 2, mask=own, other=0.0)
    sum_of_group = reduce(total, norm)
    value = _root(sum_of_group.to(wide)) if norm == NORM_2 else sum_of_group
    if clip:
        unscale = tl.load(inv_scale)
        total_norm = (value * unscale).to(real)
        limit = tl.load(max_norms + group * max_norm_stride).to(real)
        padded = total_norm + tl.full([], 1e-6, real)
        one = tl.full([], 1.0, real)
        # As in torch, a number is multiplied by a reciprocal and a tensor is divided.
        coef = _divide(limit, padded) if max_norm_is_tensor else _divide(one, padded) * limit
        coef = tl.where(coef > 1.0, one, coef)
        usable = (tl.sum(nonfinite, 0) == 0) & is_finite(total_norm) & (coef >= 0.0)
        tl.store(result + 3 * group, total_norm)
        tl.store(result + 3 * group + 1, coef)
        tl.store(result + 3 * group + 2, tl.where(usable, 0.0, 1.0).to(real))
        tl.store(factors + group, (coef * unscale.to(real)).to(wide))
    else:
        tl.store(result + group, value.to(real))
