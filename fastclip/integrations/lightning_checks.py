# SPDX-License-Identifier: BSD-3-Clause
"""What the callback for Lightning refuses, before anything is changed."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer

from ..collect import MaxNorm
from ..monitor import Monitor

# Strategies whose gradients are not those of the optimizer's parameters at the time of its step.
_REFUSED_STRATEGIES = {
    "FSDPStrategy": "its flat parameters hide which gradient belongs to which process; use FSDP2 "
    "(ModelParallelStrategy with fully_shard in configure_model)",
    "DeepSpeedStrategy": "DeepSpeed clips inside its own engine; set gradient_clipping in its configuration",
}
# What the Trainer knows and the callback passes on.
_FROM_THE_TRAINER = ("model", "optimizer", "scheduler", "scaler")


def require_options(options: dict[str, Any]) -> None:
    """Raise TypeError for what is no option of the monitor, or not one to give."""
    known = set(inspect.signature(Monitor).parameters) - set(_FROM_THE_TRAINER)
    if unknown := sorted(set(options) - known):
        why = (
            f"{unknown[0]} is the Trainer's to give"
            if unknown[0] in _FROM_THE_TRAINER
            else f"FastclipCallback has max_norm, log_dir, sample_ids and {', '.join(sorted(known))}"
        )
        raise TypeError(f"got an unexpected argument {unknown[0]!r}: {why}")


def require_module(pl_module: Any, kind: type, package: str) -> None:
    """Raise ValueError for a LightningModule of the other package."""
    if not isinstance(pl_module, kind):
        raise ValueError(
            f"expected a LightningModule and a Trainer of {package}, but got {type(pl_module).__name__} of "
            "another package: there is a FastclipCallback for `lightning` in fastclip.integrations.lightning "
            "and one for `pytorch_lightning` in fastclip.integrations.pytorch_lightning"
        )


def require_strategy(strategy: Any) -> None:
    """Raise ValueError for FSDP1 and DeepSpeed, by name: importing what defines them may need DeepSpeed."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in _REFUSED_STRATEGIES:
            reason = _REFUSED_STRATEGIES[kind.__name__]
            raise ValueError(f"FastclipCallback does not work with {kind.__name__}: {reason}")


def require_sole_clipping(trainer: Any, pl_module: Any, kind: Any, max_norm: MaxNorm | None) -> None:
    """Raise ValueError where Lightning or the module would clip before fastclip sees the gradients."""
    if clip_val := trainer.gradient_clip_val:
        keep = clip_val if max_norm is None else max_norm
        raise ValueError(
            f"expected one to clip the gradients, but got Trainer(gradient_clip_val={clip_val}) beside "
            f"FastclipCallback(max_norm={max_norm}), which would see them when they are clipped already. "
            f"Keep FastclipCallback(max_norm={keep}) and leave out gradient_clip_val"
        )
    if not pl_module.automatic_optimization:
        return  # Lightning does not call the method
    own = getattr(pl_module.configure_gradient_clipping, "__func__", None)
    if own is not kind.configure_gradient_clipping:
        raise ValueError(
            f"expected one to clip the gradients, but {type(pl_module).__name__} overrides "
            "configure_gradient_clipping, which is called before FastclipCallback sees them. Remove it and "
            "give max_norm to FastclipCallback"
        )


def only_optimizer(trainer: Any) -> Optimizer:
    """The optimizer as torch knows it.

    Raises:
        ValueError: there are several, or none.
    """
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
    if len(optimizers) != 1:
        raise ValueError(
            f"expected configure_optimizers to give one optimizer, but got {len(optimizers)}. Which loss "
            "belongs to which of several cannot be known: call fastclip.attach for each of them in "
            "configure_optimizers, in the place of FastclipCallback"
        )
    return optimizers[0]
