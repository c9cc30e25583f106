# SPDX-License-Identifier: BSD-3-Clause
"""A list of gradients as the Triton kernels take it, checked before anything is read or written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks

CHUNK = 32768
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

# Copies into a captured graph read their source again at every replay: it must never be freed or reused.
_captured_tables: list[Tensor] = []


class GradientList(NamedTuple):
    """A list of gradients as the kernels take it. `steps` bounds the binary search."""

    table: Tensor  # [N, 6] int64, see the kernels
    num_grads: int
    chunks: int
    steps: int
    rounds: int
    copies: list[tuple[Tensor, Tensor]]  # gradients with gaps, and the packed copies that stand for them


def _is_run(grad: Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order of the dimensions."""
    if grad.is_contiguous():
        return True
    expected = 1
    dims = [(stride, size) for stride, size in zip(grad.stride(), grad.shape, strict=True) if size != 1]
    for stride, size in sorted(dims):
        if stride != expected:
            return False
        expected *= size
    return True


def _require_one_device(grads: Sequence[Tensor]) -> None:
    checks.require_tensor(grads[0], 0)
    device = grads[0].device
    for index, grad in enumerate(grads):
        checks.require_tensor(grad, index)
        if grad.device != device or not checks.is_dense(grad):
            raise RuntimeError(
                f"expected dense float32, bfloat16, float16 or float64 gradients on {device}, but got "
                f"{checks.describe(index, grad)}"
            )


def _require_apart(grads: Sequence[Tensor]) -> None:
    """Raise RuntimeError if gradients overlap; most lists are seen to be apart by their extents alone."""
    if all(_is_run(g) for g in grads):
        extents = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in grads if g.numel())
        if all(a[1] <= b[0] for a, b in itertools.pairwise(extents)):
            return
    checks.require_writable(grads)


def _send(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """The table on the device, without waiting for it."""
    if device.type == "cpu":
        return torch.tensor(rows, dtype=torch.int64)
    # torch keeps the pinned block from reuse until the stream has passed the copy.
    pinned = torch.tensor(rows, dtype=torch.int64).pin_memory()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured_tables.append(pinned)
    return pinned.to(device, non_blocking=True)


def prepare(grads: Sequence[Tensor], indices: Sequence[int], write: bool) -> GradientList:
    """The table of a list. Errors come here, before anything is written."""
    _require_one_device(grads)
    if write:
        _require_apart(grads)
    rows: list[tuple[int, ...]] = []
    copies: list[tuple[Tensor, Tensor]] = []
    chunks = 0
    seen: dict[tuple, int] = {}
    packed: dict[tuple, Tensor] = {}
    for grad, index in zip(grads, indices, strict=True):
        place = (grad.data_ptr(), grad.shape, grad.stride(), grad.dtype)
        repeat = seen.get(place, 0) if write and grad.numel() else 0
        seen[place] = repeat + 1
        run = grad
        if not _is_run(grad):
            if place not in packed:
                packed[place] = grad.contiguous()
                copies.append((grad, packed[place]))
            run = packed[place]
        rows.append((run.data_ptr(), grad.numel(), chunks, _DTYPES[grad.dtype], index, repeat))
        chunks += -(-grad.numel() // CHUNK)
    rounds = 1 + max(row[5] for row in rows)
    table = _send(rows, grads[0].device)
    return GradientList(table, len(rows), chunks, max(1, (len(rows) - 1).bit_length()), rounds, copies)
