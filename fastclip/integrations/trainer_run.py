# SPDX-License-Identifier: BSD-3-Clause
"""One training of a Trainer of Transformers: what is put in place for its time, and taken back."""

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
    """Watches from ``on_train_begin`` on, until :meth:`close`.

    The Trainer tells its callbacks neither batches nor losses. Its methods do, and those of its accelerator:
    ``training_step`` gets a batch, ``backward`` the loss that is trained on, whatever has computed it.

    Args:
        trainer: a transformers.Trainer that has prepared model and optimizer.
        max_norm: the limit.
        options: of the monitor.

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
        # Then a replay can give the model what it got, see below.
        self._keeps_items = options.get("incidents") is not None and getattr(
            trainer, "model_accepts_loss_kwargs", False
        )
        self._micro_batches: int = args.gradient_accumulation_steps
        self._loss: Tensor | None = None  # of the step, as far as it has come
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
        """The training ends with an exception."""
        if self._in_step:
            self.monitor.__exit__(type(error), error, error.__traceback__)

    def end_step(self) -> None:
        """The Trainer is done with a step."""
        self._in_step = False

    def close(self) -> None:
        for wrapper in reversed(self._wrappers):
            wrapper.undo()
        self._trainer.args.logging_nan_inf_filter = self._nan_filter
        self.monitor.close()

    # Batches and losses.

    def _get_batch_samples(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The batches of a step: the last ones of an epoch may be fewer."""
        batches, items = inner(*args, **kwargs)
        self._micro_batches = len(batches)
        return batches, items

    def _training_step(self, inner: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch, sample_ids = inputs, None
        if isinstance(inputs, Mapping):
            if "sample_ids" in inputs:
                sample_ids = inputs.pop("sample_ids")  # type: ignore[attr-defined]
            batch = dict(inputs)  # the Trainer takes the labels out
            items = args[0] if args else kwargs.get("num_items_in_batch")
            if items is not None and self._keeps_items:
                # Of the whole step: divided, since the loss of a batch is to be multiplied, see below.
                batch["num_items_in_batch"] = (
                    items if self._micro_batches == 1 else items / self._micro_batches
                )
        self._in_step = False  # the context tells what happens in it
        with self.monitor.batch(batch, sample_ids=sample_ids):
            loss = inner(model, inputs, *args, **kwargs)
        self._in_step = True
        return loss

    def _backward(self, inner: Any, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The gradients of a step are those of the sum of what is seen here, divided as Accelerate does.

        The monitor takes the mean over the batches of a step.
        """
        divisor = self._trainer.accelerator.gradient_accumulation_steps
        told = loss.detach()
        if self._micro_batches != divisor:
            told = told * (self._micro_batches / divisor)
        self.monitor.loss(told)
        part = loss.detach() / divisor
        self._loss = part if self._loss is None else self._loss + part
        return inner(loss, *args, **kwargs)

    def _clip_grad_norm(self, inner: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """The limit is the callback's; what the Trainer gets is the norm."""
        if isinstance(self._limit, SpikeSkip) and self._loss is not None:
            accelerator = self._trainer.accelerator
            many = accelerator.num_processes > 1
            self._limit.observe_loss(accelerator.reduce(self._loss, "mean") if many else self._loss)
        self._loss = None
        return inner(parameters, math.inf)

    # What the Trainer logs.

    def _log(self, inner: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:
            logs.update(self._numbers(logs))
            self._logged += 1
        return inner(logs, *args, **kwargs)

    def _log_save_evaluate(self, inner: Any, tr_loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Where it logs, the Trainer subtracts the sum of the losses from itself, which leaves NaN as NaN."""
        logged = self._logged
        result = inner(tr_loss, *args, **kwargs)
        if self._logged > logged:
            tr_loss.nan_to_num_(nan=0.0)
        return result

    def _numbers(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """What is told of the steps since the last time."""
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
    """Of several steps, as Python numbers under the names of a log."""
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
