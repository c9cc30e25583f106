# SPDX-License-Identifier: BSD-3-Clause
"""The actions that events trigger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .record import SEVERITIES, Event, Record
from .skip_latch import DECIDED_ON_THE_DEVICE

Action = str | Callable[[Event], Any]
Actions = Mapping[str, Action | Sequence[Action]]

NAMES = ("log", "skip", "lower_lr", "stop", "raise")
# Every process has to take these in the same step, or their parameters diverge or they hang.
JOINT = ("lower_lr", "stop", "raise")

logger = logging.getLogger("fastclip.monitor")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class TrainingUnstable(RuntimeError):
    """Raised for an event whose action is "raise".

    Attributes:
        event: the Event.
    """

    def __init__(self, event: Event) -> None:
        super().__init__(str(event))
        self.event = event


def require_actions(actions: Actions | None, kinds: Sequence[str]) -> dict[str, list[Action]]:
    """Return the actions by kind or severity, each as a list.

    Args:
        actions: the argument of the monitor.
        kinds: those of its detectors.

    Raises:
        ValueError: a kind that no detector has, an unknown action, or "skip" for an event that the device
            cannot decide.
        TypeError: an action that is neither a string nor callable.
    """
    checked: dict[str, list[Action]] = {}
    for key, given in (actions or {}).items():
        if key not in kinds and key not in SEVERITIES:
            known = ", ".join(map(repr, (*SEVERITIES, *kinds)))
            raise ValueError(
                f"expected the keys of actions to be severities or kinds of events ({known}), but got {key!r}"
            )
        listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
        for action in listed:
            _require_action(key, action)
        checked[key] = listed
    return checked


def _require_action(key: str, action: Any) -> None:
    if not isinstance(action, str):
        if not callable(action):
            raise TypeError(
                f"expected the action for {key!r} to be a string or callable, but got {type(action).__name__}"
            )
        return
    if action not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise ValueError(
            f"expected the action for {key!r} to be one of {names} or callable, but got {action!r}"
        )
    if action == "skip" and key not in DECIDED_ON_THE_DEVICE:
        kinds = ", ".join(map(repr, DECIDED_ON_THE_DEVICE))
        raise ValueError(
            f"expected the action 'skip' only for events that are known before the update ({kinds}), but got "
            f"it for {key!r}"
        )


def actions_for(event: Event, actions: Mapping[str, list[Action]]) -> list[Action]:
    """Return the actions of its kind, else of its severity, without "skip", which the device has done."""
    return [a for a in actions.get(event.kind, actions.get(event.severity, [])) if a != "skip"]


def log(event: Event) -> None:
    """Log an event with Python's logger "fastclip.monitor"."""
    logger.log(_LEVELS[event.severity], "%s", event)


def lower_learning_rates(optimizer: Optimizer, scheduler: Any, factor: float = 0.5) -> None:
    """Multiply all learning rates, and the rates from which torch's schedulers compute the next ones."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr", "max_lr", "min_lr"):
            if isinstance(group.get(key), Tensor):
                group[key].mul_(factor)  # the same tensor: a captured graph reads it
            elif group.get(key) is not None:
                group[key] = group[key] * factor
    schedulers = [scheduler] if scheduler is not None else []
    while schedulers:
        current = schedulers.pop()
        for name in ("base_lrs", "max_lrs"):
            if hasattr(current, name):
                setattr(current, name, [rate * factor for rate in getattr(current, name)])
        schedulers += getattr(current, "_schedulers", [])


class ActionRunner:
    """Takes the actions of events: at once on one process, else together with the other processes.

    Args:
        actions: as checked by :func:`require_actions`.
        optimizer, scheduler: whose learning rates "lower_lr" lowers.
        world: number of processes.
        compared: whether the processes exchange their requests.

    Attributes:
        should_stop: whether "stop" was taken.
        acts: whether there are actions that all processes have to take together.

    Raises:
        ValueError: several processes that do not compare, and an action that all have to take together.
    """

    def __init__(
        self,
        actions: Mapping[str, list[Action]],
        optimizer: Optimizer,
        scheduler: Any,
        world: int,
        compared: bool,
    ) -> None:
        used = {a for listed in actions.values() for a in listed if isinstance(a, str)}
        together = sorted(used.intersection((*JOINT, "skip")))
        if together and world > 1 and not compared:
            raise ValueError(
                f"expected compare_ranks=True with the actions {together} on {world} processes, which all "
                "have to take them in the same step"
            )
        self.acts = bool(together)
        self._actions, self._optimizer, self._scheduler = actions, optimizer, scheduler
        self._compared = compared
        self.should_stop = False
        self._raise: Event | None = None
        # What to request of all processes, as bits of JOINT, and the step of the last event that wants it.
        self._wanted, self._step = 0, -1
        self._requested: tuple[int, int] = (0, -1)  # the same, requested and not yet done
        self._lowered = -1  # events up to this step have lowered the learning rates
        self._events: dict[str, Event] = {}  # events of this process by the joint action they request

    def run(self, record: Record) -> None:
        """Act on the events of a record, or keep what is to be requested of all processes."""
        wanted = 0
        for event in record.events:
            if event.severity != "info":
                log(event)
            for action in actions_for(event, self._actions):
                if callable(action):
                    action(event)
                elif action == "log":
                    if event.severity == "info":
                        log(event)
                else:
                    wanted |= 1 << JOINT.index(action)
                    self._events.setdefault(action, event)
        if not wanted:
            return
        if self._compared:
            self._wanted |= wanted
            self._step = record.step
            return
        self._do(wanted, record.step)
        if wanted >> JOINT.index("raise") & 1 and self._raise is None:
            self._raise = self._events["raise"]
        self._events.clear()

    def take_requests(self) -> tuple[int, int]:
        """Return what to request of all processes now, as bits of JOINT, and the step of the event."""
        self._requested, self._wanted = (self._wanted, self._step), 0
        return self._requested

    def run_agreed(self, step: int, requests: Sequence[float], steps: Sequence[float]) -> None:
        """Do what any of the processes has requested, at the same place of the same step on all of them.

        Args:
            step: the step of this process, for the event.
            requests, steps: what take_requests() returned on each rank.

        Raises:
            TrainingUnstable: one has requested "raise". It is raised here and not from the monitor's next
                call, which is not the same one on every rank: the others would hang.
        """
        self._requested = (0, -1)
        agreed = 0
        for bits in requests:
            agreed |= int(bits)
        if not agreed:
            return
        self._do(agreed, int(max(s for bits, s in zip(requests, steps, strict=True) if bits)))
        own, self._events = self._events, {}
        if agreed >> JOINT.index("raise") & 1:
            asking = next(r for r, bits in enumerate(requests) if int(bits) >> JOINT.index("raise") & 1)
            message = f'rank {asking} requested "raise"; see its log'
            other = Event("rank", step, "error", message, {"differing_rank": asking}, asking)
            raise TrainingUnstable(own.get("raise", other))

    def _do(self, wanted: int, step: int) -> None:
        # Some processes may see one and the same event a step later than others.
        if wanted >> JOINT.index("lower_lr") & 1 and step > self._lowered:
            self._lowered = step
            lower_learning_rates(self._optimizer, self._scheduler)
        self.should_stop |= bool(wanted >> JOINT.index("stop") & 1)

    def raise_if_requested(self) -> None:
        """Raise TrainingUnstable, once, for an event whose action is "raise"."""
        event, self._raise = self._raise, None
        if event is not None:
            raise TrainingUnstable(event)

    def state_dict(self) -> dict[str, int]:
        """Return what was requested and not done, and up to which step learning rates were lowered."""
        bits, step = self._requested
        return {"wanted": self._wanted | bits, "step": max(self._step, step), "lowered": self._lowered}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._wanted, self._step, self._lowered = state["wanted"], state["step"], state["lowered"]
