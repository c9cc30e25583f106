# SPDX-License-Identifier: BSD-3-Clause
"""The clip inside optimizer.step(), and what is known about the last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from .. import scaler_state
from ..dispatch import run_stats
from ..gradient_stats import GradStats
from . import step_plan as plans
from .step_inputs import ClipOptions
from .step_plan import StepPlan
from .wrapping import MethodWrapper, restored_on_error

ATTRIBUTE = "_fastclip_handle"  # of the optimizer


class Observer(Protocol):
    """Who is told of each step of an attached optimizer, also of one that a scaler leaves out."""

    def before_update(self, plan: StepPlan | None) -> Tensor | None:
        """The gradients have been measured. A flag other than 0, [], leaves the step out."""

    def after_step(self) -> None:
        """The step is over."""


class Handle(ClipOptions):
    """What :func:`fastclip.attach` returns: the statistics of the last step, and the way back.

    Attributes:
        optimizer: the attached optimizer.
        max_norm: may be changed; holds from the next step on. None: measure and change nothing.
        observers: who is told of each step.
        norm_type, nonfinite, groups, process_group, names: as given to :func:`fastclip.attach`.
    """

    def __init__(self, clipping: ClipOptions, scaler: GradScaler | None) -> None:
        super().__init__(**vars(clipping))
        self._scaler = scaler
        self._driver: GradScaler | None = None  # whose step() is running
        self._prepared: StepPlan | None = None  # made by fastclip.GradScaler for the step that follows
        self._calls = 0
        self._passes = 0
        self._plan: StepPlan | None = None
        self._applied: bool | None = None
        self._skipped = 0
        self._skipped_on_device: Tensor | None = None  # added to in place: a captured graph counts too
        self._may_be_skipped_unseen = False
        self.observers: list[Observer] = []
        self.step_inputs(
            None, None
        )  # raises for what does not fit the parameters, before anything is changed
        self._wrappers = [MethodWrapper(self.optimizer, "step", self._step)]
        if scaler is not None:
            self._wrappers.append(MethodWrapper(scaler, "step", self._step_of_scaler))
        setattr(self.optimizer, ATTRIBUTE, self)

    @property
    def stats(self) -> GradStats | None:
        """The statistics of the last step, of true gradients, not scaled ones; None before the first."""
        return self._plan.grad_stats() if self._plan is not None else None

    @property
    def scaler(self) -> GradScaler | None:
        """The loss scaler that :func:`fastclip.attach` was told of."""
        return self._scaler

    @property
    def last_step_applied(self) -> bool | None:
        """Whether the last step changed the parameters. Waits for the device.

        None before the first step, after one that raised, and where it cannot be known: after a step made by
        a GradScaler that :func:`fastclip.attach` was not told of, for an optimizer that is not fused. Such a
        scaler leaves out a step without calling it.
        """
        left_out = self.left_out()
        return None if left_out is None else not bool(left_out)

    def left_out(self) -> bool | Tensor | None:
        """The opposite of `last_step_applied`, but not waiting: a tensor where only the device knows."""
        if self._may_be_skipped_unseen or self._applied is None:
            return None
        if self._plan is not None and isinstance(self._plan.found_inf, Tensor):
            return self._plan.found_inf
        return not self._applied

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out, for NaN or Inf or by a policy, as far as they were seen.

        Waits for the device.
        """
        return self._skipped + int(self._skipped_on_device if self._skipped_on_device is not None else 0)

    def detach(self) -> None:
        """Give the optimizer, and the scaler, back as they were. A second call does nothing."""
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
                args = (self._clipping(closure, stack), *args[1:])
            else:
                kwargs["closure"] = self._clipping(closure, stack)
            passes = self._passes
            result = inner(*args, **kwargs)
            if self._passes == passes and closure is not None:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__}.step() was given a closure and did not call it: the "
                    "gradients that it used were not clipped"
                )
        for observer in self.observers:
            observer.after_step()
        return result

    def _clipping(self, closure: Callable[[], Any], stack: ExitStack) -> Callable[[], Any]:
        """The closure, with the gradients that it made clipped until `stack` is closed."""
        calls = 0

        def clipping_closure() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise RuntimeError(
                    f"{type(self.optimizer).__name__} calls its closure several times in a step; its "
                    "gradients cannot be clipped inside of it. Clip in the closure and do not attach"
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
                plan.hold(flag)
        with ExitStack() as stack:
            if plan is not None:
                plan.apply(stack)
            yield
        self._record(plan)

    def _record(self, plan: StepPlan | None) -> None:
        if plan is not None:
            plan.let_go()
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
            self._driver is None and not self._is_scaled() and scaler_state.scaler_is_calling()
        )

    def _is_scaled(self) -> bool:
        return self._plan is not None and self._plan.inputs.is_scaled

    def _make_plan(self, scale: Tensor | None = None) -> StepPlan | None:
        """The pass over the gradients; None if there are none. `scale`: of the loss, where a scaler tells."""
        grad_scale = vars(self.optimizer).get("grad_scale")
        found_inf = vars(self.optimizer).get("found_inf")
        if scale is not None:
            grad_scale, found_inf = scale if grad_scale is None else scale * grad_scale, None
        else:
            self._require_scaler_at_work()
        inputs = self.step_inputs(grad_scale, found_inf)
        if not inputs.grads:
            return None
        plan = plans.make(inputs)
        if (
            plan.in_place
            and grad_scale is not None
            and self._driver is not None
            and self._driver.is_enabled()
        ):
            # If the step raises now and is made again, they must not be divided again.
            scaler_state.mark_unscaled(self._driver, self.optimizer)
        return plan

    # The loss scaler.

    def _require_scaler_at_work(self) -> None:
        scaler = self._scaler
        if scaler is None or self._driver is not None or scaler_state.is_unscaled(scaler, self.optimizer):
            return
        raise RuntimeError(
            "optimizer.step() was not called by the scaler that the optimizer was attached with, which has "
            "not unscaled its gradients either; call scaler.step(optimizer). No parameter was changed"
        )

    def _step_of_scaler(self, inner: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer is not self.optimizer or self._scaler is None:
            return inner(optimizer, *args, **kwargs)
        with self.driven_by(self._scaler):
            return inner(optimizer, *args, **kwargs)

    @contextmanager
    def driven_by(self, scaler: GradScaler) -> Iterator[None]:
        """For the time of scaler.step(optimizer). Sees it also if the scaler leaves the step out.

        Raises:
            RuntimeError: the optimizer was attached with another scaler.
        """
        if self._driver is scaler:
            yield
            return
        if self._scaler is not None and scaler is not self._scaler:
            raise RuntimeError(
                "the optimizer was attached with another scaler than the one whose step() was called; "
                "pass that one to fastclip.attach. Nothing was changed"
            )
        self._driver = scaler
        calls = self._calls
        try:
            # torch's own scaler leaves them behind when the step raises, and would multiply them next time.
            with restored_on_error(self.optimizer, "grad_scale", "found_inf"):
                yield
            if self._calls == calls:
                self._record_left_out(scaler)
        finally:
            self._driver = self._prepared = None

    @torch.no_grad()
    def prepare(self, scale: Tensor) -> StepPlan | None:
        """The one pass of a step, made early because the scaler asks for NaN and Inf before the step."""
        self._prepared = self._make_plan(scale)
        return self._prepared

    @torch.no_grad()
    def _record_left_out(self, scaler: GradScaler) -> None:
        """The scaler found NaN or Inf and did not call the step. The gradients are still there."""
        if not scaler_state.has_found_inf(scaler, self.optimizer):
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step was replaced by something that does not call what it "
                "replaced: this step was not clipped. Attach before the optimizer is wrapped, for example by "
                "accelerator.prepare"
            )
        plan = self._prepared
        if plan is None:
            inputs = self.step_inputs(None, None)
            if not inputs.grads:
                return
            total_norm, stats = run_stats(inputs.grads, self.norm_type, groups=inputs.groups)
            summary = total_norm.unsqueeze(1)
            plan = StepPlan(inputs, stats, None, fused=False, known_summary=summary, found_inf=True)
        self._plan = plan
        plan.let_go()
        self._applied = False
        self._skipped = self._skipped + 1
        for observer in self.observers:
            observer.before_update(plan)
            observer.after_step()


def handle_of(optimizer: torch.optim.Optimizer) -> Handle | None:
    """The handle of an attached optimizer."""
    return vars(optimizer).get(ATTRIBUTE)
