# SPDX-License-Identifier: BSD-3-Clause
"""A loss scaler for mixed precision, with statistics from the pass that looks for NaN and Inf."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import scaler_state
from .backends import reference
from .dispatch import run_scale, run_stats
from .distributed import ShardedGradients, shard_gradients
from .gradient_stats import GradStats, nonfinite_per_rank_of
from .optim import Handle, handle_of
from .optim.step_inputs import names_in
from .optim.step_plan import StepPlan


class GradScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler whose search for NaN and Inf also gives norms and counts.

    The arguments, methods and state_dict are torch's, as are growth and backoff of the scale. With an
    attached optimizer (:func:`fastclip.attach`) one pass over the gradients unscales them, looks for NaN and
    Inf, measures the norm and clips, together with a fused optimizer's kernel; ``unscale_`` is not needed.

    Attributes:
        overflows: the number of updates that found NaN or Inf since the scaler was created. Reading it waits
            for the device.
        consecutive_overflows: the number of the latest updates in a row that did.

    Raises:
        RuntimeError: by ``update()``, if the scale has fallen to 0: every later gradient would be NaN. Before
            that, steps for which 1 / scale is not finite are skipped; torch would apply the NaN.

    Warns once if the scale falls below 1. On a GPU both are noticed one update later, without waiting for it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running_step = False
        self._last: GradStats | StepPlan | None = None  # a plan computes its statistics on demand
        self._counts: Tensor | None = None  # [2]: overflows, consecutive overflows
        self._warned = False
        self._async_scale: _AsyncScalar | None = None

    @property
    def stats(self) -> GradStats | None:
        """The statistics of the last pass, of true gradients, not of scaled ones; None before the first."""
        return self._last.grad_stats() if isinstance(self._last, StepPlan) else self._last

    @property
    def overflows(self) -> int:
        return int(self._counts[0]) if self._counts is not None else 0

    @property
    def consecutive_overflows(self) -> int:
        return int(self._counts[1]) if self._counts is not None else 0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Make the step as torch.amp.GradScaler.step does. An attached optimizer clips in it."""
        handle = handle_of(optimizer)
        self._running_step = True
        try:
            with handle.inside_scaler_step(self) if handle is not None else nullcontext():
                return super().step(optimizer, *args, **kwargs)
        finally:
            self._running_step = False

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale for torch's scaler, or, with inv_scale 1 and allow_fp16, only look for NaN and Inf."""
        handle = handle_of(optimizer)
        if handle is not None and handle.max_norm is not None and self._running_step:
            found = self._plan_step(handle)
        else:
            found = self._unscale(optimizer, inv_scale, allow_fp16)
        return {} if found is None else {found.device: found}

    def _plan_step(self, handle: Handle) -> Tensor | None:
        assert self._scale is not None
        plan = handle.prepare(self._scale)
        if plan is None:
            return None
        self._last = plan
        overflow = plan.overflow
        if isinstance(overflow, Tensor):
            return overflow.clone()  # update() adds the flags of other optimizers to it
        return torch.tensor(float(overflow))

    @torch.no_grad()
    def _unscale(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, allow_fp16: bool
    ) -> Tensor | None:
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        if not parameters:
            return None
        each = [p.grad for p in parameters]
        if not allow_fp16:
            scaler_state.require_unscalable(each)
        grads = shard_gradients(parameters, each) or each
        assert self._scale is not None
        true_inverse = scaler_state.inverse(self._scale)
        total_norm, stats = run_stats(grads, 2.0)
        known = names_in(optimizer)
        indices = grads.indices if isinstance(grads, ShardedGradients) else range(len(each))
        names = [known[parameters[i]] for i in indices]
        # Scaled, the norm itself may be too large for its dtype.
        norm = reference.totals(stats, 2.0)
        summary = (norm * true_inverse.to(norm)).to(total_norm.dtype).unsqueeze(1)
        self._last = GradStats(summary, stats, names, 2.0, (), true_inverse, nonfinite_per_rank_of(grads))
        run_scale(grads, inv_scale)  # 1 touches nothing
        # 0 times an infinite inverse is NaN, though the gradients looked finite.
        found = (stats[:, 1:] > 0).any() | ~true_inverse.isfinite().to(stats.device)
        return found.to(torch.float32)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale as torch.amp.GradScaler.update does, count overflows and check the scale.

        Raises:
            RuntimeError: the scale has fallen to 0.
        """
        if not self._enabled:
            return
        records = self._per_optimizer_states.values()
        found = [flag for record in records for flag in record["found_inf_per_device"].values()]
        super().update(new_scale)
        assert self._scale is not None  # else torch has raised
        self._count(found, self._scale.device)
        self._watch(self._scale)

    def _count(self, found: list[Tensor], device: torch.device) -> None:
        if not found:
            return
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        overflow = torch.stack([f.to(device, non_blocking=True).reshape(()) for f in found]).amax() != 0
        self._counts[1] *= overflow
        self._counts += overflow

    def _watch(self, scale: Tensor) -> None:
        if self._async_scale is None:
            self._async_scale = _AsyncScalar()
        value = self._async_scale.read(scale)
        if value is None or value >= 1.0:
            return
        if value == 0.0:
            raise RuntimeError(
                f"the loss scale has fallen to 0 after {self.overflows} overflows, "
                f"{self.consecutive_overflows} of them in a row: every later gradient would be NaN. Part of "
                "the model produces NaN or Inf at any scale; GradScaler.stats.worst() names the parameters"
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the loss scale has fallen to {value:g}, below 1, after {self.consecutive_overflows} "
                "overflows in a row. Scaling no longer helps: look for NaN or Inf in the data and in the "
                "forward pass, or train in bfloat16. GradScaler.stats.worst() names the parameters",
                stacklevel=3,
            )

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_async_scale"] = None  # holds a CUDA event
        state["_last"] = None  # holds the parameters
        return state


class _AsyncScalar:
    """Reads a number on a device without waiting: at once on the CPU, on a GPU one call late.

    Each call starts an asynchronous copy, which a later call reads once it is complete.
    """

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: torch.Event | None = None

    def read(self, number: Tensor) -> float | None:
        """Return the number, or that of an earlier call; None if no copy is complete."""
        if number.device.type != "cuda":
            return float(number)
        with torch.cuda.device(number.device):  # so that the event is on its stream
            return self._read_pending(number)

    def _read_pending(self, number: Tensor) -> float | None:
        if torch.cuda.is_current_stream_capturing():
            return None
        value = None
        if self._copy is not None and self._event is not None:
            if not self._event.query():
                return None
            value = float(self._copy)
        if self._copy is None or self._event is None:
            self._copy = torch.empty((), dtype=number.dtype, pin_memory=True)
            self._event = torch.cuda.Event()
        self._copy.copy_(number, non_blocking=True)
        self._event.record()
        return value
