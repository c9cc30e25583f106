# SPDX-License-Identifier: BSD-3-Clause
"""What the Triton kernels share: the table, and elements of each dtype.

A gradient is cut into chunks of CHUNK elements, each read by one program and kept in a slot of its own; slots
are summed in a fixed order. Nothing is tuned at run time: that would change the order of summation.

Columns of the table, int64 [N, 6]: address, elements, chunks before it, dtype, index of its group or factor,
how many gradients before it have the very same memory.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(32768)
BLOCK = tl.constexpr(2048)  # a float32 sum takes CHUNK / BLOCK = 16 additions
ROWS = tl.constexpr(1024)
COLUMNS = tl.constexpr(6)
# Below this sum of squares, terms that underflowed in float32 could matter: see csrc/cuda/reduce.cuh.
TINY_SUM = tl.constexpr(2.0**-87)
INFINITY = tl.constexpr(float("inf"))

# Values of the dtype column and of the norm and mode arguments.
FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = (tl.constexpr(i) for i in range(4))
NORM_1, NORM_2, NORM_INF = (tl.constexpr(i) for i in range(3))
PROPAGATE, ZERO, SKIP = (tl.constexpr(i) for i in range(3))


@triton.jit
def find(table, count, steps, chunk):
    """The gradient of a chunk: the last that begins at or before it. Gradients without elements begin where
    their successor does, and are passed over."""
    low = 0
    high = count
    for _ in range(steps):
        middle = (low + high) // 2
        before = tl.load(table + middle * COLUMNS + 2)
        go_on = high - low > 1
        left = before > chunk
        high = tl.where(go_on & left, middle, high)
        low = tl.where(go_on & (left == 0), middle, low)
    return low


@triton.jit
def widen(x, dtype: tl.constexpr, real: tl.constexpr):
    """Elements as numbers to compute with. bfloat16 is handled as int16: its conversions are then the same on
    every device, the interpreter included, whose own are not right."""
    if dtype == BFLOAT16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(real)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """To the elements' type, to nearest, ties to even."""
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
    """The larger of two magnitudes, in which a NaN wins."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def reduce(x, norm: tl.constexpr):
    if norm == NORM_INF:
        # Of magnitudes the order of the bits is that of the values, with NaN above Inf.
        if x.dtype == tl.float64:
            return tl.max(x.to(tl.int64, bitcast=True), 0).to(tl.float64, bitcast=True)
        else:
            return tl.max(x.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)
    else:
        return tl.sum(x, 0)
