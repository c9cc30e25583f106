# SPDX-License-Identifier: BSD-3-Clause
"""The parts that a monitor is put together from, and the checks of its arguments."""

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
    kinds = [detector.kind for detector in detectors]
    if twice := {kind for kind in kinds if kinds.count(kind) > 1}:
        raise ValueError(f"expected one detector of each kind, but got several of {sorted(twice)}")


def rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def compares(compare_ranks: bool | None, world: int, held: frozenset[str]) -> bool:
    """Whether the processes are to tell each other their numbers.

    Raises:
        ValueError: there is one process, or several that would leave steps out each for itself.
    """
    if compare_ranks and not (dist.is_available() and dist.is_initialized()):
        raise ValueError("expected torch.distributed to be in use with compare_ranks=True, but it is not")
    if held and world > 1 and compare_ranks is False:
        raise ValueError(
            f"expected compare_ranks=True with incidents or 'skip' for {sorted(held)} on {world} processes: "
            "they have to leave out the same steps"
        )
    return world > 1 and compare_ranks is not False


def all_sinks(log_dir: str | None, sinks: Iterable[object], rank: int, world: int) -> list[object]:
    header = {"fields": MEANINGS, "rank": rank, "world_size": world, "torch": torch.__version__}
    own = [] if log_dir is None else [JsonlSink(log_dir, rank, header=header)]
    return [*own, *sinks]


def handle_for(
    model: nn.Module,
    optimizer: Optimizer,
    max_norm: MaxNorm | None,
    scaler: torch.amp.GradScaler | None,
) -> tuple[bool, Handle]:
    """Whether the monitor has attached the optimizer itself, and the handle."""
    known = None
    if isinstance(optimizer, Optimizer):
        known = handle_of(optimizer)
        own = {id(p) for p in model.parameters()}
        if own.isdisjoint(id(p) for group in optimizer.param_groups for p in group["params"]):
            warnings.warn(
                "fastclip.Monitor: the optimizer has no parameter of the model: names, batches and weights "
                "would be those of another model",
                stacklevel=3,
            )
    if known is None:
        return True, attach(optimizer, max_norm, scaler=scaler, names=model.named_parameters())
    if max_norm is not None:
        raise RuntimeError(
            f"the optimizer is attached already, with max_norm {known.max_norm}: leave out the monitor's "
            "max_norm, or detach() the handle first, so that there is no doubt who clips"
        )
    if scaler is not known.scaler:
        raise ValueError(
            "expected the scaler that the optimizer was attached with; pass it to fastclip.attach"
        )
    return False, known


def require_counts(**counts: int) -> None:
    """Raise TypeError or ValueError for what is not a whole number >= 0, by the name of the argument."""
    for name, count in counts.items():
        if not isinstance(count, int):
            raise TypeError(f"expected {name} to be a whole number, but got {type(count).__name__}")
        if count < 0:
            raise ValueError(f"expected {name} to be a whole number >= 0, but got {count}")


def held_kinds(
    actions: Mapping[str, list[Action]],
    incidents: Incidents | None,
    optimizer: Optimizer,
    max_norm: MaxNorm | None,
) -> frozenset[str]:
    """The kinds of events whose steps are left out, for an action or until they have been saved.

    Raises:
        ValueError: there are some, and a monitor that only observes.
    """
    held = frozenset(kind for kind in DECIDED_ON_THE_DEVICE if "skip" in actions.get(kind, []))
    held |= frozenset(incidents.kinds if incidents is not None else ())
    known = handle_of(optimizer) if isinstance(optimizer, Optimizer) else None
    limit = max_norm if known is None else known.max_norm
    if held and limit is None:
        raise ValueError(
            f"expected max_norm, or an attached optimizer, with incidents or 'skip' for {sorted(held)}: a "
            "monitor without observes only. max_norm=float('inf') clips nothing"
        )
    return held


def require_losses(losses: dict[str, Any]) -> dict[str, Value]:
    """Tensors of one real number, or floats, by name.

    Raises:
        TypeError: not a number, or a complex one. ValueError: a tensor of several elements; an int too large.
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


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The states of what remembers something, by name."""
    return {name: part.state_dict() for name, part in parts.items()}


def load_states(parts: Mapping[str, Any], state: Any) -> None:
    """Raises ValueError, before anything is changed, if it is not the state of a monitor with these parts."""
    if not isinstance(state, dict) or not {"step", "parts"} <= set(state):
        raise ValueError("expected the state_dict of a monitor, but got something else")
    lacks, has = sorted(set(parts) - set(state["parts"])), sorted(set(state["parts"]) - set(parts))
    if lacks or has:
        raise ValueError(f"expected the state of such a monitor, but it lacks {lacks} and has {has}")
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
