# SPDX-License-Identifier: BSD-3-Clause
"""Shared parts of the Triton kernels: the metadata of a list, and access to elements of each dtype.

A gradient is split into chunks of CHUNK elements. One program reads a chunk and stores its partial result;
partials are combined in a fixed order. Nothing is tuned at run time, as the order of summation would change.

Columns of the metadata, int64 [N, 6]: address, number of elements, number of chunks of all earlier gradients,
dtype, index of its group or factor, number of earlier gradients with exactly the same memory.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(32768)
BLOCK = tl.constexpr(2048)  # a float32 sum takes CHUNK / BLOCK = 16 additions
COMBINE_BLOCK = tl.constexpr(1024)  # partials or gradients that a program combines at once
METADATA_COLUMNS = tl.constexpr(6)
# A sum of squares below this may have lost a relevant part to underflow: see csrc/cuda/reduce.cuh.
TINY_SUM = tl.constexpr(2.0**-87)
INFINITY = tl.constexpr(float("inf"))

# Values of the dtype column and of the norm and mode arguments.
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (tl.constexpr(i) for i in range(4))
NORM_1, NORM_2, NORM_INF = (tl.constexpr(i) for i in range(3))
PROPAGATE, ZERO, SKIP = (tl.constexpr(i) for i in range(3))


@triton.jit
def find_tensor(metadata, count, steps, chunk):
    """Return the last gradient whose first chunk is at or before `chunk`.

    Empty gradients share their first chunk with their successor and are never found.
    """
    low = 0
    high = count
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(metadata + middle * METADATA_COLUMNS + 2)
        go_on = high - low > 1
        left = before > chunk
        high = tl.where(go_on & left, middle, high)
        low = tl.where(go_on & (left == 0), middle, low)
    return low


@triton.jit
def widen(x, dtype: tl.constexpr, real: tl.constexpr):
    """Convert elements to `real` for arithmetic.

    bfloat16 is loaded as int16, so that conversions are the same on every device and in the interpreter,
    whose own conversions are wrong.
    """
    if dtype == BFLOAT16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(real)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Convert to the dtype of the elements, rounding to nearest, ties to even."""
    if dtype == BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.int16)
    elif dtype == FLOAT16:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def is_finite(x):
    return x - x == 0


@triton.jit
def item_size(kind):
    return tl.where(kind == FLOAT64, 8, tl.where(kind == FLOAT32, 4, 2))


@triton.jit
def larger(a, b):
    """Return the larger of two magnitudes; NaN is the largest."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def reduce(x, norm: tl.constexpr):
    if norm == NORM_INF:
        # Magnitudes are compared by their bits, which order NaN above Inf.
        if x.dtype == tl.float64:
            return tl.max(x.to(tl.int64, bitcast=True), 0).to(tl.float64, bitcast=True)
        else:
            return tl.max(x.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    else:
        return tl.sum(x, 0)
