# SPDX-License-Identifier: BSD-3-Clause
"""The state of a torch.amp.GradScaler that a clip has to read and to update.

The scaler keeps a small record of each optimizer from one update() to the next: whether its gradients are
still scaled, already unscaled or stepped, and whether NaN or Inf was found in them. The record is not public;
it is the same in every torch from 2.6 to 2.14.
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

# The key that marks a clip in the scaler's record of an optimizer.
_CLIPPED = "clipped_by_fastclip"


@dataclass(frozen=True)
class Unscaling:
    """The unscaling that one clip does for a loss scaler.

    Attributes:
        inv_scale: 1 / scale, [], float32; None if the gradients are not scaled.
    """

    inv_scale: Tensor | None = None
    _record: dict[str, Any] | None = None

    def finish(self, summary: Tensor) -> None:
        """Record in the scaler that its gradients are unscaled and clipped.

        Args:
            summary: [G, 3] of the clip.
        """
        if self._record is None:
            return
        found_inf = (summary[:, 2] > 0).any().to(torch.float32)
        self._record["found_inf_per_device"] = {found_inf.device: found_inf}
        self._record["stage"] = OptState.UNSCALED
        self._record[_CLIPPED] = True


NOTHING_TO_UNSCALE = Unscaling()


def require_scaler(scaler: GradScaler | None) -> None:
    """Raise TypeError unless `scaler` is a torch.amp.GradScaler or None."""
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"expected scaler to be a torch.amp.GradScaler, but got {type(scaler).__name__}")


def is_scaling(scaler: GradScaler | None) -> bool:
    """Return whether there is an enabled loss scaler."""
    return scaler is not None and scaler.is_enabled()


def is_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's gradients are true: unscale_ has run, or the scaler is disabled."""
    if not scaler.is_enabled():
        return True
    record = scaler._per_optimizer_states.get(id(optimizer))
    return record is not None and record["stage"] is OptState.UNSCALED


def mark_unscaled(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Record in the scaler that the gradients were unscaled in place."""
    scaler._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED


def has_found_inf(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the scaler found NaN or Inf in the current step. Waits for the device."""
    if not scaler.is_enabled():
        return False
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(flag) for flag in flags.values())


def inverse(scale: Tensor) -> Tensor:
    """Return 1 / scale in float32, rounded as in torch.amp.GradScaler.unscale_."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


def require_unscalable(grads: Sequence[Tensor]) -> None:
    """Raise ValueError for float16 gradients: divided in place, small ones would become 0."""
    for index, grad in enumerate(grads):
        if grad.dtype is torch.float16:
            raise ValueError(
                "Attempting to unscale FP16 gradients: expected float32 gradients (keep the parameters in "
                "float32 under autocast), or an attached optimizer with fused=True, but got gradient "
                f"{index} with shape {list(grad.shape)} in float16"
            )


def _require_same_parameters(optimizer: torch.optim.Optimizer, clipped: Sequence[Tensor]) -> None:
    own = {id(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    given = {id(grad) for grad in clipped}
    if own != given:
        missing, foreign = len(own - given), len(given - own)
        raise ValueError(
            "expected all parameters of the optimizer, since they are unscaled together, but "
            f"{missing} of its {len(own)} gradients are missing and {foreign} are not its own"
        )


def begin(
    scaler: GradScaler | None, optimizer: torch.optim.Optimizer | None, grads: GradientList
) -> Unscaling:
    """Check the order of calls before anything is changed, and return what the clip has to unscale.

    Raises:
        TypeError: only one of scaler and optimizer was given, or the scaler is not a GradScaler.
        ValueError: `grads` are not the gradients of the optimizer, or are float16.
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
            "the gradients would be clipped after scaler.step(optimizer), which has already used them; clip "
            "between backward() and scaler.step(optimizer), then call scaler.update()"
        )
    if record.get(_CLIPPED):
        raise RuntimeError(
            "the gradients of this optimizer have already been unscaled and clipped in this step; a second "
            "clip would measure clipped gradients. Clip once between backward() and scaler.step(optimizer), "
            "then call scaler.update()"
        )
    if record["stage"] is OptState.UNSCALED:
        return NOTHING_TO_UNSCALE  # the user has called unscale_
    here = grads if isinstance(grads, list) else grads.gradients
    _require_same_parameters(optimizer, here)
    require_unscalable(here)
    return Unscaling(inverse(scale), record)


def scaler_is_calling(depth: int = 12) -> bool:
    """Return whether a GradScaler is among the callers.

    Nothing else shows it if the optimizer is not fused.
    """
    code = GradScaler._maybe_opt_step.__code__
    frame = sys._getframe(1)
    for _ in range(depth):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code is code:
            return True
    return False
