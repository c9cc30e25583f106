# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate: a patch that clips with fastclip, and a monitor for prepared models and optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .. import scaler_state
from ..clip_grad import clip_grad_norm_, clip_grad_value_, get_total_norm
from ..collect import MaxNorm
from ..monitor import Monitor
from ..optim import Handle, handle_of
from ..optim.wrapping import MethodWrapper

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        'fastclip.integrations.accelerate needs Accelerate: pip install "torch-fastclip[hf]"'
    ) from error

__all__ = ["AcceleratorMonitor", "patch_accelerator"]

# Optimizers that update in the backward pass, so that no step can be clipped or skipped.
_NO_STEP = ("Lomo", "AdaLomo", "LayerWiseDummyOptimizer")


def require_supported(accelerator: Accelerator) -> None:
    """Raise RuntimeError for backends that own the gradients, or clip and step themselves."""
    kind = accelerator.distributed_type
    advice = {
        DistributedType.DEEPSPEED: "it clips in its own step; set gradient_clipping in its configuration",
        DistributedType.MEGATRON_LM: "it clips in its own step",
        DistributedType.XLA: "fastclip has no backend for XLA devices",
    }.get(kind)
    if kind == DistributedType.FSDP and not getattr(accelerator, "is_fsdp2", False):
        advice = "its flat shards hide which parameter they belong to; use FSDP2 (fsdp_version=2)"
    if advice is not None:
        name = "FSDP1" if kind == DistributedType.FSDP else str(getattr(kind, "value", kind))
        raise RuntimeError(f"fastclip does not work with {name} through Accelerate: {advice}")


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that Accelerate has wrapped, or the optimizer itself.

    Raises:
        TypeError: the optimizer updates the parameters in the backward pass, not in its step.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if type(optimizer).__name__ in _NO_STEP:
        raise TypeError(
            f"{type(optimizer).__name__} updates the parameters in the backward pass; its gradients cannot "
            "be clipped by their norm, and its steps cannot be skipped"
        )
    return optimizer


class patch_accelerator:
    """Replace ``clip_grad_norm_`` and ``clip_grad_value_`` of an Accelerator, until :meth:`undo`.

    The arguments and the returned norm, before clipping, of true gradients, are Accelerate's. With a loss
    scaler the gradients of an optimizer are unscaled and clipped in one pass. Works as a context manager::

        with patch_accelerator(accelerator):
            ...

    For an attached optimizer (:func:`fastclip.attach`, :class:`fastclip.Monitor`) ``clip_grad_norm_`` makes
    the one pass of the next step and returns its norm; the limit of the attached optimizer applies.

    Args:
        accelerator: the Accelerator, before or after ``prepare``.

    Raises:
        TypeError: `accelerator` is not an Accelerator.
        RuntimeError: DeepSpeed, Megatron-LM, FSDP1 or an XLA device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(
                f"expected accelerator to be an accelerate.Accelerator, but got {type(accelerator).__name__}"
            )
        require_supported(accelerator)
        self._accelerator = accelerator
        self._wrappers = [
            MethodWrapper(accelerator, "clip_grad_norm_", self._clip_grad_norm),
            MethodWrapper(accelerator, "clip_grad_value_", self._clip_grad_value),
            MethodWrapper(accelerator, "backward", self._backward),
        ]

    def undo(self) -> None:
        """Restore the Accelerator's methods. A second call does nothing."""
        for wrapper in self._wrappers:
            wrapper.undo()

    def __enter__(self) -> patch_accelerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def _optimizers(self) -> Iterator[Optimizer]:
        for optimizer in self._accelerator._optimizers:
            yield inner_optimizer(optimizer)

    def _clip_grad_norm(
        self, inner: Any, parameters: Any, max_norm: float | Tensor, norm_type: float = 2.0
    ) -> Tensor:
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given = {id(p) for p in listed if p.grad is not None}
        for optimizer in self._optimizers():
            handle = handle_of(optimizer)
            if handle is not None and not given.isdisjoint(_with_gradient(optimizer)):
                return self._clip_attached(handle, listed, max_norm, norm_type)
        scaler = self._scaler
        if scaler_state.is_scaling(scaler):
            for optimizer in self._optimizers():
                if given == _with_gradient(optimizer):
                    return clip_grad_norm_(listed, max_norm, norm_type, scaler=scaler, optimizer=optimizer)
            self._accelerator.unscale_gradients()
        return clip_grad_norm_(listed, max_norm, norm_type)

    def _clip_attached(
        self, handle: Handle, parameters: list[Tensor], max_norm: float | Tensor, norm_type: float
    ) -> Tensor:
        _require_attached_limit(handle, float(max_norm), float(norm_type))
        if not self._accelerator.sync_gradients:
            # Not all batches are in yet: the step, and with it the clip, comes later.
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
            scale = None if handle.scaler is None else handle.scaler._scale
            return norm if scale is None else norm * scaler_state.inverse(scale).to(norm.device)
        return measure_for_step(handle)

    def _clip_grad_value(self, inner: Any, parameters: Any, clip_value: float) -> None:
        if self._accelerator.distributed_type == DistributedType.FSDP:
            inner(parameters, clip_value)  # raises
        self._accelerator.unscale_gradients()
        clip_grad_value_(parameters, clip_value)

    def _backward(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Discard what was measured for a step that was not made: the gradients change."""
        for optimizer in self._optimizers():
            handle = handle_of(optimizer)
            if handle is not None:
                handle.discard_prepared()
        return inner(*args, **kwargs)

    @property
    def _scaler(self) -> GradScaler | None:
        return self._accelerator.scaler


def _with_gradient(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def _require_attached_limit(handle: Handle, max_norm: float, norm_type: float) -> None:
    """Raise ValueError if the arguments differ from those that the optimizer is attached with."""
    limit = handle.max_norm
    if norm_type != handle.norm_type:
        raise ValueError(
            f"expected norm_type to be {handle.norm_type} as for the attached optimizer, but got {norm_type}"
        )
    if limit is None:
        raise ValueError(
            "the optimizer is attached without max_norm, to observe only, and would see clipped gradients: "
            "pass max_norm to fastclip.Monitor or fastclip.attach"
        )
    fits = isinstance(limit, (int, float, Tensor)) and float(limit) == max_norm
    if not fits and max_norm != math.inf:
        raise ValueError(
            f"expected max_norm to be {limit} as for the attached optimizer, or inf to return the norm only, "
            f"but got {max_norm}"
        )


@torch.no_grad()
def measure_for_step(handle: Handle) -> Tensor:
    """Make the pass over the gradients of the next step now.

    The gradients are clipped in this pass, or in the step by the kernel of a fused optimizer.

    Returns:
        The norm before clipping, of true gradients, []; 0 if there are no gradients.
    """
    scaler, optimizer = handle.scaler, handle.optimizer
    scale = None
    if scaler is not None and not scaler_state.is_unscaled(scaler, optimizer):
        scale, _ = scaler._check_scale_growth_tracker("clip_grad_norm_")
    plan = handle.prepare(scale)
    if plan is None:
        return torch.tensor(0.0)
    if scale is not None and scaler is not None and plan.in_place:
        overflow = torch.as_tensor(plan.overflow, dtype=torch.float32, device=scale.device)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {scale.device: overflow}
        scaler_state.mark_unscaled(scaler, optimizer)
    return plan.summary[:, 0].amax()


def _rebind(optimizer: Optimizer) -> None:
    """Make a prepared optimizer call the step method that its inner one has now.

    With a loss scaler a prepared optimizer restores, around each step, the method that it found when it was
    created; it looks for the method anew when it is unpickled.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer.__setstate__({})
        optimizer = optimizer.optimizer


class AcceleratorMonitor(Monitor):
    """A :class:`fastclip.Monitor` for a model and an optimizer prepared by an Accelerator.

    ::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        monitor = AcceleratorMonitor(accelerator, model, optimizer, max_norm=1.0, log_dir="runs/1")

    The loop stays as it is, including ``accelerator.clip_grad_norm_`` with the same max_norm, which returns
    the norm. A step is recorded when ``optimizer.step()`` is called with synchronized gradients; it covers
    all batches and losses since the previous step.

    Args:
        accelerator: provides the loss scaler; its clipping is fastclip's until ``close()``.
        model, optimizer: as returned by ``accelerator.prepare``.
        max_norm, options: as for :class:`fastclip.Monitor`; the scheduler may be a prepared one.

    Raises:
        TypeError, ValueError, RuntimeError, OSError: as :class:`patch_accelerator` and
            :class:`fastclip.Monitor`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_norm: MaxNorm | None = None,
        **options: Any,
    ) -> None:
        scheduler = options.pop("scheduler", None)
        if isinstance(scheduler, AcceleratedScheduler):
            scheduler = scheduler.scheduler
        self._patch = patch_accelerator(accelerator)
        self._prepared = optimizer
        try:
            super().__init__(
                accelerator.unwrap_model(model),
                inner_optimizer(optimizer),
                max_norm=max_norm,
                scheduler=scheduler,
                scaler=accelerator.scaler,
                **options,
            )
        except BaseException:
            self._patch.undo()
            raise
        _rebind(optimizer)

    def close(self) -> None:
        """Close the monitor as :meth:`fastclip.Monitor.close` does, and restore the accelerator."""
        super().close()
        _rebind(self._prepared)
        self._patch.undo()
