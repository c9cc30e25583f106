# SPDX-License-Identifier: BSD-3-Clause
"""The checks that the callback for Lightning makes before anything is changed."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..collect import MaxNorm

# Strategies under which the optimizer's parameters do not have the gradients when the step is made.
_REFUSED_STRATEGIES = {
    "FSDPStrategy": "its flat parameters hide which process holds which gradient; use FSDP2 "
    "(ModelParallelStrategy with fully_shard in configure_model)",
    "DeepSpeedStrategy": "DeepSpeed clips inside its own engine; set gradient_clipping in its configuration",
}


def require_module(pl_module: Any, kind: type, package: str) -> None:
    """Raise ValueError for a LightningModule of the other package."""
    if not isinstance(pl_module, kind):
        raise ValueError(
            f"expected a LightningModule and a Trainer of {package}, but got {type(pl_module).__name__} of "
            "another package: use fastclip.integrations.lightning with `lightning`, and "
            "fastclip.integrations.pytorch_lightning with `pytorch_lightning`"
        )


def require_strategy(strategy: Any) -> None:
    """Raise ValueError for FSDP1 and DeepSpeed, found by name, since importing them may need DeepSpeed."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in _REFUSED_STRATEGIES:
            reason = _REFUSED_STRATEGIES[kind.__name__]
            raise ValueError(f"FastclipCallback does not work with {kind.__name__}: {reason}")


def require_sole_clipping(trainer: Any, pl_module: Any, kind: Any, max_norm: MaxNorm | None) -> None:
    """Raise ValueError if Lightning or the module would clip before fastclip sees the gradients."""
    if clip_val := trainer.gradient_clip_val:
        keep = clip_val if max_norm is None else max_norm
        raise ValueError(
            f"both Trainer(gradient_clip_val={clip_val}) and FastclipCallback(max_norm={max_norm}) would "
            "clip, so that fastclip would see clipped gradients. Remove gradient_clip_val and use "
            f"FastclipCallback(max_norm={keep})"
        )
    if not pl_module.automatic_optimization:
        return  # Lightning does not call the method
    own = getattr(pl_module.configure_gradient_clipping, "__func__", None)
    if own is not kind.configure_gradient_clipping:
        raise ValueError(
            f"both {type(pl_module).__name__}.configure_gradient_clipping and FastclipCallback would clip, "
            "so that fastclip would see clipped gradients. Remove the method and pass max_norm to "
            "FastclipCallback"
        )


def only_optimizer(trainer: Any) -> Optimizer:
    """Return the Trainer's only optimizer, without Lightning's wrapper.

    Raises:
        ValueError: there are several optimizers, or none.
    """
    optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.optimizers]
    if len(optimizers) != 1:
        raise ValueError(
            f"expected configure_optimizers to return one optimizer, but got {len(optimizers)}. With "
            "several, the losses cannot be assigned to them: call fastclip.attach for each of them in "
            "configure_optimizers instead of using FastclipCallback"
        )
    return optimizers[0]
