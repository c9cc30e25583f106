# SPDX-License-Identifier: BSD-3-Clause
"""Drop-in replacements for the functions of torch.nn.utils, with their signatures and meaning."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import scaler_state
from .backends import reference
from .collect import (
    Parameters,
    collect_gradients,
    require_foreach,
    require_max_norm,
    require_nonfinite,
    require_norm,
)
from .dispatch import run_clamp, run_scale, run_stats
from .distributed import ProcessGroups, shard_gradients
from .gradient_stats import clip_gradients
from .policies import Policy
from .policies.apply import require_policy

# The public function and the no_grad around it lie between collect_gradients() and the caller.
_TO_CALLER = 3


def _raise_if_nonfinite(total_norm: Tensor, norm_type: float) -> None:
    """Raise RuntimeError if the norm is NaN or Inf. Waits for the device."""
    if not total_norm.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients is {total_norm.item()}; no gradient was "
            "changed. error_if_nonfinite=False clips all the same; fastclip.clip_ with nonfinite='error' "
            "names the parameters."
        )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | Tensor | Policy,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    nonfinite: str = "propagate",
    scaler: torch.amp.GradScaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    process_group: ProcessGroups = None,
) -> Tensor:
    """Scale the gradients in place so that their total norm is at most `max_norm`.

    Equivalent to :func:`torch.nn.utils.clip_grad_norm_`: every gradient is multiplied with
    ``min(1, max_norm / (total_norm + 1e-6))``. Each gradient is read once; when nothing needs clipping none
    is written.

    Args:
        parameters: a Tensor or an iterable of Tensors, of any shapes; float32, bfloat16, float16, float64 or
            complex, in any mixture. Those without ``.grad`` are ignored.
        max_norm: the limit, >= 0; a Tensor of one element is used without waiting for its device. Or one of
            fastclip.policies, which chooses it from the norms of the run.
        norm_type: the order p of the norm, anything ``float()`` takes; ``inf`` for the largest element.
        error_if_nonfinite: raise, before any gradient is changed, if the total norm is NaN or Inf.
        foreach: accepted for compatibility.
        nonfinite: what NaN or Inf in a gradient does. "propagate": as in torch, NaN makes all gradients NaN
            and Inf makes the finite ones 0. "error": raise and name the gradients, before any is changed.
            "zero": such elements become 0 and the norm is that of the rest. "skip": no gradient is changed.
        scaler: the loss scaler of mixed precision. Gradients that are still scaled are unscaled and clipped
            in the same pass, and ``scaler.step(optimizer)`` takes this into account: ``scaler.unscale_`` is
            not needed.
        optimizer: the optimizer of all `parameters`; given together with `scaler`.
        process_group: further groups of processes that hold other parameters of the model, such as the stages
            of a pipeline: a ProcessGroup, several, or a mapping from each group to those parameters that
            differ between its processes, such as experts; all others are replicas there and count once.
            Shards of DTensors need no group: they know theirs.

    Returns:
        The total norm before clipping, a Tensor of shape [] on the device of the first gradient; float64 if
        any gradient is float64 or complex128, else float32. Zero on the CPU if there are no gradients.

    Raises:
        TypeError: not a Tensor, or a gradient whose dtype has no norm.
        ValueError: a negative or NaN max_norm; an unknown mode; with `scaler`, parameters that are not those
            of the optimizer, or float16 gradients.
        RuntimeError: a gradient that overlaps itself or part of another; a non-finite norm where that was
            asked to be an error; a backend that was named and cannot serve the device; with `scaler`, a
            second clip in one step, or one after ``scaler.step()``.
    """
    if not isinstance(max_norm, Policy):
        max_norm = require_max_norm(max_norm)
    norm_type = float(norm_type)
    if nonfinite != "propagate":
        require_nonfinite(nonfinite)
    if error_if_nonfinite and nonfinite in ("zero", "skip"):
        raise ValueError(f"expected error_if_nonfinite or nonfinite={nonfinite!r}, but got both")
    grads = collect_gradients(parameters, _TO_CALLER, process_group)
    unscaling = scaler_state.NOTHING_TO_UNSCALE
    if scaler is not None or optimizer is not None:
        unscaling = scaler_state.begin(scaler, optimizer, grads)
    if isinstance(max_norm, Policy):
        require_policy(max_norm, None, nonfinite, scaler_state.is_scaling(scaler))
    if not grads:
        return torch.tensor(0.0)
    if foreach:
        require_foreach(grads)
    require_norm(grads, norm_type)
    if error_if_nonfinite and norm_type not in (1.0, 2.0, math.inf):
        # Under other orders a NaN or Inf element may leave the norm finite, which is not an error.
        _raise_if_nonfinite(run_stats(grads, norm_type)[0][0], norm_type)
    elif error_if_nonfinite:
        nonfinite = "skip"
    summary, _, _ = clip_gradients(grads, max_norm, norm_type, nonfinite, inv_scale=unscaling.inv_scale)
    total_norm = summary.as_strided((), ())  # summary[0, 0], at half its cost
    if error_if_nonfinite:
        _raise_if_nonfinite(total_norm, norm_type)
    if unscaling.inv_scale is not None:
        unscaling.finish(summary)
    return total_norm


@torch.no_grad()
def clip_grad_value_(parameters: Parameters, clip_value: float, foreach: bool | None = None) -> None:
    """Limit every gradient element to [-clip_value, clip_value] in place; NaN stays NaN.

    Equivalent to :func:`torch.nn.utils.clip_grad_value_`, except that no gradients are no error.

    Args:
        parameters: a Tensor or an iterable of Tensors, of any shapes and real floating dtypes.
        clip_value: the limit, in the units of the gradients.
        foreach: accepted for compatibility.

    Raises:
        TypeError: not a Tensor, or a gradient that is not of floating dtype.
        NotImplementedError: a complex gradient.
        RuntimeError: a gradient that overlaps itself or part of another.
    """
    clip_value = float(clip_value)
    grads = collect_gradients(parameters, _TO_CALLER)
    if not grads:
        return
    if foreach:
        require_foreach(grads)
    run_clamp(grads, clip_value)


@torch.no_grad()
def get_total_norm(
    tensors: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: ProcessGroups = None,
) -> Tensor:
    """Return the norm of all tensors taken as one vector.

    Equivalent to :func:`torch.nn.utils.get_total_norm`. The tensors are the gradients themselves.

    Args:
        tensors: a Tensor or an iterable of Tensors, as the gradients of :func:`clip_grad_norm_`.
        norm_type: the order p of the norm, anything ``float()`` takes; ``inf`` for the largest element.
        error_if_nonfinite: raise if the norm is NaN or Inf.
        foreach: accepted for compatibility.
        process_group: as for :func:`clip_grad_norm_`; a mapping then names tensors.

    Returns:
        A Tensor of shape [], with dtype and device as for :func:`clip_grad_norm_`.
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm_type = float(norm_type)
    grads = shard_gradients(listed, listed, process_group) or listed
    if not grads:
        return torch.tensor(0.0)
    if foreach:
        require_foreach(listed)
    require_norm(listed, norm_type)
    total_norm = run_stats(grads, norm_type)[0][0]
    if error_if_nonfinite:
        _raise_if_nonfinite(total_norm, norm_type)
    return total_norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale the gradients in place by ``min(1, max_norm / (total_norm + 1e-6))``.

    Equivalent to :func:`torch.nn.utils.clip_grads_with_norm_`: the second half of :func:`clip_grad_norm_`,
    for a norm that was reduced over processes in between.

    Args:
        parameters: a Tensor or an iterable of Tensors: not the gradients, but the parameters that have them.
        max_norm: the limit, >= 0; a Tensor of one element is used without waiting for its device.
        total_norm: the norm, a Tensor of one element on any device, or a DTensor.
        foreach: accepted for compatibility.

    Raises:
        TypeError: not a Tensor. ValueError: a negative or NaN max_norm, or several norms.
        RuntimeError: a gradient that overlaps itself or part of another.
    """
    max_norm = require_max_norm(max_norm)
    if not isinstance(total_norm, Tensor):
        raise TypeError(f"expected total_norm to be a Tensor, but got {type(total_norm).__name__}")
    if total_norm.numel() != 1:
        raise ValueError(f"expected total_norm to have one element, but got shape {list(total_norm.shape)}")
    if hasattr(total_norm, "full_tensor"):
        total_norm = total_norm.full_tensor()  # a DTensor, whose local value may be a part of the norm
    grads = collect_gradients(parameters, _TO_CALLER)
    if not grads:
        return
    if foreach:
        require_foreach(grads)
    run_scale(grads, reference.clip_coefficient(total_norm, max_norm).reshape(1))
