# SPDX-License-Identifier: BSD-3-Clause
"""Training steps without a model: optimizers of every kind, gradients with overflows, and loss scalers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import fastclip

SHAPES = ((40, 30), (30,), (), (7, 11, 3), (0,), (2000,))
MAX_NORM = 2.0
LR = 0.01

Parameters = list[torch.nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    """Return parameters with the same values at every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def _in_two_groups(kind: type[Optimizer], first: dict, second: dict) -> Callable[[Parameters], Optimizer]:
    return lambda p: kind([{"params": p[:2], **first}, {"params": p[2:], "lr": 3 * LR, **second}], lr=LR)


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "adam_fused": lambda p: Adam(p, lr=LR, weight_decay=0.1, fused=True),
    "adamw_fused": lambda p: AdamW(p, lr=LR, amsgrad=True, fused=True),
    "sgd_fused": lambda p: SGD(p, lr=LR, momentum=0.9, nesterov=True, fused=True),
    "sgd_fused_dampened": lambda p: SGD(p, lr=LR, momentum=0.9, dampening=0.5, fused=True),
    "adagrad_fused": lambda p: Adagrad(p, lr=LR, fused=True),
    "adamw_fused_by_group": _in_two_groups(AdamW, {"fused": True}, {"fused": True}),
    "adamw_partly_fused": _in_two_groups(AdamW, {"fused": True}, {"foreach": True}),
    "adam_foreach": lambda p: Adam(p, lr=LR, foreach=True),
    "adamw_single": lambda p: AdamW(p, lr=LR, foreach=False),
    "sgd_foreach": lambda p: SGD(p, lr=LR, momentum=0.9, dampening=0.5, foreach=True),
    "rmsprop": lambda p: RMSprop(p, lr=LR),
}
# These clip in their kernel; the last of them does not show it to a loss scaler.
FUSED = [name for name in OPTIMIZERS if "_fused" in name and "partly" not in name]
# The steps after which everything is compared: those with overflows and those next to them, and the last.
CHECKED = (1, 2, 3, 4, 8, 9, 10, 24, 25, 50)


def gradients(steps: int, dtype: torch.dtype = torch.float32) -> Iterator[list[Tensor]]:
    """Yield true gradients of each step; the first two steps and some later ones hold Inf or NaN."""
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        size = 10 ** torch.empty(()).uniform_(-4, 0, generator=generator).item()
        grads = [(torch.randn(s, generator=generator) * size).to(dtype) for s in SHAPES]
        if step in (0, 1, 7, 8, 23):
            grads[3][2, 5, 1] = math.inf if step % 2 else math.nan
        yield grads


def is_finite(grads: list[Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in grads)


def set_gradients(params: Parameters, grads: list[Tensor], scale: float = 1.0) -> None:
    for p, g in zip(params, grads, strict=True):
        p.grad = g * scale


class TorchRun:
    """The reference of other runs: torch's clipping and step; a non-finite step is skipped."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.params = parameters(dtype)
        self.optimizer = OPTIMIZERS[name](self.params)

    def step(self, grads: list[Tensor], max_norm: float = MAX_NORM) -> Tensor:
        set_gradients(self.params, grads)
        if not is_finite(grads):
            return torch.tensor(math.nan)
        total_norm = torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        self.optimizer.step()
        return total_norm


def assert_same_parameters(params: Parameters, gold: TorchRun, steps: int) -> None:
    """Compare parameters with the tolerance of coefficients that differ by one ulp in each step."""
    tolerance = {"rtol": 2e-7 * steps, "atol": 2e-7 * LR * steps}
    for p, q in zip(params, gold.params, strict=True):
        torch.testing.assert_close(p, q, **tolerance)


def assert_same_state(optimizer: Optimizer, gold: TorchRun, steps: int) -> None:
    """Compare the optimizers' states; entries that only a skipped step has created count as zero."""
    for p, q in zip(
        (p for g in optimizer.param_groups for p in g["params"]),
        (p for g in gold.optimizer.param_groups for p in g["params"]),
        strict=True,
    ):
        state, wanted = optimizer.state.get(p, {}), gold.optimizer.state.get(q, {})
        for key in {*state, *wanted}:
            value = state.get(key)
            other = wanted.get(key)
            if value is None and other is None:
                continue
            value, other = (None if x is None else torch.as_tensor(x) for x in (value, other))
            value = torch.zeros_like(other) if value is None else value
            other = torch.zeros_like(value) if other is None else other
            largest = other.abs().max().item() if other.numel() else 0.0  # averages cancel to nearly 0
            torch.testing.assert_close(value, other, rtol=4e-7 * steps, atol=4e-7 * largest)


def attached(name: str, **options) -> tuple[Parameters, Optimizer, fastclip.Handle]:
    """Return an attached optimizer with its parameters and its handle."""
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    return params, optimizer, fastclip.attach(optimizer, MAX_NORM, **options)


SCALER_OPTIONS = {"init_scale": 64.0, "growth_interval": 3, "growth_factor": 4.0}


def make_scaler(way: str, **options) -> torch.amp.GradScaler:
    """Return fastclip's loss scaler if `way` names it, else torch's."""
    kind = fastclip.GradScaler if "fastclip" in way else torch.amp.GradScaler
    return kind("cpu", **{**SCALER_OPTIONS, **options})


def scaled(n: int = 2, scale: float = 8.0, kind: type[torch.amp.GradScaler] = torch.amp.GradScaler):
    """Return parameters whose gradients, all 2, are still scaled, with their optimizer and scaler."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(n)]
    optimizer = SGD(params, lr=1.0)
    scaler = kind("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    for p in params:
        p.grad = torch.full_like(p, 2.0 * scale)
    return params, optimizer, scaler
