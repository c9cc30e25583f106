# SPDX-License-Identifier: BSD-3-Clause
"""What a clip has to know of a torch.amp.GradScaler, and to tell it.

The scaler keeps a small record of each optimizer from one update() to the next: whether its gradients are
still scaled, already unscaled or stepped, and whether NaN or Inf was found in them. The record has no public
access; it is the same in every torch from 2.6 to 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from .dispatch import GradientList

# The key under which a clip notes itself in the scaler's record of an optimizer.
_CLIPPED = "clipped_by_fastclip"


@dataclass(frozen=True)
class Unscaling:
    """What one clip owes to a loss scaler.

    Attributes:
        inv_scale: 1 / scale, [], float32; None where the gradients are not scaled.
    """

    inv_scale: Tensor | None = None
    _record: dict[str, Any] | None = None

    def finish(self, summary: Tensor) -> None:
        """Tell the scaler that its gradients are unscaled and clipped. `summary`: [G, 3] of the clip."""
        if self._record is None:
            return
        found_inf = (summary[:, 2] > 0).any().to(torch.float32)
        self._record["found_inf_per_device"] = {found_inf.device: found_inf}
        self._record["stage"] = OptState.UNSCALED
        self._record[_CLIPPED] = True


NOTHING_TO_UNSCALE = Unscaling()


def require_scaler(scaler: GradScaler | None) -> None:
    """Raise TypeError unless it is a torch.amp.GradScaler or None."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"expected scaler to be a torch.amp.GradScaler, but got {type(scaler).__name__}")


def is_scaling(scaler: GradScaler | None) -> bool:
    """Whether there is a loss scaler at work."""
    return scaler is not None and scaler.is_enabled()


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's gradients hold their true values: unscale_ has run, or nothing is scaled."""
    if not scaler.is_enabled():
        return True
    record = scaler._per_optimizer_states.get(id(optimizer))
    return record is not None and record["stage"] is OptState.UNSCALED


def mark_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Note that the gradients were unscaled in place."""
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED


def has_found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the scaler found NaN or Inf in the gradients of the present step. Waits for the device."""
    if not scaler.is_enabled():
        return False
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag) for flag in flags.values())


def inverse(scale: Tensor) -> Tensor:
    """1 / scale in float32, rounded as torch.amp.GradScaler.unscale_ does."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def require_unscalable(grads: Sequence[Tensor]) -> None:
    """Raise ValueError for float16 gradients: divided in place, the small ones would become 0."""
    for index, grad in enumerate(grads):
        if grad.dtype is torch.float16:
            raise ValueError(
                "Attempting to unscale FP16 gradients: expected those of a scaled loss to be float32 (keep "
                "the parameters in float32 under autocast) or their optimizer to be fused=True and attached, "
                f"but got gradient {index} with shape {list(grad.shape)} in float16"
            )


def _require_same_parameters(optimizer: torch.optim.Optimizer, clipped: Sequence[Tensor]) -> None:
    own = {id(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    given = {id(grad) for grad in clipped}
    if own != given:
        raise ValueError(
            "expected parameters to be all those of the optimizer, as they are unscaled together, but "
            f"{len(own - given)} of its {len(own)} gradients are missing and {len(given - own)} are not its"
        )


def begin(
    scaler: GradScaler | None, optimizer: torch.optim.Optimizer | None, grads: GradientList
) -> Unscaling:
    """Check the order of calls, before anything is changed.

    Raises:
        TypeError: scaler without optimizer or the other way round, or of another type.
        ValueError: `grads` are not the gradients of the optimizer; float16 gradients.
        RuntimeError: called twice for one step, or after scaler.step().
    """
    if scaler is None and optimizer is None:
        return NOTHING_TO_UNSCALE
    require_scaler(scaler)
    if (scaler is None) != (optimizer is None):
        got = "optimizer" if scaler is None else "scaler"
        raise TypeError(
            f"expected scaler and optimizer together, as scaler.step(optimizer), but got only {got}"
        )
    if scaler is None or optimizer is None or not scaler.is_enabled() or not grads:
        return NOTHING_TO_UNSCALE
    scale, _ = scaler._check_scale_growth_tracker("clip_grad_norm_")
    record = scaler._per_optimizer_states[id(optimizer)]
    if record["stage"] is OptState.STEPPED:
        raise RuntimeError(
            "the gradients are clipped after scaler.step(optimizer), which has already used them; clip "
            "between backward() and scaler.step(), and call scaler.update() after it"
        )
    if record.get(_CLIPPED):
        raise RuntimeError(
            "the gradients of this optimizer have already been unscaled and clipped in this step; a second "
            "clip would measure what the first has left. Clip once between backward() and "
            "scaler.step(optimizer), and call scaler.update() after it"
        )
    if record["stage"] is OptState.UNSCALED:
        return NOTHING_TO_UNSCALE  # the user has called unscale_
    here = grads if isinstance(grads, list) else grads.gradients
    _require_same_parameters(optimizer, here)
    require_unscalable(here)
    return Unscaling(inverse(scale), record)


def scaler_is_calling(depth: int = 12) -> bool:
    """Whether a GradScaler called the step. It does so for an optimizer that is not fused, without a sign."""
    code = GradScaler._maybe_opt_step.__code__
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False
