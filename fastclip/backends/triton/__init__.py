# SPDX-License-Identifier: BSD-3-Clause
"""The same pass in Triton: for CUDA where the library is not there, and for ROCm and XPU, untested there.

Plain functions and not registered ops: torch.compile runs them as they are, outside of its graphs. Kernels,
order of summation and results are fixed; nothing is tuned at run time.
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

from ..transfer import numbers_on
from .lists import GradientList, prepare

NORM_TYPES = (1.0, 2.0, float("inf"))
OLDEST_TRITON = (3, 2)
DEVICES = ("cuda", "xpu")

_MODES = {"propagate": 0, "zero": 1, "skip": 2}
# Threads enough for 16 bytes each in the 2-byte dtypes, and with few registers: fixed, as the order of
# summation depends on it. A warp of AMD has 64 threads.
_WARPS = 4 if torch.version.hip else 8


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def reason_absent() -> str | None:
    """Why Triton cannot be used at all, or None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"Triton {'.'.join(map(str, OLDEST_TRITON))} or later is needed, this is {triton.__version__}"
    return None


def unavailable(device: torch.device) -> str | None:
    """Why this backend cannot serve the device, or None if it can."""
    if device.type not in DEVICES and not (device.type == "cpu" and _interpreted()):
        return f"Triton has no kernels for {device.type}"
    if (reason := reason_absent()) is not None:
        return reason
    if device.type == "cpu" or _interpreted():
        return None
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # each of its drivers raises its own kind
        return f"Triton finds no driver for {device.type}: {error}"
    return None


def _wide(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no float64."""
    if device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64:
        return torch.float32
    return torch.float64


def _result_dtype(grads: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32


def _language_type(dtype: torch.dtype) -> object:
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def _require_count(numbers: Tensor, other: int, name: str) -> None:
    if numbers.numel() not in (1, other):
        raise RuntimeError(f"expected {name} to have 1 or {other} elements, but got {numbers.numel()}")


_Function = TypeVar("_Function", bound=Callable[..., object])


def _on_its_device(function: _Function) -> _Function:
    """Triton launches on the current device: make it that of the gradients for the time of the call."""

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
        raise RuntimeError(f"expected norm_type 1, 2 or inf, but got {norm_type}")
    if groups and len(groups) != count:
        raise RuntimeError(f"expected a group for each of the {count} gradients, but got {len(groups)}")


def _compute(
    grads: Sequence[Tensor],
    prepared: GradientList,
    norm_type: float,
    finite_only: bool,
    num_groups: int,
    clip: tuple[Tensor, Tensor, bool] | None,
) -> _Statistics:
    """Statistics, and with `clip` (limits, inverse scale, whether the limits were a tensor) the summary."""
    from . import statistics, summary

    device = grads[0].device
    wide, real = _wide(device), _result_dtype(grads)
    norm = NORM_TYPES.index(norm_type)
    slots = torch.empty(max(1, prepared.chunks), dtype=wide, device=device)
    counts = torch.empty((max(1, prepared.chunks), 2), dtype=torch.int32, device=device)
    stats = torch.empty((prepared.num_grads, 3), dtype=wide, device=device)
    result = torch.empty((num_groups, 3) if clip else num_groups, dtype=real, device=device)
    factors = torch.empty(num_groups, dtype=wide, device=device)
    options = {"norm": norm, "wide": _language_type(wide), "num_warps": _WARPS}
    if prepared.chunks:
        statistics.statistics[(prepared.chunks,)](
            prepared.table,
            prepared.num_grads,
            prepared.steps,
            slots,
            counts,
            int(finite_only),
            **options,
        )
    statistics.rows[(prepared.num_grads,)](
        prepared.table, prepared.num_grads, prepared.chunks, slots, counts, stats, **options
    )
    limits, inv_scale, is_tensor = clip or (factors, factors, False)
    summary.summarize[(num_groups,)](
        *(prepared.table, prepared.num_grads, stats, limits, inv_scale, result, factors),
        int(limits.numel() > 1),
        real=_language_type(real),
        clip=clip is not None,
        max_norm_is_tensor=is_tensor,
        **options,
    )
    return _Statistics(result, stats, factors, counts)


def _unpack(prepared: GradientList) -> None:
    for grad, copy in prepared.copies:
        grad.copy_(copy)


@_on_its_device
def grad_stats(
    grads: list[Tensor], norm_type: float, finite_only: bool = False, groups: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """See :func:`fastclip.backends.reference.grad_stats`."""
    _require_arguments(norm_type, groups, len(grads))
    prepared = prepare(grads, groups or [0] * len(grads), write=False)
    num_groups = max(groups) + 1 if groups else 1
    found = _compute(grads, prepared, norm_type, finite_only, num_groups, None)
    return found.result, found.stats


def _scale(
    grads: Sequence[Tensor],
    prepared: GradientList,
    factors: Tensor,
    flags: Tensor,
    counts: Tensor | None,
    mode: int,
) -> None:
    from . import updates

    if prepared.chunks == 0:
        return
    for repeat in range(prepared.rounds):
        updates.scale[(prepared.chunks,)](
            *(prepared.table, prepared.num_grads, prepared.steps, prepared.chunks, factors, flags),
            *(flags.shape[0], factors if counts is None else counts, repeat, int(factors.numel() > 1)),
            mode=mode,
            counted=counts is not None,
            num_warps=_WARPS,
            wide=_language_type(_wide(grads[0].device)),
        )
    _unpack(prepared)


@_on_its_device
def scale_(grads: list[Tensor], scale: Tensor, zero_nonfinite: bool = False) -> None:
    """See :func:`fastclip.backends.reference.scale_`."""
    prepared = prepare(grads, range(len(grads)), write=True)
    factors = numbers_on(grads[0].device, scale, _wide(grads[0].device))
    _require_count(factors, len(grads), "scale")
    _scale(grads, prepared, factors, factors, None, _MODES["zero" if zero_nonfinite else "propagate"])
    torch.autograd.graph.increment_version(grads)


@_on_its_device
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
        raise RuntimeError(f"expected nonfinite 'propagate', 'zero' or 'skip', but got {nonfinite!r}")
    device = grads[0].device
    prepared = prepare(grads, groups or [0] * len(grads), write=True)
    num_groups = max(groups) + 1 if groups else 1
    limits = numbers_on(device, max_norm, _wide(device))
    _require_count(limits, num_groups, "max_norm")
    unscale = numbers_on(device, 1.0 if inv_scale is None else inv_scale, _wide(device))
    _require_count(unscale, 1, "inv_scale")
    clip = (limits, unscale, isinstance(max_norm, Tensor))
    found = _compute(grads, prepared, norm_type, nonfinite == "zero", num_groups, clip)
    _scale(grads, prepared, found.factors, found.result, found.counts, _MODES[nonfinite])
    torch.autograd.graph.increment_version(grads)
    return found.result, found.stats


@_on_its_device
def clamp_(grads: list[Tensor], limit: float) -> None:
    """See :func:`fastclip.backends.reference.clamp_`."""
    if limit != limit:  # as in torch, a NaN limit makes everything NaN
        return scale_(grads, torch.tensor(limit))
    from . import updates

    device = grads[0].device
    prepared = prepare(grads, [0] * len(grads), write=True)
    bound = numbers_on(device, float(limit), _wide(device))
    if prepared.chunks:
        updates.clamp[(prepared.chunks,)](
            *(prepared.table, prepared.num_grads, prepared.steps, bound),
            wide=_language_type(_wide(device)),
            num_warps=_WARPS,
        )
        _unpack(prepared)
    torch.autograd.graph.increment_version(grads)
