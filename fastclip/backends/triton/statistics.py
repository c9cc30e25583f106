# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels that read: power sums, maxima and counts of chunks and then of gradients."""

import triton
import triton.language as tl

from .elements import (
    BFLOAT16,
    BLOCK,
    CHUNK,
    COMBINE_BLOCK,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INFINITY,
    METADATA_COLUMNS,
    NORM_1,
    NORM_2,
    NORM_INF,
    TINY_SUM,
    find_tensor,
    is_finite,
    item_size,
    larger,
    reduce,
    widen,
)


@triton.jit
def _add_power(total, x, norm: tl.constexpr):
    magnitude = tl.abs(x)
    if norm == NORM_1:
        return total + magnitude
    elif norm == NORM_2:
        return total + magnitude * magnitude
    else:
        return larger(total, magnitude)


@triton.jit
def _reduce_exact(
    pointer,
    size,
    norm: tl.constexpr,
    dtype: tl.constexpr,
    real: tl.constexpr,
    wide: tl.constexpr,
    finite_only,
):
    """Read a chunk again whose fast sum is not reliable: count NaN and Inf, and sum in `wide`."""
    total = tl.zeros([BLOCK], wide)
    nans = tl.zeros([BLOCK], tl.int32)
    infs = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = widen(tl.load(pointer + offsets, mask=offsets < size, other=0), dtype, real)
        finite = is_finite(x)
        nan = x != x
        nans += nan.to(tl.int32)
        infs += ((finite == 0) & (nan == 0)).to(tl.int32)
        total = _add_power(total, tl.where(finite, x, 0.0).to(wide), norm)
    nan_count = tl.sum(nans, 0)
    inf_count = tl.sum(infs, 0)
    value = reduce(total, norm)
    if finite_only == 0:
        value = tl.where(inf_count > 0, INFINITY, value).to(wide)
        value = tl.where(nan_count > 0, float("nan"), value).to(wide)
    return value, nan_count, inf_count


@triton.jit
def _reduce_chunk(
    address,
    size,
    norm: tl.constexpr,
    dtype: tl.constexpr,
    element: tl.constexpr,
    real: tl.constexpr,
    wide: tl.constexpr,
    finite_only,
):
    """Return the value, NaN count and Inf count of one chunk."""
    pointer = address.to(tl.pointer_type(element))
    total = tl.zeros([BLOCK], real)
    seen = tl.zeros([BLOCK], tl.int1)
    if (size == CHUNK) & (address % 16 == 0):
        # Only unmasked loads from an address known to be aligned become loads of 16 bytes.
        aligned = tl.multiple_of(pointer, 16)
        for start in range(0, CHUNK, BLOCK):
            x = widen(tl.load(aligned + start + tl.arange(0, BLOCK)), dtype, real)
            total = _add_power(total, x, norm)
            seen = seen | (x != 0)
    else:
        for start in range(0, size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = widen(tl.load(pointer + offsets, mask=offsets < size, other=0), dtype, real)
            total = _add_power(total, x, norm)
            seen = seen | (x != 0)
    value = reduce(total.to(wide), norm)
    nan_count = 0
    inf_count = 0
    suspicious = is_finite(value) == 0
    if norm == NORM_2 and real == tl.float32:
        suspicious = suspicious | ((value < TINY_SUM) & (tl.max(seen.to(tl.int32), 0) > 0))
    if suspicious:
        value, nan_count, inf_count = _reduce_exact(pointer, size, norm, dtype, real, wide, finite_only)
    return value, nan_count, inf_count


@triton.jit(do_not_specialize=["count", "steps", "finite_only"])
def chunk_statistics(
    metadata, count, steps, partials, counts, finite_only, norm: tl.constexpr, wide: tl.constexpr
):
    """Compute partials [chunks] in `wide` and counts [chunks, 2] in int32, one program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    row = metadata + find_tensor(metadata, count, steps, chunk) * METADATA_COLUMNS
    number = chunk - tl.load(row + 2)
    size = tl.minimum(tl.load(row + 1) - number * CHUNK, CHUNK).to(tl.int32)
    kind = tl.load(row + 3)
    address = tl.load(row) + number * CHUNK * item_size(kind)
    value = tl.zeros([], wide)
    nans = 0
    infs = 0
    if kind == FLOAT32:
        value, nans, infs = _reduce_chunk(
            address, size, norm, FLOAT32, tl.float32, tl.float32, wide, finite_only
        )
    elif kind == BFLOAT16:
        value, nans, infs = _reduce_chunk(
            address, size, norm, BFLOAT16, tl.int16, tl.float32, wide, finite_only
        )
    elif kind == FLOAT16:
        value, nans, infs = _reduce_chunk(
            address, size, norm, FLOAT16, tl.float16, tl.float32, wide, finite_only
        )
    elif wide == tl.float64:
        value, nans, infs = _reduce_chunk(
            address, size, norm, FLOAT64, tl.float64, tl.float64, wide, finite_only
        )
    tl.store(partials + chunk, value)
    tl.store(counts + 2 * chunk, nans)
    tl.store(counts + 2 * chunk + 1, infs)


@triton.jit(do_not_specialize=["count", "chunks"])
def tensor_statistics(
    metadata, count, chunks, partials, counts, stats, norm: tl.constexpr, wide: tl.constexpr
):
    """Combine the chunks of each gradient into stats [N, 3] in `wide`, one program per gradient."""
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(metadata + tensor * METADATA_COLUMNS + 2)
    end = tl.load(metadata + (tensor + 1) * METADATA_COLUMNS + 2, mask=tensor + 1 < count, other=0)
    end = tl.where(tensor + 1 < count, end, chunks)
    total = tl.zeros([COMBINE_BLOCK], wide)
    nans = tl.zeros([COMBINE_BLOCK], tl.int64)
    infs = tl.zeros([COMBINE_BLOCK], tl.int64)
    for start in range(first, end, COMBINE_BLOCK):
        at = start + tl.arange(0, COMBINE_BLOCK)
        inside = at < end
        value = tl.load(partials + at, mask=inside, other=0.0)
        total = larger(total, value) if norm == NORM_INF else total + value
        nans += tl.load(counts + 2 * at, mask=inside, other=0)
        infs += tl.load(counts + 2 * at + 1, mask=inside, other=0)
    tl.store(stats + 3 * tensor, reduce(total, norm))
    tl.store(stats + 3 * tensor + 1, tl.sum(nans, 0).to(wide))
    tl.store(stats + 3 * tensor + 2, tl.sum(infs, 0).to(wide))
