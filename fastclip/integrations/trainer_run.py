# SPDX-License-Identifier: BSD-3-Clause
"""One training run of a Transformers Trainer: the changes that last from its beginning to its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..collect import MaxNorm
from ..monitor import Record
from ..optim.wrapping import MethodWrapper
from ..policies import Policy, SpikeSkip
from .accelerate import AcceleratorMonitor


class TrainerRun:
    """Monitors a training from ``on_train_begin`` until :meth:`close`.

    The Trainer passes neither batches nor losses to its callbacks. They are taken from its methods and its
    accelerator's: ``training_step`` receives a batch, ``backward`` the loss that is trained on, whatever has
    computed it.

    Args:
        trainer: a transformers.Trainer that has prepared model and optimizer.
        max_norm: the limit.
        options: those of the monitor.

    Attributes:
        monitor: the monitor of this training.
    """

    def __init__(self, trainer: Any, max_norm: MaxNorm, options: Mapping[str, Any]) -> None:
        self._trainer, self._limit = trainer, max_norm
        accelerator, args = trainer.accelerator, trainer.args
        self.monitor = AcceleratorMonitor(
            accelerator,
            trainer.model,
            trainer.optimizer,
            max_norm=max_norm,
            scheduler=trainer.lr_scheduler,
            **options,
        )
        # So that a replay can call the model with the same arguments, see _training_step.
        self._keeps_items = options.get("incidents") is not None and getattr(
            trainer, "model_accepts_loss_kwargs", False
        )
        self._micro_batches: int = args.gradient_accumulation_steps
        self._loss: Tensor | None = None  # of the batches of this step so far
        self._logged = self._first_unlogged = 0
        self._in_step = False
        self._nan_filter = args.logging_nan_inf_filter
        args.logging_nan_inf_filter = False
        self._wrappers = [
            MethodWrapper(trainer, "training_step", self._training_step),
            MethodWrapper(trainer, "log", self._log),
            MethodWrapper(trainer, "_maybe_log_save_evaluate", self._log_save_evaluate),
            MethodWrapper(accelerator, "backward", self._backward),
            MethodWrapper(accelerator, "clip_grad_norm_", self._clip_grad_norm),
        ]
        if hasattr(trainer, "get_batch_samples"):
            self._wrappers.append(MethodWrapper(trainer, "get_batch_samples", self._get_batch_samples))

    def failed(self, error: BaseException) -> None:
        """Record the exception that ends the training."""
        if self._in_step:
            self.monitor.__exit__(type(error), error, error.__traceback__)

    def end_step(self) -> None:
        """Receive the end of a step from the Trainer."""
        self._in_step = False

    def close(self) -> None:
        """Undo all changes and close the monitor."""
        for wrapper in reversed(self._wrappers):
            wrapper.undo()
        self._trainer.args.logging_nan_inf_filter = self._nan_filter
        self.monitor.close()

    # Batches and losses.

    def _get_batch_samples(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the batches of a step: the last step of an epoch may have fewer."""
        batches, items = inner(*args, **kwargs)
        self._micro_batches = len(batches)
        return batches, items

    def _training_step(self, inner: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch, sample_ids = inputs, None
        if isinstance(inputs, Mapping):
            if "sample_ids" in inputs:
                sample_ids = inputs.pop("sample_ids")  # type: ignore[attr-defined]
            batch = dict(inputs)  # the Trainer removes the labels from its own
            items = args[0] if args else kwargs.get("num_items_in_batch")
            if items is not None and self._keeps_items:
                # The number is that of the whole step, and _backward multiplies the loss of a batch.
                batch["num_items_in_batch"] = (
                    items if self._micro_batches == 1 else items / self._micro_batches
                )
        self._in_step = False  # the context records errors inside it
        with self.monitor.batch(batch, sample_ids=sample_ids):
            loss = inner(model, inputs, *args, **kwargs)
        self._in_step = True
        return loss

    def _backward(self, inner: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the loss of a batch.

        The gradients of a step are those of the sum of these losses, divided as Accelerate does. The monitor
        takes the mean over the batches of a step.
        """
        divisor = self._trainer.accelerator.gradient_accumulation_steps
        recorded = loss.detach()
        if self._micro_batches != divisor:
            recorded = recorded * (self._micro_batches / divisor)
        self.monitor.loss(recorded)
        part = loss.detach() / divisor
        self._loss = part if self._loss is None else self._loss + part
        return inner(loss, *args, **kwargs)

    def _clip_grad_norm(self, inner: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the norm to the Trainer; the step clips, to the callback's limit."""
        if isinstance(self._limit, SpikeSkip) and self._loss is not None:
            accelerator = self._trainer.accelerator
            many = accelerator.num_processes > 1
            self._limit.observe_loss(accelerator.reduce(self._loss, "mean") if many else self._loss)
        self._loss = None
        return inner(parameters, math.inf)

    # The Trainer's log.

    def _log(self, inner: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            logs.update(self._numbers(logs))
            self._logged += 1
        return inner(logs, *args, **kwargs)

    def _log_save_evaluate(self, inner: Any, tr_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Reset a NaN sum of losses once it is logged: the Trainer subtracts it from itself, leaving NaN."""
        logged = self._logged
        result = inner(tr_loss, *args, **kwargs)
        if self._logged > logged:
            tr_loss.nan_to_num_(nan=0.0)
        return result

    def _numbers(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers to log for the steps since the last log entry."""
        self.monitor.pipeline.advance(wait=True)  # the Trainer has just waited for the device, too
        newest = itertools.takewhile(lambda r: r.step >= self._first_unlogged, reversed(self.monitor.records))
        records = list(newest)[::-1]
        if not records:
            return {}
        self._first_unlogged = records[-1].step + 1
        numbers = numbers_of(records)
        if isinstance(self._limit, Policy) and records[-1].max_norm is not None:
            numbers["fastclip/max_norm"] = records[-1].max_norm
        if "grad_norm" not in logs and records[-1].total_norm is not None:
            numbers["grad_norm"] = records[-1].total_norm
        return numbers


def numbers_of(records: list[Record]) -> dict[str, float]:
    """Return the numbers to log for several steps."""
    clipped = [record.clipped for record in records if record.clipped is not None]
    norms = [r.total_norm for r in records if r.total_norm is not None and math.isfinite(r.total_norm)]
    numbers: dict[str, float] = {}
    if clipped:
        numbers["fastclip/clipped_share"] = sum(clipped) / len(clipped)
    if norms:
        numbers["fastclip/largest_norm"] = max(norms)
    numbers["fastclip/nonfinite_steps"] = sum(not record.is_finite for record in records)
    numbers["fastclip/left_out_steps"] = sum(record.applied is False for record in records)
    return numbers
