# SPDX-License-Identifier: BSD-3-Clause
"""The record of one optimizer step on one process, its events, and what each number means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

SEVERITIES = ("info", "warning", "error")


@dataclass
class Event:
    """A finding that a person should know about.

    Attributes:
        kind: its name in the documentation of the detectors, such as "norm_growth".
        step: the optimizer step in which it was found.
        severity: "info", "warning" or "error".
        message: a sentence with the numbers.
        values: the numbers that support it.
        rank: the process it concerns, where that is known; else the one that found it.
    """

    kind: str
    step: int
    severity: str
    message: str
    values: dict[str, Any] = field(default_factory=dict)
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for a log."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Event:
        """Return the event of a log; unknown keys, as of later versions, are ignored.

        Raises:
            ValueError: it lacks a key, or a value has another type.
        """
        if not isinstance(data, dict) or not {"kind", "step", "severity", "message"} <= set(data):
            raise ValueError(f"expected an event, but got {_shown(data)}")
        if data["severity"] not in SEVERITIES:
            raise ValueError(f"expected a severity of {', '.join(SEVERITIES)}, but got {data['severity']!r}")
        return cls(**_checked(cls, data))

    def __str__(self) -> str:
        return f"step {self.step}: {self.severity}: {self.kind}: {self.message}"


@dataclass
class Record:
    """One optimizer step on one process. What was not measured in this step is None or empty.

    :data:`MEANINGS` gives the meaning, unit and scope of each attribute, as does the first line of every log.
    """

    step: int
    time: float = 0.0
    rank: int = 0
    step_time: float | None = None
    loss: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    micro_batches: int = 1
    lr: list[float] = field(default_factory=list)
    total_norm: float | None = None
    group_norms: dict[str, float] = field(default_factory=dict)
    max_norm: float | None = None
    clip_coef: float | None = None
    nan_count: int = 0
    inf_count: int = 0
    nonfinite_ranks: list[int] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    tensor_norms: list[float] = field(default_factory=list)
    tensor_names: list[str] = field(default_factory=list)
    applied: bool | None = None
    held: bool = False
    skipped_steps: int = 0
    overflows: int = 0
    loss_scale: float | None = None
    param_norm: float | None = None
    update_ratio: dict[str, float] = field(default_factory=dict)
    activations: dict[str, dict[str, float]] = field(default_factory=dict)
    batch: dict[str, dict[str, Any]] = field(default_factory=dict)
    token_ids: dict[str, dict[str, int]] = field(default_factory=dict)
    sample_ids: list[Any] = field(default_factory=list)
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    ranks: dict[str, list[float]] = field(default_factory=dict)
    error: str | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def clipped(self) -> bool | None:
        """Whether the norm was above the limit; None without a norm or a limit."""
        if self.clip_coef is None or not math.isfinite(self.clip_coef):
            return None
        return self.clip_coef < 1.0

    @property
    def has_finite_norm(self) -> bool:
        """Whether there is a norm, and it is finite."""
        return self.total_norm is not None and math.isfinite(self.total_norm)

    @property
    def is_finite(self) -> bool:
        """Whether neither the loss nor a gradient was NaN or Inf."""
        if self.loss is not None and not math.isfinite(self.loss):
            return False
        if self.total_norm is not None and not math.isfinite(self.total_norm):
            return False
        return self.nan_count + self.inf_count == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for a log, without what was not measured."""
        data: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or (isinstance(value, (dict, list)) and not value):
                continue
            data[f.name] = value
        if self.events:
            data["events"] = [event.to_dict() for event in self.events]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Return the record of a line of a log; unknown keys, as of later versions, are ignored.

        Raises:
            ValueError: it has no step, a value of another type, or an invalid event.
        """
        if type(data.get("step")) is not int:
            raise ValueError(f"expected a record with a step, but got step {_shown(data.get('step'))}")
        events = data.get("events", [])
        if not isinstance(events, list):
            raise ValueError(f"expected events to be a list, but got {_shown(events)}")
        data = {**data, "events": [Event.from_dict(event) for event in events]}
        return cls(**_checked(cls, data))


def _checked(cls: type, data: dict[str, Any]) -> dict[str, Any]:
    """Return the items for which the class has fields, if they have the types of these."""
    checks = _checks(cls)
    known = {}
    for key, value in data.items():
        if (check := checks.get(key)) is not None:
            if not check[1](value):
                raise ValueError(f"expected {key} to be {check[0]}, but got {_shown(value)}")
            known[key] = value
    return known


@cache
def _checks(cls: type) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Return the type of each field of a class as written, and the check whether a value has it."""
    return {f.name: (str(f.type), _check_of(str(f.type))) for f in fields(cls)}


def _check_of(annotation: str) -> Callable[[Any], bool]:
    """Return the check for a type as written in the classes above; an int is a float, a bool is neither."""
    optional = annotation.removesuffix(" | None")
    if optional != annotation:
        inner = _check_of(optional)
        return lambda value: value is None or inner(value)
    if annotation.startswith("dict[str, "):
        inner = _check_of(annotation.removeprefix("dict[str, ")[:-1])
        return lambda value: isinstance(value, dict) and all(map(inner, value.values()))
    if annotation.startswith("list["):
        inner = _check_of(annotation.removeprefix("list[")[:-1])
        return lambda value: isinstance(value, list) and all(map(inner, value))
    if annotation == "Any":
        return lambda value: True
    if annotation in ("int", "float"):
        return lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = {"bool": bool, "str": str, "Event": Event}[annotation]
    return lambda value: isinstance(value, kind)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


MEANINGS: dict[str, str] = {
    "step": "number of the optimizer step, from 0; skipped steps count too",
    "time": "seconds since 1970 when the step ended on the host",
    "rank": "process in the default process group",
    "step_time": "seconds since the step before ended on the host",
    "loss": "mean over the micro-batches of the step; of this rank; as given: not scaled by the loss scale",
    "losses": "further losses by name, as loss",
    "micro_batches": "backward passes accumulated into the step, as far as losses or batches were given",
    "lr": "learning rate used by the step, one for each parameter group",
    "total_norm": "norm of all gradients of the optimizer: accumulated, unscaled, before clipping, global",
    "group_norms": "the same by group, where gradients are clipped in groups",
    "max_norm": "limit of total_norm in this step; the smallest one of several",
    "clip_coef": "factor by which clipping multiplied the gradients; the smallest one of several groups",
    "nan_count": "NaN elements in the gradients, accumulated, global",
    "inf_count": "Inf elements in the gradients, accumulated, global",
    "nonfinite_ranks": "processes whose part of the gradients contained NaN or Inf; empty without shards",
    "worst": "gradients with the most NaN and Inf, then the largest norms: unscaled, before clipping, global",
    "tensor_norms": "norm of each gradient, unscaled, before clipping, global; every few steps",
    "tensor_names": "name of the parameter of each of the tensor_norms",
    "applied": "whether the step changed the parameters",
    "held": "whether the monitor skipped the step: action skip",
    "skipped_steps": "steps skipped so far, for whatever reason",
    "overflows": "steps so far that a loss scaler skipped",
    "loss_scale": "factor of the loss in this step",
    "param_norm": "2-norm of all parameters before the step, global; every few steps",
    "update_ratio": "2-norm of a parameter's change over that of the parameter, local shard; every few steps",
    "activations": "mean, rms, max of absolute values and non-finite count of module outputs; local, sampled",
    "batch": "of the batch tensors, local, last micro-batch; counts are summed over the micro-batches",
    "token_ids": "smallest and largest index given to each embedding, and how many were out of range; local",
    "sample_ids": "as given with the batches of the step; local",
    "samples_per_second": "local, by step_time",
    "tokens_per_second": "local, by step_time, elements of the first integer tensor of each batch",
    "memory": "bytes: resident without mapped files; allocated and reserved on the device; every few steps",
    "ranks": "by rank: loss, non-finite elements in the batch, seconds from batch to loss, requests",
    "error": "the exception that ended the step",
    "events": "what the detectors found",
}
