# SPDX-License-Identifier: BSD-3-Clause
"""The callback for Lightning's Trainer, created for `lightning` and for `pytorch_lightning` alike."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..collect import MaxNorm
from ..monitor import Monitor
from ..optim import Handle
from ..optim.step_plan import StepPlan
from . import lightning_checks as checks
from .monitor_options import require_monitor_options


class TrainerHooks:
    """Clips inside ``optimizer.step()`` and watches the training, as :class:`fastclip.Monitor` does.

    ::

        callback = FastclipCallback(max_norm=1.0, log_dir="runs/1")
        trainer = Trainer(callbacks=[callback])        # without gradient_clip_val
        trainer.fit(module)
        print(callback.monitor.summary())

    Works with 16-mixed precision, fused optimizers and gradient accumulation. The monitor's state is part of
    Lightning's checkpoints: ``trainer.fit(ckpt_path=...)`` continues with the same events. Of several
    processes, all continue from the state of the first. Each ``fit`` has its own monitor, whose steps are
    numbered as the Trainer's.

    Logs with ``pl_module.log``, for each optimizer step: "fastclip/total_norm" before clipping,
    "fastclip/clip_coef" and "fastclip/skipped_steps" (on a GPU as of the step before).

    Args:
        max_norm: as for :func:`fastclip.attach`, including policies. None: observe only.
        log_dir: directory of the log, one file for each rank; None for no log.
        sample_ids: called with each training batch; returns a list or tensor with an id for each sample.
        options: all others of :class:`fastclip.Monitor`.

    Raises:
        TypeError: an option that :class:`fastclip.Monitor` does not have.
        ValueError: before training: ``Trainer(gradient_clip_val=...)`` or a module that overrides
            ``configure_gradient_clipping``; FSDP1 or DeepSpeed; several optimizers; the Trainer of the other
            package; a checkpoint of a monitor with other detectors or actions.
        Exception: before the first step, as raised by :class:`fastclip.Monitor`.
    """

    _package: str
    _module_class: type

    def __init__(
        self,
        max_norm: MaxNorm | None = None,
        log_dir: str | None = None,
        *,
        sample_ids: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        require_monitor_options(options, ["sample_ids"])
        if sample_ids is not None and not callable(sample_ids):
            raise TypeError(
                f"expected sample_ids to be a function of a batch, but got {type(sample_ids).__name__}"
            )
        self._options = {"max_norm": max_norm, "log_dir": log_dir, **options}
        self._sample_ids = sample_ids
        self._monitor: Monitor | None = None
        self._steps: _Steps | None = None  # while training
        self._state: dict[str, Any] | None = None  # from the checkpoint that the fit resumes
        self._shows_batches = True

    @property
    def monitor(self) -> Monitor:
        """The monitor of the latest fit, which may be over.

        Raises:
            RuntimeError: no training has begun in this process.
        """
        if self._monitor is None:
            raise RuntimeError(
                "no training has begun in this process, so there is no monitor. Strategies that spawn "
                "processes train in those: read their log"
            )
        return self._monitor

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for spawned processes and for copies: the monitor stays with this callback."""
        return {**vars(self), "_monitor": None, "_steps": None, "_state": None}

    # Called by the Trainer.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._close()
            self._monitor = self._state = None
            checks.require_module(pl_module, self._module_class, self._package)
            checks.require_strategy(trainer.strategy)
            checks.require_sole_clipping(trainer, pl_module, self._module_class, self._options["max_norm"])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._close()  # a search for a batch size or learning rate within this fit
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        monitor = Monitor(
            pl_module,
            checks.only_optimizer(trainer),
            scheduler=schedulers[0] if schedulers else None,
            scaler=_scaler_of(trainer),
            **self._options,
        )
        self._monitor, self._steps = monitor, _Steps(monitor.handle)
        # If training_step takes an iterator, Lightning gives hooks a different batch.
        self._shows_batches = "dataloader_iter" not in inspect.signature(pl_module.training_step).parameters
        if self._state is not None:
            _load(monitor, self._state)
        elif trainer.global_step:
            monitor.load_state_dict({**monitor.state_dict(), "step": trainer.global_step})

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._steps is None:
            return
        clears = batch_idx % trainer.accumulate_grad_batches == 0 and pl_module.automatic_optimization
        if self._steps.begun and clears:
            # Lightning clears the gradients of the previous batches, which no step has used.
            self.monitor.recorder.discard()
        self._steps.begun = True
        if self._shows_batches:
            sample_ids = None if self._sample_ids is None else self._sample_ids(batch)
            self.monitor.batch(batch, sample_ids=sample_ids)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Record the loss, which Lightning has scaled, and divided by the number of accumulated batches."""
        if self._steps is None or loss.numel() != 1 or loss.is_complex():
            return
        loss = loss.detach()
        scaler = _scaler_of(trainer)
        if scaler is not None and scaler._scale is not None:
            loss = loss / scaler._scale
        if trainer.accumulate_grad_batches != 1:  # never with manual optimization
            loss = loss * trainer.accumulate_grad_batches
        self.monitor.loss(loss)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps is None:
            return
        if self._steps.made and not trainer.barebones:
            numbers = self._numbers(self._steps.plan)
            pl_module.log_dict(numbers, on_step=True, on_epoch=False, batch_size=1)  # no averaging
        self._steps.made = False
        if self.monitor.should_stop:
            trainer.should_stop = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._steps is None:
            return
        try:
            if trainer.training:  # an error in validation does not belong to the next step
                self.monitor.__exit__(type(exception), exception, exception.__traceback__)
        finally:
            self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self._monitor is None else self._monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for on_train_start; the strategy decides whether this comes before on_fit_start."""
        self._state = state_dict

    def _close(self) -> None:
        if self._steps is not None:
            self._steps.detach()
            self._steps = None
            self.monitor.close()

    def _numbers(self, plan: StepPlan | None) -> dict[str, Tensor | float]:
        """Return the numbers to log for the last step, as tensors, so that nothing waits for the device."""
        numbers: dict[str, Tensor | float] = {}
        if plan is not None:
            norms = plan.summary[:, 0]  # several with groups
            numbers["fastclip/total_norm"] = (
                norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms, plan.inputs.norm_type)
            )
            if plan.summary.shape[1] > 1:  # else nothing is clipped
                numbers["fastclip/clip_coef"] = plan.summary[:, 1].amin()
        if self.monitor.records:
            numbers["fastclip/skipped_steps"] = float(self.monitor.records[-1].skipped_steps)
        return numbers


class _Steps:
    """An observer of the optimizer's steps.

    Attributes:
        made: whether a step was made since this was last set to False.
        plan: the plan of the last step; None if there were no gradients.
        begun: whether a batch has started since the last step.
    """

    def __init__(self, handle: Handle) -> None:
        self.made = False
        self.plan: StepPlan | None = None
        self.begun = False
        self._handle = handle
        handle.observers.append(self)

    def before_update(self, plan: StepPlan | None) -> None:
        self.plan = plan

    def after_step(self) -> None:
        self.made = True
        self.begun = False

    def detach(self) -> None:
        self._handle.observers.remove(self)


def _scaler_of(trainer: Any) -> torch.amp.GradScaler | None:
    return getattr(trainer.precision_plugin, "scaler", None)


def _load(monitor: Monitor, state: dict[str, Any]) -> None:
    try:
        monitor.load_state_dict(state)
    except ValueError as error:
        raise ValueError(
            f"the checkpoint was saved by a FastclipCallback with other options: {error}. Use the same "
            "options, or delete its entry in checkpoint['callbacks'] to start with a new monitor"
        ) from error


def callback_class(package: str, module: str, requirement: str) -> Any:
    """Create the FastclipCallback for the Trainer of one of Lightning's two packages.

    Args:
        package: "lightning.pytorch" or "pytorch_lightning".
        module: the module of fastclip that the class belongs to, where pickle looks for it.
        requirement: what pip installs, for the error message.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        lightning = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package.partition(".")[0]:
            raise
        raise ImportError(f"{module} needs {package}: pip install {requirement}") from error
    attributes = {
        "__module__": module,
        "__doc__": TrainerHooks.__doc__,
        "_package": package,
        "_module_class": lightning.LightningModule,
    }
    return type("FastclipCallback", (TrainerHooks, lightning.Callback), attributes)
