# SPDX-License-Identifier: BSD-3-Clause
"""Small trainings that tests record as a monitor records an incident, and replay."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastclip
from fastclip.monitor.incidents.determinism import deterministic_settings
from fastclip.monitor.incidents.encode import encode
from fastclip.monitor.incidents.rng import rng_state
from fastclip.monitor.incidents.store import IncidentStore
from fastclip.monitor.measure.batches import tensors_in

BATCH = 16


class Transformer(nn.Module):
    """A small language model with dropout."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=True))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(144, 10),
    )


def spectral(old: bool = False) -> nn.Module:
    norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(64, 32)), nn.Tanh(), nn.Dropout(0.1), norm(nn.Linear(32, 10)))


class Warming(nn.Module):
    """A module that scales by its number of forwards, a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        return inputs * (1 - 0.5**self.count)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def classification(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def tokens(step: int, micro: int, size: int = BATCH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + micro)
    return torch.randint(0, 40, (size, 12), generator=generator)


def images(step: int, micro: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + micro)
    targets = torch.randint(0, 10, (size,), generator=generator)
    return torch.randn(size, 1, 8, 8, generator=generator) + targets.view(-1, 1, 1, 1) / 5, targets


def vectors(step: int, micro: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    inputs, targets = images(step, micro, size)
    return inputs.flatten(1), targets


@dataclass
class Training:
    """A training: what build() of a replay returns, and the settings of its loop.

    Attributes:
        data: returns the batch of a step and micro-batch.
        autocast: the half precision dtype of the forward on the CPU.
        divides: whether losses of micro-batches are divided by their number.
        rate: returns the learning rate of a step; None for the optimizer's own.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_function: Callable[[nn.Module, Any], Tensor]
    data: Callable[[int, int], Any]
    scheduler: Any = None
    scaler: Any = None
    autocast: torch.dtype | None = None
    micro_batches: int = 1
    divides: bool = True
    max_norm: float | None = 1.0
    rate: Callable[[int], float] | None = None
    started: list[dict[str, Any]] = field(default_factory=list)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def training_of(model: nn.Module, **options: Any) -> Training:
    """Return a training on images for convolutional models, else on vectors, with AdamW by default."""
    data = images if any(isinstance(m, nn.Conv2d) for m in model.modules()) else vectors
    if isinstance(model, Transformer):
        options = {"loss_function": next_token, "data": tokens} | options
    make = options.pop("optimizer", adamw)
    return Training(model, make(model), **({"loss_function": classification, "data": data} | options))


def _sample_ids(step: int, micro: int, batch: Any) -> list[int]:
    size = len(next(tensor for _, tensor in tensors_in(batch)))
    return [10000 * step + 1000 * micro + i for i in range(size)]


def state_of(training: Training) -> dict[str, Any]:
    parts = {"model": training.model, "optimizer": training.optimizer}
    parts |= {"scheduler": training.scheduler, "scaler": training.scaler}
    found = {name: None if p is None else copy.deepcopy(p.state_dict()) for name, p in parts.items()}
    found["model"] = dict(found["model"]) | {n: b.clone() for n, b in training.model.named_buffers()}
    return found | {"monitor": None}


def before_forward(training: Training, step: int, micro: int, batch: Any) -> dict[str, Any]:
    dtype = training.autocast
    return {
        "step": step,
        "micro": micro,
        "batch": encode(copy.deepcopy(batch))[0],
        "sample_ids": _sample_ids(step, micro, batch),
        "rng": encode(rng_state())[0],
        "autocast": {"cpu": {"enabled": dtype is not None, "dtype": str(dtype or torch.bfloat16)}},
        "buffers": {name: b.clone() for name, b in training.model.named_buffers()},
        "training": training.model.training,
    }


def record_incident(
    directory: Path,
    training: Training,
    step: int,
    *,
    kind: str = "nonfinite",
    snapshot: int | None = None,
    event_values: Callable[[Any, list[Any]], dict[str, Any]] | None = None,
) -> Path:
    """Train up to a step and save it as an incident, with the state before it and the batches of 4 steps.

    Args:
        snapshot: the step whose state before it is saved too.
        event_values: returns the values of the event from the record and the records before it.
    """
    monitor = fastclip.Monitor(
        training.model, training.optimizer, max_norm=training.max_norm, scaler=training.scaler
    )
    entries: list[dict[str, Any]] = []
    files: dict[str, Any] = {}
    for number in range(step + 1):
        state = state_of(training)
        if number == snapshot:
            files["snapshot.pt"] = state | {"step": number}
        rates = [group["lr"] for group in training.optimizer.param_groups]
        if training.rate is not None:
            for group in training.optimizer.param_groups:
                group["lr"] = training.rate(number)
        for micro in range(training.micro_batches):
            batch = training.data(number, micro)
            entries.append(before_forward(training, number, micro, batch))
            given = batch if isinstance(batch, tuple) else (batch,)
            monitor.batch(*given, sample_ids=entries[-1]["sample_ids"])
            enabled = training.autocast is not None
            with torch.autocast("cpu", dtype=training.autocast) if enabled else nullcontext():
                loss = training.loss_function(training.model, batch)
            monitor.loss(loss)
            entries[-1]["loss"] = float(loss.detach())
            if training.divides:
                loss = loss / training.micro_batches
            (loss if training.scaler is None else training.scaler.scale(loss)).backward()
        if training.scaler is None:
            training.optimizer.step()
        else:
            training.scaler.step(training.optimizer)
            training.scaler.update()
        training.optimizer.zero_grad()
        if training.scheduler is not None:
            training.scheduler.step()
        for group, rate in zip(training.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate if training.rate is not None else group["lr"]
    monitor.close()
    records = list(monitor.records)
    record = records[-1]
    assert record.step == step and record.total_norm is not None
    files |= {"state.pt": state, "batches.pt": {"batches": [e for e in entries if e["step"] > step - 4]}}
    values = {} if event_values is None else event_values(record, records[:-1])
    event = {
        "kind": kind,
        "step": step,
        "severity": "error",
        "message": f"a {kind}",
        "values": values,
        "rank": 0,
    }
    manifest = {
        "event": event,
        "record": record.to_dict(),
        "records": [r.to_dict() for r in records],
        "parameters": [name for name, _ in training.model.named_parameters()],
        "shards": {},
        "setup": {
            "max_norm": training.max_norm,
            "norm_type": 2.0,
            "nonfinite": "skip",
            "micro_batches": training.micro_batches,
            "scaled": training.scaler is not None,
            "deterministic": deterministic_settings(),
        },
    }
    return IncidentStore(directory).save(step, kind, 0, 1, manifest, files).parent


def norm_event(record: Any, before: list[Any]) -> dict[str, Any]:
    norms = sorted(r.total_norm for r in before)
    return {"total_norm": record.total_norm, "median": norms[len(norms) // 2]}


def loss_event(record: Any, before: list[Any]) -> dict[str, Any]:
    losses = sorted(r.loss for r in before)
    return {"loss": record.loss, "median": losses[len(losses) // 2]}


def with_bad_samples(data: Callable[..., Any], step: int, indices: list[int], value: float = math.nan) -> Any:
    """Return the data with 64 samples, and one element of some samples replaced in one step."""

    def poisoned(number: int, micro: int) -> Any:
        inputs, targets = data(number, micro, 64)
        if number == step:
            for index in indices:
                inputs[index].view(-1)[3] = value
        return inputs, targets

    return poisoned
