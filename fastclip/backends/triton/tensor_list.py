# SPDX-License-Identifier: BSD-3-Clause
"""A list of gradients as the Triton kernels take it. All checks run before anything is read or written."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks

CHUNK = 32768
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

# Every replay of a captured graph copies from this memory again: it must never be freed or reused.
_captured_metadata: list[Tensor] = []


class TensorList(NamedTuple):
    """A list of gradients as the kernels take it."""

    metadata: Tensor  # [N, 6] int64; the columns are listed in elements.py
    num_tensors: int
    chunks: int
    steps: int  # upper bound for the steps of the binary search
    rounds: int  # 1 + how often the same memory is repeated
    copies: list[tuple[Tensor, Tensor]]  # gradients with gaps, and their packed copies


def _is_run(grad: Tensor) -> bool:
    """Return whether the elements fill one run of memory, in any order of the dimensions."""
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


def _require_no_overlap(grads: Sequence[Tensor]) -> None:
    """Raise RuntimeError if gradients overlap; for most lists comparing their extents is enough."""
    if all(_is_run(g) for g in grads):
        extents = sorted((g.data_ptr(), g.data_ptr() + g.nbytes) for g in grads if g.numel())
        if all(a[1] <= b[0] for a, b in itertools.pairwise(extents)):
            return
    checks.require_writable(grads)


def _send(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return the metadata on the device, without synchronizing with it."""
    if device.type == "cpu":
        return torch.tensor(rows, dtype=torch.int64)
    # torch does not reuse the pinned block before the stream has executed the copy.
    pinned = torch.tensor(rows, dtype=torch.int64).pin_memory()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured_metadata.append(pinned)
    return pinned.to(device, non_blocking=True)


def build_tensor_list(grads: Sequence[Tensor], indices: Sequence[int], write: bool) -> TensorList:
    """Build the metadata of a list of gradients; `indices` holds the index of each one's group or factor.

    Raises:
        TypeError: a gradient is not a tensor.
        RuntimeError: gradients on several devices, an unsupported dtype or layout, or, with `write`, overlap.
    """
    _require_one_device(grads)
    if write:
        _require_no_overlap(grads)
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
    metadata = _send(rows, grads[0].device)
    return TensorList(metadata, len(rows), chunks, max(1, (len(rows) - 1).bit_length()), rounds, copies)
