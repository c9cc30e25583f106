# SPDX-License-Identifier: BSD-3-Clause
"""The argument `process_group`: processes that hold other parameters of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from .all_reduce import Group

ProcessGroups = Group | Sequence[Group] | Mapping[Group, Iterable[Tensor]] | None


def buckets_of(process_group: ProcessGroups, parameters: list[Tensor]) -> tuple[list[Group], list[int]]:
    """Return the further groups, and for each row a number whose bit k says that group k sums it."""
    if process_group is None:
        return [], []
    if isinstance(process_group, Mapping):
        members = [{id(parameter) for parameter in own} for own in process_group.values()]
        each = [sum((id(p) in own) << k for k, own in enumerate(members)) for p in parameters]
        return list(process_group), each
    groups = list(process_group) if isinstance(process_group, Sequence) else [process_group]
    return groups, [2 ** len(groups) - 1] * len(parameters)


def require_process_group(process_group: ProcessGroups) -> ProcessGroups:
    """Return the argument with iterables of parameters as lists, so that it can be used many times.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        TypeError: not a ProcessGroup, or one that this process does not belong to.
    """
    if process_group is None:
        return None
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("expected torch.distributed to be initialized, since process_group was given")
    known = process_group
    if isinstance(process_group, Mapping):
        known = {group: list(parameters) for group, parameters in process_group.items()}
    for group in known if isinstance(known, Mapping | Sequence) else [known]:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "expected process_group to be a ProcessGroup of which this process is a member, several, or "
                f"a mapping from them to parameters, but got {group!r}"
            )
    return known
