# SPDX-License-Identifier: BSD-3-Clause
"""The arguments of the public functions: parameters become gradients and groups, the rest is checked."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .dispatch import GradientList, tensors_of
from .distributed import ProcessGroups, shard_gradients
from .policies import Policy

Parameters = Tensor | Iterable[Tensor]
NamedParameters = Parameters | Iterable[tuple[str, Tensor]]
Groups = str | Sequence[Hashable] | Callable[[str], Hashable] | None
MaxNorm = float | Tensor | Mapping[Hashable, float] | Policy

NONFINITE_MODES = ("propagate", "error", "zero", "skip")


def collect_gradients(
    parameters: Parameters, stacklevel: int, process_group: ProcessGroups = None
) -> GradientList:
    """Return the gradients that are there; ShardedGradients where other processes hold parts.

    An exhausted generator warns, as in torch: nothing would be clipped.

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
    """Raise TypeError for the first item that is not a tensor, with a hint for the usual mistakes."""
    for index, item in enumerate(parameters):
        if not isinstance(item, Tensor):
            hint = next((text for kind, text in _HINTS.items() if isinstance(item, kind)), "")
            raise TypeError(
                f"expected parameters to be tensors, but got {type(item).__name__} at index {index}{hint}"
            )


def collect_named_gradients(
    parameters: NamedParameters, process_group: ProcessGroups = None
) -> tuple[GradientList, list[str], list[int]]:
    """Return the gradients as :func:`collect_gradients`, their names, and the positions of their parameters.

    Parameters without names are named by position: "parameters[3]".

    Raises:
        TypeError: an item that is neither a tensor nor a (name, tensor) pair.
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
    """Return a number as a float, and a tensor as it is, since reading it would wait for the device.

    Raises:
        TypeError: not a number.
        ValueError: a negative number or NaN; a tensor of the wrong size.
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


def require_norm(grads: GradientList, norm_type: float) -> None:
    """Raise RuntimeError for an empty gradient where the norm is an extreme, which an empty gradient lacks.

    The same holds for negative orders, as in torch.
    """
    if norm_type != math.inf and not norm_type < 0:
        return
    for index, grad in enumerate(tensors_of(grads)):
        if grad.numel() == 0:
            raise RuntimeError(
                f"expected no empty gradient for norm_type {norm_type}, which has no value for it, but got "
                f"gradient {index} with shape {list(grad.shape)}"
            )


def require_foreach(grads: GradientList) -> None:
    """Raise RuntimeError where torch would for foreach=True: a device without its foreach functions.

    That is all `foreach` does here: fastclip always works on all gradients at once.
    """
    for device in {grad.device for grad in tensors_of(grads)}:
        if not torch.utils._foreach_utils._device_has_foreach_support(device):
            raise RuntimeError(
                f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
            )


def require_groups_or_process_group(groups: Groups, process_group: ProcessGroups) -> None:
    """Raise ValueError for both: the processes of a process group hold other parameters, so other groups."""
    if groups is not None and process_group is not None:
        raise ValueError("expected groups or process_group, but got both")


def number_groups(
    groups: Groups, names: list[str], indices: list[int], num_parameters: int
) -> tuple[list[int], list[Hashable]]:
    """Return the group number of each gradient, and the labels in the order of the numbers.

    Raises:
        ValueError: an unknown word, or another number of labels than parameters.
    """
    if groups is None:
        return [], []
    if isinstance(groups, str):
        if groups != "tensor":
            raise ValueError(
                "expected groups to be 'tensor', a label for each parameter or a function of the name, "
                f"but got {groups!r}"
            )
        each: list[Hashable] = list(names)
    elif callable(groups):
        each = [groups(name) for name in names]
    else:
        if len(groups) != num_parameters:
            raise ValueError(
                f"expected groups to label each of the {num_parameters} parameters, "
                f"but got {len(groups)} labels"
            )
        each = [groups[index] for index in indices]
    if groups == "tensor":
        return list(range(len(names))), each
    numbers = {label: number for number, label in enumerate(dict.fromkeys(each))}
    return [numbers[label] for label in each], list(numbers)


def max_norm_of_groups(
    max_norm: float | Tensor | Mapping[Hashable, float], labels: list[Hashable], groups: Groups
) -> float | Tensor:
    """Return the limit as a number, or as a tensor with one limit for each group, [G].

    Raises:
        TypeError, ValueError: as :func:`require_max_norm`; a mapping without groups, or that lacks a group.
    """
    if isinstance(max_norm, Mapping):
        if groups is None:
            raise ValueError("expected groups together with a mapping as max_norm, but got none")
        if missing := [label for label in labels if label not in max_norm]:
            raise ValueError(f"expected max_norm to hold every group's limit, but got none for {missing}")
        limits = [require_max_norm(max_norm[label]) for label in labels]
        return torch.tensor(limits, dtype=torch.float64)
    return require_max_norm(max_norm, max(1, len(labels)))
