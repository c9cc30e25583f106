# SPDX-License-Identifier: BSD-3-Clause
"""The handle of an attached optimizer: it clips inside optimizer.step() and reports the last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from .. import scaler_state
from ..gradient_stats import GradStats
from .observer import Observer
from .planning import plan_skipped_step, plan_step
from .step_inputs import ClipOptions
from .step_plan import StepPlan
from .wrapping import MethodWrapper, restored_on_error

ATTRIBUTE = "_fastclip_handle"  # on the optimizer


class Handle(ClipOptions):
    """The object that :func:`fastclip.attach` returns: reports the last step, and can detach.

    Attributes:
        optimizer: the attached optimizer.
        max_norm: may be changed, from the next step on. None: measure and change nothing.
        observers: objects that are called in each step, see :class:`Observer`.
        norm_type, nonfinite, groups, process_group, names: as given to :func:`fastclip.attach`.
    """

    def __init__(self, clipping: ClipOptions, scaler: GradScaler | None) -> None:
        super().__init__(**vars(clipping))
        self._scaler = scaler
        self._active_scaler: GradScaler | None = None  # its step() is running
        self._prepared: StepPlan | None = None  # of the step that follows, see prepare()
        self._calls = 0
        self._passes = 0
        self._plan: StepPlan | None = None
        self._applied: bool | None = None
        self._skipped = 0
        self._skipped_on_device: Tensor | None = None  # added to in place: a captured graph counts too
        self._may_be_skipped_unseen = False
        self.observers: list[Observer] = []
        # Raises for arguments that do not fit the parameters, before anything is changed.
        self.step_inputs(None, None)
        self._wrappers = [MethodWrapper(self.optimizer, "step", self._step)]
        if scaler is not None:
            self._wrappers.append(MethodWrapper(scaler, "step", self._scaler_step))
        setattr(self.optimizer, ATTRIBUTE, self)

    @property
    def stats(self) -> GradStats | None:
        """The statistics of the last step, of true gradients, not of scaled ones; None before the first."""
        return self._plan.grad_stats() if self._plan is not None else None

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler that was given to :func:`fastclip.attach`."""
        return self._scaler

    @property
    def last_step_applied(self) -> bool | None:
        """Whether the last step changed the parameters. Waits for the device.

        None before the first step, after one that raised, and where it cannot be known: if the optimizer is
        not fused and its steps are called by a GradScaler that was not given to :func:`fastclip.attach`. Such
        a scaler skips a step by not calling it.
        """
        skipped = self.step_skipped()
        return None if skipped is None else not bool(skipped)

    def step_skipped(self) -> bool | Tensor | None:
        """Return the opposite of `last_step_applied` without waiting: a tensor if only the device knows."""
        if self._may_be_skipped_unseen or self._applied is None:
            return None
        if self._plan is not None and isinstance(self._plan.found_inf, Tensor):
            return self._plan.found_inf
        return not self._applied

    @property
    def skipped_steps(self) -> int:
        """The number of steps known to be skipped, for NaN or Inf or by a policy. Waits for the device."""
        return self._skipped + int(self._skipped_on_device if self._skipped_on_device is not None else 0)

    def detach(self) -> None:
        """Restore the optimizer and the scaler as they were. A second call does nothing."""
        for wrapper in self._wrappers:
            wrapper.undo()
        if vars(self.optimizer).get(ATTRIBUTE) is self:
            delattr(self.optimizer, ATTRIBUTE)

    def __repr__(self) -> str:
        kind = type(self.optimizer).__name__
        return f"Handle({kind}, max_norm={self.max_norm}, nonfinite={self.nonfinite!r})"

    # The step.

    def _step(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        self._applied = None
        closure = args[0] if args else kwargs.get("closure")
        with ExitStack() as stack:
            if closure is None:
                stack.enter_context(self._clipped())
            elif args:
                args = (self._clip_in_closure(closure, stack), *args[1:])
            else:
                kwargs["closure"] = self._clip_in_closure(closure, stack)
            passes = self._passes
            result = inner(*args, **kwargs)
            if self._passes == passes and closure is not None:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__}.step() was given a closure but did not call it, so "
                    "the gradients that it used were not clipped"
                )
        for observer in self.observers:
            observer.after_step()
        return result

    def _clip_in_closure(self, closure: Callable[[], Any], stack: ExitStack) -> Callable[[], Any]:
        """Wrap the closure so that the gradients that it computes are clipped, until `stack` is closed."""
        calls = 0

        def clipping_closure() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} calls its closure several times in a step, so that "
                    "its gradients cannot be clipped from outside. Clip in the closure instead of attaching"
                )
            loss = closure()
            stack.enter_context(self._clipped())
            return loss

        return clipping_closure

    @contextmanager
    def _clipped(self) -> Iterator[None]:
        self._passes += 1
        plan, self._prepared = self._prepared, None
        with torch.no_grad():
            self._plan = plan = plan or self._make_plan()
        if plan is not None:
            plan.raise_if_error()
        for observer in self.observers:
            flag = observer.before_update(plan)
            if flag is not None and plan is not None:
                plan.skip_if(flag)
        with ExitStack() as stack:
            if plan is not None:
                plan.apply(stack)
            yield
        self._record(plan)

    def _record(self, plan: StepPlan | None) -> None:
        if plan is not None:
            plan.release_gradients()
        found_inf = plan.found_inf if plan is not None else False
        if isinstance(found_inf, bool):
            self._applied = not found_inf
            self._skipped += found_inf
        else:
            self._applied = True  # as far as the host knows
            if self._skipped_on_device is None:
                self._skipped_on_device = torch.zeros_like(found_inf, dtype=torch.int64)
            self._skipped_on_device += found_inf.to(torch.int64)
        self._may_be_skipped_unseen = (
            self._active_scaler is None and not self._is_scaled() and scaler_state.scaler_is_calling()
        )

    def _is_scaled(self) -> bool:
        return self._plan is not None and self._plan.inputs.is_scaled

    def _make_plan(self, scale: Tensor | None = None) -> StepPlan | None:
        """Make the pass over the gradients; return None if there are none.

        Args:
            scale: the loss scale that is still on the gradients, [], if a scaler is known.
        """
        grad_scale = vars(self.optimizer).get("grad_scale")
        found_inf = vars(self.optimizer).get("found_inf")
        if scale is not None:
            grad_scale, found_inf = scale if grad_scale is None else scale * grad_scale, None
        else:
            self._require_scaler_or_true_gradients()
        inputs = self.step_inputs(grad_scale, found_inf)
        if not inputs.grads:
            return None
        plan = plan_step(inputs)
        if (
            plan.in_place
            and grad_scale is not None
            and self._active_scaler is not None
            and self._active_scaler.is_enabled()
        ):
            # If the step raises now and is called again, the gradients must not be divided again.
            scaler_state.mark_unscaled(self._active_scaler, self.optimizer)
        return plan

    # The loss scaler.

    def _require_scaler_or_true_gradients(self) -> None:
        scaler = self._scaler
        if scaler is None or self._active_scaler is not None:
            return
        if scaler_state.is_unscaled(scaler, self.optimizer):
            return
        raise RuntimeError(
            "the gradients are still scaled, and optimizer.step() was not called by the scaler given to "
            "fastclip.attach; call scaler.step(optimizer). No parameter was changed"
        )

    def _scaler_step(self, inner: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not self.optimizer or self._scaler is None:
            return inner(optimizer, *args, **kwargs)
        with self.inside_scaler_step(self._scaler):
            return inner(optimizer, *args, **kwargs)

    @contextmanager
    def inside_scaler_step(self, scaler: GradScaler) -> Iterator[None]:
        """Enclose scaler.step(optimizer), so that a step that the scaler skips is recorded too.

        Raises:
            RuntimeError: the optimizer was attached with a different scaler.
        """
        if self._active_scaler is scaler:
            yield
            return
        if self._scaler is not None and scaler is not self._scaler:
            raise RuntimeError(
                "the optimizer was attached with a different scaler than the one whose step() was called; "
                "pass the latter to fastclip.attach. Nothing was changed"
            )
        self._active_scaler = scaler
        calls = self._calls
        try:
            # torch's scaler leaves both set when the step raises, and would multiply them next time.
            with restored_on_error(self.optimizer, "grad_scale", "found_inf"):
                yield
            if self._calls == calls:
                self._record_scaler_skip(scaler)
        finally:
            self._active_scaler = self._prepared = None

    @torch.no_grad()
    def prepare(self, scale: Tensor | None) -> StepPlan | None:
        """Make the one pass of the next step now, for a caller that needs its result before the step.

        Args:
            scale: the loss scale that is still on the gradients, []; None if they are true.

        Returns:
            The plan that the next step will use; None if there are no gradients.
        """
        self._prepared = self._make_plan(scale)
        return self._prepared

    def discard_prepared(self) -> None:
        """Forget the plan of :meth:`prepare`: the gradients have changed since."""
        self._prepared = None

    @torch.no_grad()
    def _record_scaler_skip(self, scaler: GradScaler) -> None:
        """Record a step that the scaler skipped by not calling it. The gradients are still there."""
        if not scaler_state.has_found_inf(scaler, self.optimizer):
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step was replaced by a method that does not call the "
                "replaced one, so this step was not clipped. Attach before the optimizer is wrapped, for "
                "example by accelerator.prepare"
            )
        plan = self._prepared
        if plan is None:
            inputs = self.step_inputs(None, None)
            if not inputs.grads:
                return
            plan = plan_skipped_step(inputs)
        self._plan = plan
        plan.release_gradients()
        self._applied = False
        self._skipped += 1
        for observer in self.observers:
            observer.before_update(plan)
            observer.after_step()


def handle_of(optimizer: torch.optim.Optimizer) -> Handle | None:
    """Return the handle of an attached optimizer, or None."""
    return vars(optimizer).get(ATTRIBUTE)
