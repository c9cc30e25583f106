# SPDX-License-Identifier: BSD-3-Clause
"""The Triton kernels that write: scaling and clamping."""

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
    METADATA_COLUMNS,
    SKIP,
    ZERO,
    find_tensor,
    is_finite,
    item_size,
    narrow,
    widen,
)


@triton.jit
def _may_write(summary, groups, mode: tl.constexpr):
    """Return whether gradients may be written: not in the mode SKIP if a group of `summary` has found_inf."""
    bad = 0
    if mode == SKIP:
        for start in range(0, groups, COMBINE_BLOCK):
            at = start + tl.arange(0, COMBINE_BLOCK)
            found = tl.load(summary + 3 * at + 2, mask=at < groups, other=0.0)
            bad += tl.sum((found > 0).to(tl.int32), 0)
    return bad == 0


@triton.jit
def _scale_chunk(address, size, factor, zero, dtype: tl.constexpr, element: tl.constexpr, real: tl.constexpr):
    pointer = address.to(tl.pointer_type(element))
    own = factor.to(real)
    if (size == CHUNK) & (address % 16 == 0):
        aligned = tl.multiple_of(pointer, 16)
        for start in range(0, CHUNK, BLOCK):
            place = aligned + start + tl.arange(0, BLOCK)
            x = widen(tl.load(place), dtype, real)
            y = tl.where((zero != 0) & (is_finite(x) == 0), 0.0, x * own)
            tl.store(place, narrow(y, dtype))
    else:
        for start in range(0, size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = widen(tl.load(pointer + offsets, mask=offsets < size, other=0), dtype, real)
            y = tl.where((zero != 0) & (is_finite(x) == 0), 0.0, x * own)
            tl.store(pointer + offsets, narrow(y, dtype), mask=offsets < size)


@triton.jit(do_not_specialize=["count", "steps", "chunks", "groups", "repeat", "factor_stride"])
def scale(
    metadata,
    count,
    steps,
    chunks,
    factors,
    summary,
    groups,
    counts,
    repeat,
    factor_stride,
    mode: tl.constexpr,
    counted: tl.constexpr,
    wide: tl.constexpr,
):
    """Scale the gradients, one program per chunk.

    Programs go from the last chunk to the first: what the statistics read last is still in the cache. A chunk
    whose factor is 1 is not read. In the mode ZERO non-finite elements become 0, in all chunks or, with
    `counted`, in those whose `counts` are not 0.
    """
    chunk = chunks - 1 - tl.program_id(0).to(tl.int64)
    row = metadata + find_tensor(metadata, count, steps, chunk) * METADATA_COLUMNS
    factor = tl.load(factors + tl.load(row + 4) * factor_stride)
    zero = 0
    if mode == ZERO:
        zero = 1
        if counted:
            zero = ((tl.load(counts + 2 * chunk) + tl.load(counts + 2 * chunk + 1)) > 0).to(tl.int32)
    own = tl.load(row + 5) == repeat
    if own & ((factor != 1) | (zero != 0)):
        if _may_write(summary, groups, mode):
            number = chunk - tl.load(row + 2)
            size = tl.minimum(tl.load(row + 1) - number * CHUNK, CHUNK).to(tl.int32)
            kind = tl.load(row + 3)
            address = tl.load(row) + number * CHUNK * item_size(kind)
            if kind == FLOAT32:
                _scale_chunk(address, size, factor, zero, FLOAT32, tl.float32, tl.float32)
            elif kind == BFLOAT16:
                _scale_chunk(address, size, factor, zero, BFLOAT16, tl.int16, tl.float32)
            elif kind == FLOAT16:
                _scale_chunk(address, size, factor, zero, FLOAT16, tl.float16, tl.float32)
            elif wide == tl.float64:
                _scale_chunk(address, size, factor, zero, FLOAT64, tl.float64, tl.float64)


@triton.jit
def _clamp_chunk(address, size, limit, dtype: tl.constexpr, element: tl.constexpr, real: tl.constexpr):
    """Write only the elements outside the limit; NaN compares false and stays."""
    pointer = address.to(tl.pointer_type(element))
    # torch compares with the limit rounded to the elements' dtype.
    high = widen(narrow(limit.to(real), dtype), dtype, real)
    if (size == CHUNK) & (address % 16 == 0):
        aligned = tl.multiple_of(pointer, 16)
        for start in range(0, CHUNK, BLOCK):
            place = aligned + start + tl.arange(0, BLOCK)
            x = widen(tl.load(place), dtype, real)
            y = tl.where(x > high, high, -tl.abs(high))
            tl.store(place, narrow(y, dtype), mask=tl.abs(x) > high)
    else:
        for start in range(0, size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < size
            x = widen(tl.load(pointer + offsets, mask=inside, other=0), dtype, real)
            y = tl.where(x > high, high, -tl.abs(high))
            tl.store(pointer + offsets, narrow(y, dtype), mask=inside & (tl.abs(x) > high))


@triton.jit(do_not_specialize=["count", "steps"])
def clamp(metadata, count, steps, limit, wide: tl.constexpr):
    """Clamp the gradients to a tensor `limit` of one element, one program per chunk."""
    chunk = tl.program_id(0).to(tl.int64)
    row = metadata + find_tensor(metadata, count, steps, chunk) * METADATA_COLUMNS
    number = chunk - tl.load(row + 2)
    size = tl.minimum(tl.load(row + 1) - number * CHUNK, CHUNK).to(tl.int32)
    kind = tl.load(row + 3)
    address = tl.load(row) + number * CHUNK * item_size(kind)
    bound = tl.load(limit)
    if kind == FLOAT32:
        _clamp_chunk(address, size, bound, FLOAT32, tl.float32, tl.float32)
    elif kind == BFLOAT16:
        _clamp_chunk(address, size, bound, BFLOAT16, tl.int16, tl.float32)
    elif kind == FLOAT16:
        _clamp_chunk(address, size, bound, FLOAT16, tl.float16, tl.float32)
    elif wide == tl.float64:
        _clamp_chunk(address, size, bound, FLOAT64, tl.float64, tl.float64)
