# SPDX-License-Identifier: BSD-3-Clause
"""The samples of a batch: their number, selections of them, and copies for each run."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..monitor.measure.batches import tensors_in


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tree of the same types with `change` applied to tensors and to lists without tensors."""
    if isinstance(tree, Tensor) or _is_plain_list(tree):
        return change(tree)
    if isinstance(tree, Mapping):
        items = {key: mapped(value, change) for key, value in tree.items()}
        if type(tree) is dict:
            return items
        copied: Any = copy.copy(tree)
        copied.update(items)
        return copied
    if isinstance(tree, tuple):
        values = [mapped(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    if isinstance(tree, list):
        return [mapped(value, change) for value in tree]
    if hasattr(tree, "__dict__") and not isinstance(tree, type) and not callable(tree):
        copied = copy.copy(tree)
        vars(copied).update({key: mapped(value, change) for key, value in vars(tree).items()})
        return copied
    return tree


def _is_plain_list(tree: Any) -> bool:
    """Return whether this is a list without tensors, such as one text for each sample."""
    return isinstance(tree, list) and not any(True for _ in tensors_in(tree))


def copied(batch: Any, device: torch.device) -> Any:
    """Return a copy of the batch on the device, which may be changed in place."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return list(value)
        fresh = value.detach().clone() if device.type == "cpu" else value.detach().to(device, copy=True)
        return fresh.requires_grad_(value.requires_grad)

    return mapped(batch, one)


def as_float32(batch: Any, halves: Sequence[torch.dtype]) -> Any:
    """Return the batch with tensors of these dtypes converted to float32."""
    return mapped(batch, lambda v: v.float() if isinstance(v, Tensor) and v.dtype in halves else v)


def sample_count(batch: Any, sample_ids: Sequence[Any]) -> int:
    """Return the number of samples.

    It is the number of ids if some tensor has that length, else the most common length of the tensors; 0 for
    a batch without tensors of at least one dimension.
    """
    lengths = Counter(len(tensor) for _, tensor in tensors_in(batch) if tensor.dim())
    if sample_ids and len(sample_ids) in lengths:
        return len(sample_ids)
    return lengths.most_common(1)[0][0] if lengths else 0


def chosen(batch: Any, size: int, indices: Sequence[int]) -> Any:
    """Return the batch with only these samples of its tensors and lists of length `size`."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            if not value.dim() or len(value) != size:
                return value
            return value.detach()[list(indices)].requires_grad_(value.requires_grad)
        return [value[i] for i in indices] if len(value) == size else value

    return mapped(batch, one)


def nonfinite_in(batch: Any) -> dict[str, int]:
    """Return the number of NaN and Inf elements by name of the tensor, without those that have none."""
    found = {}
    for name, tensor in tensors_in(batch):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            count = int((~tensor.isfinite()).sum())
            if count:
                found[name] = count
    return found
