# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that are compared on a GPU: fastclip's, torch's, and other packages' if installed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import torch

import fastclip
from fastclip.backends import triton

from ..compiled import compile_function

_MOST_TENSORS_TO_COMPILE = 300  # torch.compile unrolls the list

Clip = Callable[[list[torch.nn.Parameter], float], object]


def _transformer_engine() -> Clip:
    """Return clipping by TransformerEngine's multi-tensor kernels, called as its users call them."""
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")

    def clip(parameters: list[torch.nn.Parameter], max_norm: float) -> object:
        grads = [p.grad for p in parameters]
        flag = torch.zeros(1, dtype=torch.int, device=grads[0].device)
        norm, _ = optimizers.multi_tensor_applier(optimizers.multi_tensor_l2norm, flag, [grads], False)
        coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        optimizers.multi_tensor_applier(optimizers.multi_tensor_scale_tensor, flag, [grads, grads], coef)
        return norm

    return clip


def _apex() -> Clip:
    return importlib.import_module("apex.contrib.clip_grad").clip_grad_norm_


def _by_triton(parameters: list[torch.nn.Parameter], max_norm: float) -> object:
    with fastclip.backends.use("triton"):
        return fastclip.clip_grad_norm_(parameters, max_norm)


def implementations(count: int, device: torch.device) -> dict[str, Clip]:
    """Return the implementations that can clip this many gradients here, by name."""
    torch_clip = torch.nn.utils.clip_grad_norm_
    found: dict[str, Clip] = {
        "fastclip": fastclip.clip_grad_norm_,
        "fastclip, Triton": _by_triton,
        "torch foreach": functools.partial(torch_clip, foreach=True),
    }
    if count <= _MOST_TENSORS_TO_COMPILE:
        found["torch.compile"] = compile_function(torch_clip)
    if triton.unavailable(device) is not None:
        del found["fastclip, Triton"]
    for name, make in (("TransformerEngine", _transformer_engine), ("apex", _apex)):
        try:
            found[name] = make()
        except ImportError:
            continue
    return found
