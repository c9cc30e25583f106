# SPDX-License-Identifier: BSD-3-Clause
"""From what a caller passes to a list of gradients, and the checks of the other arguments."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from .distributed import GradientList, ProcessGroups, shard_gradients

Parameters = Tensor | Iterable[Tensor]
NamedParameters = Parameters | Iterable[tuple[str, Tensor]]

NONFINITE_MODES = ("propagate", "error", "zero", "skip")


def gradients(parameters: Parameters, stacklevel: int, process_group: ProcessGroups = None) -> GradientList:
    """The gradients that are there. An exhausted generator warns, as in torch: it would clip nothing.

    Where other processes hold parts of them, what this one and they have to do together.

    Raises:
        TypeError: `parameters` holds something that is not a tensor.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.",
                stacklevel=stacklevel + 1,
            )
    else:
        parameters = list(parameters)
    try:
        # In two steps, as torch.compile does not trace an assignment inside a comprehension.
        each = [p.grad for p in parameters]
        if (sharded := shard_gradients(parameters, each, process_group)) is not None:
            return sharded
        return [grad for grad in each if grad is not None]
    except AttributeError:
        _raise_not_a_parameter(parameters)
        raise


_HINTS: dict[type, str] = {
    tuple: " (fastclip.clip_ takes model.named_parameters(); here pass model.parameters())",
    dict: " (pass each group's 'params')",
    str: " (pass the values of a dict)",
}


def _raise_not_a_parameter(parameters: list) -> None:
    for index, item in enumerate(parameters):
        if not isinstance(item, Tensor):
            hint = next((text for kind, text in _HINTS.items() if isinstance(item, kind)), "")
            raise TypeError(
                f"expected parameters to be tensors, but got {type(item).__name__} at index {index}{hint}"
            )


def tensors_of(grads: GradientList) -> list[Tensor]:
    """The gradients one by one; of a spread list, whole DTensors, and parameters for gradients elsewhere."""
    return grads if isinstance(grads, list) else grads.tensors


def named_gradients(
    parameters: NamedParameters, process_group: ProcessGroups = None
) -> tuple[GradientList, list[str], list[int]]:
    """The gradients that are there, their names, and the positions of their parameters.

    Parameters given without names are called by their position: "parameters[3]".
    """
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    pairs: list[tuple[str, Tensor]] = []
    for index, item in enumerate(items):
        if isinstance(item, Tensor):
            pairs.append((f"parameters[{index}]", item))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor):
            pairs.append((str(item[0]), item[1]))
        else:
            raise TypeError(
                "expected parameters to be tensors or (name, tensor) pairs, but got "
                f"{type(item).__name__} at index {index}"
            )
    each = [parameter.grad for _, parameter in pairs]
    if (sharded := shard_gradients([p for _, p in pairs], each, process_group)) is not None:
        indices = sharded.indices
        return sharded, [pairs[index][0] for index in indices], indices
    indices = [index for index, grad in enumerate(each) if grad is not None]
    grads = [grad for grad in each if grad is not None]
    return grads, [pairs[index][0] for index in indices], indices


def require_max_norm(max_norm: float | Tensor, num_groups: int = 1) -> float | Tensor:
    """A number as a float; a tensor as it is, since reading it would wait for the device.

    Raises:
        TypeError: not a number. ValueError: a negative number or NaN; a tensor of the wrong size.
    """
    if isinstance(max_norm, Tensor):
        if max_norm.numel() not in (1, num_groups):
            wanted = "one element" if num_groups == 1 else f"one element or {num_groups}, one a group"
            raise ValueError(f"expected max_norm to have {wanted}, but got shape {list(max_norm.shape)}")
        return max_norm
    try:
        max_norm = float(max_norm)
    except TypeError:
        kind = type(max_norm).__name__
        raise TypeError(f"expected max_norm to be a number or a Tensor, but got {kind}") from None
    if not max_norm >= 0:
        raise ValueError(f"expected max_norm to be a number >= 0, but got {max_norm}")
    return max_norm


def require_nonfinite(nonfinite: str) -> str:
    """Raise ValueError unless `nonfinite` is one of the modes."""
    if nonfinite not in NONFINITE_MODES:
        raise ValueError(
            f"expected nonfinite to be one of {', '.join(map(repr, NONFINITE_MODES))}, but got {nonfinite!r}"
        )
    return nonfinite


def require_foreach(grads: list[Tensor], foreach: bool | None) -> None:
    """Raise RuntimeError where torch would: foreach=True names an implementation the device lacks.

    Otherwise `foreach` chooses nothing here: fastclip always works on all gradients at once.
    """
    if not foreach:
        return
    for device in {grad.device for grad in grads}:
        if not torch.utils._foreach_utils._device_has_foreach_support(device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
            )


def require_extremes(grads: list[Tensor], norm_type: float) -> None:
    """Raise RuntimeError for an empty gradient under a norm that is an extreme: it has none.

    The same holds for negative orders, as in torch.
    """
    if norm_type != math.inf and not norm_type < 0:
        return
    for index, grad in enumerate(grads):
        if grad.numel() == 0:
            raise RuntimeError(
                f"expected no empty gradient for norm_type {norm_type}, which has no value for it, but got "
                f"gradient {index} with shape {list(grad.shape)}"
            )
