# SPDX-License-Identifier: BSD-3-Clause
"""Clip gradients inside ``optimizer.step()``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import LBFGS, Optimizer

from .. import scaler_state
from ..collect import Groups, MaxNorm, require_groups_or_process_group, require_nonfinite
from ..distributed import ProcessGroups, require_process_group
from .handle import Handle, handle_of
from .step_inputs import ClipOptions

__all__ = ["Handle", "attach", "handle_of"]


def attach(
    optimizer: Optimizer,
    max_norm: MaxNorm | None,
    *,
    norm_type: float = 2.0,
    nonfinite: str = "skip",
    groups: Groups = None,
    scaler: GradScaler | None = None,
    names: Iterable[tuple[str, Tensor]] | None = None,
    process_group: ProcessGroups = None,
) -> Handle:
    """Clip the gradients of an optimizer inside its ``step()``, from now on.

    The update is that of ``clip_grad_norm_`` followed by ``step()``. torch's fused Adam, AdamW, SGD and
    Adagrad clip in their own kernel, so that clipping costs one read of the gradients; a step with NaN or Inf
    is skipped on the device, without waiting for it. For other optimizers the gradients are clipped in place
    before the step, and the host reads one flag a step unless `nonfinite` is "propagate" or "zero". A loss
    scale that is still on the gradients is taken into account.

    Args:
        optimizer: any torch.optim.Optimizer except LBFGS. The norm is that of its own parameters; gradients
            accumulated over several backward passes are clipped and counted once, in the step.
        max_norm: the limit, >= 0, for true (unscaled) gradients; as for :func:`fastclip.clip_`, including
            fastclip.policies. It may be changed later: ``handle.max_norm = 0.5``. None measures the gradients
            and changes neither them nor the step; `nonfinite` is then ignored.
        norm_type: the order p of the norm; ``inf`` for the largest element.
        nonfinite: what NaN or Inf in a gradient does. "skip" skips the step: parameters, gradients and the
            optimizer's state stay as they are; its hooks run. "propagate", "error" and "zero": as for
            :func:`fastclip.clip_grad_norm_`. Overflows that a loss scaler finds are always skipped, as in
            torch.
        groups: one norm and one coefficient for each group, as for :func:`fastclip.clip_`, or "param_group"
            for the optimizer's parameter groups, labelled 0, 1, and so on. Such gradients are clipped in
            place.
        scaler: the loss scaler whose ``step(optimizer)`` will be called. Calling ``optimizer.step()`` with
            scaled gradients then raises, and steps that the scaler skips are counted.
        names: (name, parameter) pairs such as ``model.named_parameters()``. Without them, the names given to
            the optimizer, else positions: "param_groups[0].params[3]".
        process_group: as for :func:`fastclip.clip_grad_norm_`; not together with `groups`.

    Returns:
        The :class:`Handle`, with ``stats``, ``last_step_applied``, ``skipped_steps`` and ``detach()``.

    Raises:
        TypeError: `optimizer` is not an optimizer, or cannot be clipped from outside.
        ValueError: `max_norm` is negative or NaN; `nonfinite` is unknown; `groups` do not fit the parameters;
            a policy cannot be combined with `groups` or `nonfinite`.
        RuntimeError: the optimizer is already attached.
    """
    _require_optimizer(optimizer)
    scaler_state.require_scaler(scaler)
    require_nonfinite(nonfinite)
    require_groups_or_process_group(groups, process_group)
    process_group = require_process_group(process_group)
    if handle_of(optimizer) is not None:
        raise RuntimeError(
            f"this {type(optimizer).__name__} is already attached; call detach() on its handle first"
        )
    clipping = ClipOptions(
        *(optimizer, max_norm, float(norm_type), nonfinite, groups, process_group),
        names=_require_names(names),
    )
    return Handle(clipping, scaler)


def _require_optimizer(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected optimizer to be a torch.optim.Optimizer, but got {type(optimizer).__name__}"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise TypeError(
            "LBFGS evaluates its closure several times in a step and stores gradients; clip in the closure"
        )
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise TypeError(f"{kind} wraps another optimizer; attach the inner one, before it is wrapped")
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        raise TypeError(
            f"{kind}.step takes the scaler and unscales on its own, so it cannot be clipped from outside"
        )


def _require_names(names: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    found: dict[Tensor, str] = {}
    for index, pair in enumerate(names if names is not None else ()):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise TypeError(
                "expected names to be (name, parameter) pairs such as model.named_parameters(), but got "
                f"{type(pair).__name__} at index {index}"
            )
        found[pair[1]] = str(pair[0])
    return found
