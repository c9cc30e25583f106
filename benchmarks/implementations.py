# SPDX-License-Identifier: BSD-3-Clause
"""The implementations that bench_clip.py compares, under one signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import fastclip
from fastclip.bench.parity import Clip
from fastclip.bench.workloads import SMOKE

from .compiled import compile_function

# torch.compile unrolls the list; with thousands of tensors that takes many minutes.
_MOST_TENSORS_TO_COMPILE = 20 if SMOKE else 150


_TORCH: dict[str, Callable[[], Clip]] = {
    "torch_foreach": lambda: functools.partial(torch.nn.utils.clip_grad_norm_, foreach=True),
    "torch_loop": lambda: functools.partial(torch.nn.utils.clip_grad_norm_, foreach=False),
    "torch_compile": lambda: compile_function(torch.nn.utils.clip_grad_norm_),
}
_FASTCLIP = {"fastclip_native": "native", "fastclip_reference": "reference"}

NAMES = (*_TORCH, *_FASTCLIP)


def is_fastclip(name: str) -> bool:
    """Return whether the implementation is one of fastclip's."""
    return name in _FASTCLIP


def skip_reason(name: str, count: int) -> str | None:
    """Return why an implementation is not measured on this many gradients; None if it is."""
    if name == "torch_compile" and count > _MOST_TENSORS_TO_COMPILE:
        return f"torch.compile would unroll {count} tensors"
    if is_fastclip(name):
        status = fastclip.backends.status()[_FASTCLIP[name]]
        return None if status in ("in use", "usable") else status
    return None


@contextmanager
def implementation(name: str) -> Iterator[Clip]:
    """Yield the named implementation, which is in use until the block ends."""
    if name in _TORCH:
        yield _TORCH[name]()
    else:
        with fastclip.backends.use(_FASTCLIP[name]):
            yield fastclip.clip_grad_norm_
