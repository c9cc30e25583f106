# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels that read: sums of powers, maxima and counts, of chunks and then of gradients."""

import triton
import triton.language as tl

from .elements import (
    BFLOAT16,
    BLOCK,
    CHUNK,
    COLUMNS,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INFINITY,
    NORM_1,
    NORM_2,
    NORM_INF,
    ROWS,
    TINY_SUM,
    find,
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
def _carefully(
    pointer,
    size,
    norm: tl.constexpr,
    dtype: tl.constexpr,
    real: tl.constexpr,
    wide: tl.constexpr,
    finite_only,
):
    """The second reading of a chunk whose sum cannot be trusted: counts exactly, sums in `wide`."""
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
def _chunk_statistics(
    address,
    size,
    norm: tl.constexpr,
    dtype: tl.constexpr,
    element: tl.constexpr,
    real: tl.constexpr,
    wide: tl.constexpr,
    finite_only,
):
    """Value, NaN count and Inf count of the elements of one chunk."""
    pointer = address.to(tl.pointer_type(element))
    total = tl.zeros([BLOCK], real)
    seen = tl.zeros([BLOCK], tl.int1)
    if (size == CHUNK) & (address % 16 == 0):
        # Unmasked and known to be aligned, or the loads are not of 16 bytes.
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
        value, nan_count, inf_count = _carefully(pointer, size, norm, dtype, real, wide, finite_only)
    return value, nan_count, inf_count


@triton.jit(do_not_specialize=["count", "steps", "finite_only"])
def statistics(table, count, steps, slots, counts, finite_only, norm: tl.constexpr, wide: tl.constexpr):
    """One program a chunk: slots [chunks] in `wide`, counts [chunks, 2] in int32."""
    chunk = tl.program_id(0).to(tl.int64)
    row = table + find(table, count, steps, chunk) * COLUMNS
    number = chunk - tl.load(row + 2)
    size = tl.minimum(tl.load(row + 1) - number * CHUNK, CHUNK).to(tl.int32)
    kind = tl.load(row + 3)
    address = tl.load(row) + number * CHUNK * item_size(kind)
    value = tl.zeros([], wide)
    nans = 0
    infs = 0
    if kind == FLOAT32:
        value, nans, infs = _chunk_statistics(
            address, size, norm, FLOAT32, tl.float32, tl.float32, wide, finite_only
        )
    elif kind == BFLOAT16:
        value, nans, infs = _chunk_statistics(
            address, size, norm, BFLOAT16, tl.int16, tl.float32, wide, finite_only
        )
    elif kind == FLOAT16:
        value, nans, infs = _chunk_statistics(
            address, size, norm, FLOAT16, tl.float16, tl.float32, wide, finite_only
        )
    elif wide == tl.float64:
        value, nans, infs = _chunk_statistics(
            address, size, norm, FLOAT64, tl.float64, tl.float64, wide, finite_only
        )
    tl.store(slots + chunk, value)
    tl.store(counts + 2 * chunk, nans)
    tl.store(counts + 2 * chunk + 1, infs)


@triton.jit(do_not_specialize=["count", "chunks"])
def rows(table, count, chunks, slots, counts, stats, norm: tl.constexpr, wide: tl.constexpr):
    """One program a gradient: stats [N, 3] in `wide`."""
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(table + tensor * COLUMNS + 2)
    end = tl.load(table + (tensor + 1) * COLUMNS + 2, mask=tensor + 1 < count, other=0)
    end = tl.where(tensor + 1 < count, end, chunks)
    total = tl.zeros([ROWS], wide)
    nans = tl.zeros([ROWS], tl.int64)
    infs = tl.zeros([ROWS], tl.int64)
    for start in range(first, end, ROWS):
        at = start + tl.arange(0, ROWS)
        inside = at < end
        value = tl.load(slots + at, mask=inside, other=0.0)
        total = larger(total, value) if norm == NORM_INF else total + value
        nans += tl.load(counts + 2 * at, mask=inside, other=0)
        infs += tl.load(counts + 2 * at + 1, mask=inside, other=0)
    tl.store(stats + 3 * tensor, reduce(total, norm))
    tl.store(stats + 3 * tensor + 1, tl.sum(nans, 0).to(wide))
    tl.store(stats + 3 * tensor + 2, tl.sum(infs, 0).to(wide))
