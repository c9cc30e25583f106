# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a list of gradients; errors name the index, shape, dtype and device of the offending gradient."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

DENSE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_COMPLEX_DTYPES = frozenset({torch.complex32, torch.complex64, torch.complex128})


def describe(index: int, grad: Tensor) -> str:
    """Return the description of one gradient for an error message."""
    return f"gradient {index} with shape {list(grad.shape)}, dtype {grad.dtype} on {grad.device}"


def is_dense(grad: Tensor) -> bool:
    """Return whether the kernels support the dtype and layout of this gradient."""
    return grad.layout == torch.strided and grad.dtype in DENSE_DTYPES


def require_tensor(grad: object, index: int) -> None:
    """Raise TypeError unless the gradient is a tensor."""
    if not isinstance(grad, Tensor):
        raise TypeError(
            f"expected gradients to be tensors, but got {type(grad).__name__} as gradient {index}"
        )


def require_gradients(grads: Sequence[Tensor]) -> None:
    """Raise unless all gradients are plain tensors whose dtype and layout are supported.

    Raises:
        TypeError: a gradient is not a tensor, or its dtype or layout is not supported.
        NotImplementedError: a gradient is a DTensor.
    """
    for index, grad in enumerate(grads):
        require_tensor(grad, index)
        if type(grad).__name__ == "DTensor":
            raise NotImplementedError(
                "expected plain tensors inside torch.compile, but got a DTensor as "
                f"{describe(index, grad)}; clip sharded gradients outside the compiled function"
            )
        if grad.dtype not in DENSE_DTYPES and grad.dtype not in _COMPLEX_DTYPES:
            raise TypeError(
                "expected float32, bfloat16, float16, float64 or complex gradients, but got "
                f"{describe(index, grad)}"
            )
        if grad.layout not in (torch.strided, torch.sparse_coo):
            raise TypeError(
                f"expected strided or sparse COO gradients, but got layout {grad.layout} for "
                f"{describe(index, grad)}"
            )


def require_real(grads: Sequence[Tensor]) -> None:
    """Raise NotImplementedError for a complex gradient, as complex numbers are not ordered."""
    for index, grad in enumerate(grads):
        if grad.is_complex():
            raise NotImplementedError(
                f"expected real gradients to clip by value, but got {describe(index, grad)}"
            )


def _extent(grad: Tensor) -> tuple[int, int]:
    """Return the first byte of a gradient and the one past its last, as offsets into its storage."""
    last = sum((size - 1) * stride for size, stride in zip(grad.shape, grad.stride(), strict=True))
    begin = int(grad.storage_offset()) * grad.element_size()
    return begin, begin + (last + 1) * grad.element_size()


def _overlapping(grads: Sequence[Tensor], indices: list[int]) -> tuple[int, int] | None:
    """Return the indices of two gradients of one storage that overlap, or None; marks every byte used."""
    owner = torch.full((grads[indices[0]].untyped_storage().nbytes(),), -1, dtype=torch.int32)
    for index in indices:
        grad = grads[index]
        size = grad.element_size()
        strides = (*(stride * size for stride in grad.stride()), 1)
        marks = owner.as_strided((*grad.shape, size), strides, grad.storage_offset() * size)
        found = int(marks.max())
        if found >= 0:
            return found, index
        marks.fill_(index)
    return None


def require_writable(grads: Sequence[Tensor]) -> None:
    """Raise RuntimeError for a gradient that overlaps itself, or for two that overlap partly.

    Exactly the same gradient twice is allowed: it is written twice, as by torch.
    """
    by_storage: dict[int, dict[tuple, int]] = defaultdict(dict)
    for index, grad in enumerate(grads):
        values = grad._values() if grad.is_sparse else grad
        if torch._debug_has_internal_overlap(values) == 1:  # 1: certainly, 2: too hard to tell
            raise RuntimeError(
                f"expected gradients that do not overlap, but {describe(index, grad)} and strides "
                f"{list(values.stride())} overlaps itself (an expanded tensor?)"
            )
        if not grad.is_sparse and grad.numel() > 0:
            place = (grad.storage_offset(), grad.shape, grad.stride(), grad.dtype)
            by_storage[grad.untyped_storage()._cdata].setdefault(place, index)
    for places in by_storage.values():
        indices = list(places.values())
        extents = sorted(_extent(grads[i]) for i in indices)
        if all(a[1] <= b[0] for a, b in itertools.pairwise(extents)):
            continue
        if pair := _overlapping(grads, indices):
            first, second = (describe(i, grads[i]) for i in pair)
            raise RuntimeError(
                f"expected gradients that do not overlap, but {first} and {second} share part of their memory"
            )
