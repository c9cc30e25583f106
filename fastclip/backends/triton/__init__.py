# SPDX-License-Identifier: BSD-3-Clause
"""The ops in Triton: for CUDA without the CUDA library, and for ROCm and XPU, where they are untested.

These are plain functions and not registered ops: torch.compile runs them outside its graphs. Kernels, order
of summation and results are fixed; nothing is tuned at run time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ..transfer import scalars_on
from .tensor_list import TensorList, build_tensor_list

NORM_TYPES = (1.0, 2.0, float("inf"))
OLDEST_TRITON = (3, 2)
DEVICES = ("cuda", "xpu")

_MODES = {"propagate": 0, "zero": 1, "skip": 2}
# Enough threads for loads of 16 bytes in the 2-byte dtypes, with few registers each. Fixed, as the order of
# summation depends on it. A warp has 64 threads on AMD GPUs.
_WARPS = 4 if torch.version.hip else 8


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def reason_absent() -> str | None:
    """Return why Triton cannot be used at all, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"Triton {'.'.join(map(str, OLDEST_TRITON))} or later is needed, this is {triton.__version__}"
    return None


def unavailable(device: torch.device) -> str | None:
    """Return why this backend cannot serve the device, or None if it can."""
    if device.type not in DEVICES and not (device.type == "cpu" and _interpreted()):
        return f"Triton has no kernels for {device.type}"
    if (reason := reason_absent()) is not None:
        return reason
    if device.type == "cpu" or _interpreted():
        return None
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # each driver raises its own exception type
        return f"Triton finds no driver for {device.type}: {error}"
    return None


def _wide(device: torch.device) -> torch.dtype:
    """Return the accumulation dtype: float64, or float32 if the device does not support float64."""
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def _language_type(dtype: torch.dtype) -> object:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def _require_count(scalars: Tensor, count: int, name: str) -> None:
    if scalars.numel() not in (1, count):
        expected = "1 element" if count == 1 else f"1 or {count} elements"
        raise RuntimeError(f"expected {name} to have {expected}, but got {scalars.numel()}")


_Function = TypeVar("_Function", bound=Callable[..., object])


def _on_device_of_gradients(function: _Function) -> _Function:
    """Make the device of the gradients current during the call, as Triton launches on the current device."""

    @functools.wraps(function)
    def wrapper(grads: list[Tensor], *arguments: object, **options: object) -> object:
        device = grads[0].device if isinstance(grads[0], Tensor) else torch.device("cpu")
        module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)
        with module.device(device) if module else contextlib.nullcontext():
            return function(grads, *arguments, **options)

    return cast(_Function, wrapper)


class _Statistics(NamedTuple):
    result: Tensor
    stats: Tensor
    factors: Tensor
    counts: Tensor


def _require_arguments(norm_type: float, groups: Sequence[int], count: int) -> None:
    if norm_type not in NORM_TYPES:
        raise RuntimeError(f"expected norm_type to be 1, 2 or inf, but got {norm_type}")
    if groups and len(groups) != count:
        raise RuntimeError(f"expected groups to have one entry per gradient ({count}), but got {len(groups)}")


def _compute(
    grads: Sequence[Tensor],
    tensors: TensorList,
    norm_type: float,
    finite_only: bool,
    num_groups: int,
    clip: tuple[Tensor, Tensor, bool] | None,
) -> _Statistics:
    """Compute the statistics and, with `clip`, the summary and the factors.

    `clip` holds max_norm, the inverse loss scale, and whether max_norm was given as a tensor.
    """
    from . import clip_summary, statistics

    device = grads[0].device
    wide, real = _wide(device), _result_dtype(grads)
    norm = NORM_TYPES.index(norm_type)
    partials = torch.empty(max(1, tensors.chunks), dtype=wide, device=device)
    counts = torch.empty((max(1, tensors.chunks), 2), dtype=torch.int32, device=device)
    stats = torch.empty((tensors.num_tensors, 3), dtype=wide, device=device)
    result = torch.empty((num_groups, 3) if clip else num_groups, dtype=real, device=device)
    factors = torch.empty(num_groups, dtype=wide, device=device)
    options = {"norm": norm, "wide": _language_type(wide), "num_warps": _WARPS}
    if tensors.chunks:
        statistics.chunk_statistics[(tensors.chunks,)](
            tensors.metadata,
            tensors.num_tensors,
            tensors.steps,
            partials,
            counts,
            int(finite_only),
            **options,
        )
    statistics.tensor_statistics[(tensors.num_tensors,)](
        tensors.metadata, tensors.num_tensors, tensors.chunks, partials, counts, stats, **options
    )
    limits, inv_scale, is_tensor = clip or (factors, factors, False)
    clip_summary.summarize[(num_groups,)](
        *(tensors.metadata, tensors.num_tensors, stats, limits, inv_scale, result, factors),
        int(limits.numel() > 1),
        real=_language_type(real),
        clip=clip is not None,
        max_norm_is_tensor=is_tensor,
        **options,
    )
    return _Statistics(result, stats, factors, counts)


def _unpack(tensors: TensorList) -> None:
    for grad, copy in tensors.copies:
        grad.copy_(copy)


@_on_device_of_gradients
def grad_stats(
    grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.grad_stats`."""
    _require_arguments(norm_type, groups, len(grads))
    tensors = build_tensor_list(grads, groups or [0] * len(grads), write=False)
    num_groups = max(groups) + 1 if groups else 1
    found = _compute(grads, tensors, norm_type, finite_only, num_groups, None)
    return found.result, found.stats


def _scale(
    grads: Sequence[Tensor],
    tensors: TensorList,
    factors: Tensor,
    summary: Tensor,
    counts: Tensor | None,
    mode: int,
) -> None:
    from . import update

    if tensors.chunks == 0:
        return
    for repeat in range(tensors.rounds):
        update.scale[(tensors.chunks,)](
            *(tensors.metadata, tensors.num_tensors, tensors.steps, tensors.chunks, factors, summary),
            *(summary.shape[0], factors if counts is None else counts, repeat, int(factors.numel() > 1)),
            mode=mode,
            counted=counts is not None,
            num_warps=_WARPS,
            wide=_language_type(_wide(grads[0].device)),
        )
    _unpack(tensors)


@_on_device_of_gradients
def scale_(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """See :func:`fastclip.backends.reference.scale_`."""
    tensors = build_tensor_list(grads, range(len(grads)), write=True)
    factors = scalars_on(grads[0].device, scale, _wide(grads[0].device))
    _require_count(factors, len(grads), "scale")
    _scale(grads, tensors, factors, factors, None, _MODES["zero" if zero_nonfinite else "propagate"])
    torch.autograd.graph.increment_version(grads)


@_on_device_of_gradients
def clip_(
    grads: list[Tensor],
    max_norm: float | Tensor,
    norm_type: float,
    nonfinite: str,
    groups: Sequence[int] = (),
    inv_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.clip_`."""
    _require_arguments(norm_type, groups, len(grads))
    if nonfinite not in _MODES:
        raise RuntimeError(f"expected nonfinite to be 'propagate', 'zero' or 'skip', but got {nonfinite!r}")
    device = grads[0].device
    tensors = build_tensor_list(grads, groups or [0] * len(grads), write=True)
    num_groups = max(groups) + 1 if groups else 1
    limits = scalars_on(device, max_norm, _wide(device))
    _require_count(limits, num_groups, "max_norm")
    unscale = scalars_on(device, 1.0 if inv_scale is None else inv_scale, _wide(device))
    _require_count(unscale, 1, "inv_scale")
    clip = (limits, unscale, isinstance(max_norm, Tensor))
    found = _compute(grads, tensors, norm_type, nonfinite == "zero", num_groups, clip)
    _scale(grads, tensors, found.factors, found.result, found.counts, _MODES[nonfinite])
    torch.autograd.graph.increment_version(grads)
    return found.result, found.stats


@_on_device_of_gradients
def clamp_(grads: list[Tensor], limit: float) -> None:
    """See :func:`fastclip.backends.reference.clamp_`."""
    if limit != limit:  # as in torch, a NaN limit makes everything NaN
        return scale_(grads, torch.tensor(limit))
    from . import update

    device = grads[0].device
    tensors = build_tensor_list(grads, [0] * len(grads), write=True)
    bound = scalars_on(device, float(limit), _wide(device))
    if tensors.chunks:
        update.clamp[(tensors.chunks,)](
            *(tensors.metadata, tensors.num_tensors, tensors.steps, bound),
            wide=_language_type(_wide(device)),
            num_warps=_WARPS,
        )
        _unpack(tensors)
    torch.autograd.graph.increment_version(grads)
