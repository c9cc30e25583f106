# SPDX-License-Identifier: BSD-3-Clause
"""Checking the arguments of a monitor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collect import MaxNorm
from ..optim import Handle, attach, handle_of
from .actions import Action
from .async_copy import Value
from .detectors import Detector
from .incidents.options import Incidents
from .record import MEANINGS
from .sinks.jsonl import JsonlSink
from .skip_latch import DECIDED_ON_THE_DEVICE


def require_distinct(detectors: Sequence[Detector]) -> None:
    """Raise ValueError if two detectors have the same kind."""
    kinds = [detector.kind for detector in detectors]
    if twice := {kind for kind in kinds if kinds.count(kind) > 1}:
        raise ValueError(f"expected detectors of different kinds, but got several of {sorted(twice)}")


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def compares(compare_ranks: bool | None, world: int, skipped_kinds: frozenset[str]) -> bool:
    """Return whether the processes exchange their numbers.

    Raises:
        ValueError: torch.distributed is not in use, or processes would skip steps without each other.
    """
    if compare_ranks and not (dist.is_available() and dist.is_initialized()):
        raise ValueError("compare_ranks=True needs torch.distributed to be initialized, but it is not")
    if skipped_kinds and world > 1 and compare_ranks is False:
        raise ValueError(
            f"expected compare_ranks=True with incidents or 'skip' for {sorted(skipped_kinds)} on {world} "
            "processes, which have to skip the same steps"
        )
    return world > 1 and compare_ranks is not False


def all_sinks(log_dir: str | None, sinks: Iterable[object], rank: int, world: int) -> list[object]:
    """Return the given sinks and that of the log, if there is one."""
    header = {"fields": MEANINGS, "rank": rank, "world_size": world, "torch": torch.__version__}
    own = [] if log_dir is None else [JsonlSink(log_dir, rank, header=header)]
    return [*own, *sinks]


def handle_for(
    model: nn.Module,
    optimizer: Optimizer,
    max_norm: MaxNorm | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[bool, Handle]:
    """Return whether the monitor has attached the optimizer itself, and the handle."""
    known = None
    if isinstance(optimizer, Optimizer):
        known = handle_of(optimizer)
        own = {id(p) for p in model.parameters()}
        if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            warnings.warn(
                "fastclip.Monitor: the optimizer has no parameter of the model, so names, batches and "
                "weights may belong to different models",
                stacklevel=3,
            )
    if known is None:
        return True, attach(optimizer, max_norm, scaler=scaler, names=model.named_parameters())
    if max_norm is not None:
        raise RuntimeError(
            f"the optimizer is already attached, with max_norm {known.max_norm}: omit the monitor's "
            "max_norm, or detach() the handle first, so that it is clear who clips"
        )
    if scaler is not known.scaler:
        raise ValueError(
            "expected scaler to be the one that the optimizer was attached with, but got another one; "
            "pass it to fastclip.attach too"
        )
    return False, known


def require_counts(**counts: int) -> None:
    """Raise TypeError or ValueError for an argument, given by its name, that is not an integer >= 0."""
    for name, count in counts.items():
        if not isinstance(count, int):
            raise TypeError(f"expected {name} to be an integer, but got {type(count).__name__}")
        if count < 0:
            raise ValueError(f"expected {name} to be an integer >= 0, but got {count}")


def skipped_kinds(
    actions: Mapping[str, list[Action]],
    incidents: Incidents | None,
    optimizer: Optimizer,
    max_norm: MaxNorm | None,
) -> frozenset[str]:
    """Return the kinds of events whose steps are skipped, for an action or until they have been saved.

    Raises:
        ValueError: there are some, and the monitor only observes.
    """
    kinds = frozenset(kind for kind in DECIDED_ON_THE_DEVICE if "skip" in actions.get(kind, []))
    kinds |= frozenset(incidents.kinds if incidents is not None else ())
    known = handle_of(optimizer) if isinstance(optimizer, Optimizer) else None
    limit = max_norm if known is None else known.max_norm
    if kinds and limit is None:
        raise ValueError(
            f"incidents and 'skip' for {sorted(kinds)} need max_norm or an attached optimizer: without, the "
            "monitor observes only. max_norm=float('inf') clips nothing"
        )
    return kinds


def require_losses(losses: dict[str, Any]) -> dict[str, Value]:
    """Return the losses by name, as tensors of one real number or floats.

    Raises:
        TypeError: it is not a number, or a complex one.
        ValueError: a tensor has several elements, or an int is too large for a float.
    """
    checked: dict[str, Value] = {}
    for name, value in losses.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"expected {name} to have one element, but got shape {list(value.shape)}")
            if value.dtype.is_complex:
                raise TypeError(f"expected {name} to be a real number, but got {value.dtype}")
            checked[name] = value
            continue
        if isinstance(value, (str, complex)) or not hasattr(value, "__float__"):
            raise TypeError(f"expected {name} to be a number, but got {type(value).__name__}")
        try:
            checked[name] = float(value)
        except OverflowError as error:
            raise ValueError(f"expected {name} to fit a float: {error}") from None
    return checked
