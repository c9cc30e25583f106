# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that are compared, under one signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import fastclip
from fastclip.bench.parity import Clip
from fastclip.bench.workloads import SMOKE

# torch.compile unrolls the list; with thousands of tensors that takes many minutes.
_MOST_TENSORS_TO_COMPILE = 20 if SMOKE else 150


def _compiled() -> Clip:
    torch._dynamo.reset()  # each case is one compilation; without this the ninth would silently run eagerly
    # At smoke size the path through the tracer is what is checked, not the code it generates.
    return torch.compile(torch.nn.utils.clip_grad_norm_, backend="eager" if SMOKE else "inductor")


_TORCH: dict[str, Callable[[], Clip]] = {
    "torch_foreach": lambda: functools.partial(torch.nn.utils.clip_grad_norm_, foreach=True),
    "torch_loop": lambda: functools.partial(torch.nn.utils.clip_grad_norm_, foreach=False),
    "torch_compile": _compiled,
}
_FASTCLIP = {"fastclip_native": "native", "fastclip_reference": "reference"}

NAMES = (*_TORCH, *_FASTCLIP)


def is_fastclip(name: str) -> bool:
    return name in _FASTCLIP


def reason_absent(name: str, count: int) -> str | None:
    """Why the implementation is not measured on so many gradients, or None if it is."""
    if name == "torch_compile" and count > _MOST_TENSORS_TO_COMPILE:
        return f"torch.compile would unroll {count} tensors"
    if is_fastclip(name):
        status = fastclip.backends.status()[_FASTCLIP[name]]
        return None if status in ("in use", "usable") else status
    return None


@contextmanager
def provider(name: str) -> Iterator[Clip]:
    """The implementation, for as long as the block lasts."""
    if name in _TORCH:
        yield _TORCH[name]()
    else:
        with fastclip.backends.use(_FASTCLIP[name]):
            yield fastclip.clip_grad_norm_
