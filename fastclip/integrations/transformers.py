# SPDX-License-Identifier: BSD-3-Clause
"""The callback for the Trainer of Transformers: it clips with fastclip and monitors the training."""

from __future__ import annotations

import math
import os
import sys
import warnings
from typing import Any

import torch

from ..collect import MaxNorm
from ..monitor import Monitor
from ..optim.wrapping import MethodWrapper
from .accelerate import inner_optimizer, require_supported
from .monitor_options import require_monitor_options
from .trainer_run import TrainerRun

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        'fastclip.integrations.transformers needs Transformers: pip install "torch-fastclip[hf]"'
    ) from error

__all__ = ["FastclipCallback"]


class FastclipCallback(TrainerCallback):
    """Clips inside the optimizer's step and monitors the training.

    ::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[FastclipCallback(log_dir="runs/1")])
        trainer.train()

    During ``train()`` fastclip clips the gradients in the optimizer's step and skips steps with NaN or Inf in
    a gradient; a :class:`fastclip.Monitor` records every batch, loss and step; the Trainer logs the norm
    before clipping as "grad_norm", and a few further numbers. NaN losses are no longer hidden from the
    Trainer's log. An event with the action "stop" stops the training. The monitor's state is part of each
    checkpoint.

    Args:
        max_norm: a number >= 0, or one of fastclip.policies. None: ``max_grad_norm`` of the
            TrainingArguments, where 0 means no limit.
        options: as for :class:`fastclip.Monitor`, except model, optimizer, scheduler and scaler.

    Attributes:
        monitor: the Monitor of the current training, or of the latest; None before the first.

    Raises:
        TypeError: an option that the Monitor does not have.
        RuntimeError: by ``train()``, before training: DeepSpeed, Megatron-LM, FSDP1, XLA devices, apex,
            SageMaker, DataParallel, parameters on several device meshes; a callback that was added to a
            Trainer by ``add_callback``: see :meth:`watch`.
    """

    def __init__(self, max_norm: MaxNorm | None = None, **options: Any) -> None:
        require_monitor_options(options)
        self.max_norm, self.options = max_norm, options
        self.monitor: Monitor | None = None
        self._trainer: Trainer | None = None  # while it trains
        self._checkpoint: str | None = None
        self._run: TrainerRun | None = None
        self._watched: list[Trainer] = []

    def watch(self, trainer: Trainer) -> FastclipCallback:
        """Monitor a Trainer that was created without this callback; call this before ``train()``.

        Returns:
            The callback.

        Raises:
            TypeError: `trainer` is not a Trainer.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"expected trainer to be a transformers.Trainer, but got {type(trainer).__name__}"
            )
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(self)
        if not any(known is trainer for known in self._watched):
            self._watched.append(trainer)

            def train(inner: Any, *args: Any, **kwargs: Any) -> Any:
                return self._train(trainer, inner, *args, **kwargs)

            MethodWrapper(trainer, "train", train)
        return self

    def _train(self, trainer: Trainer, inner: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(callback is self for callback in trainer.callback_handler.callbacks):
            return inner(*args, **kwargs)  # removed
        require_trainer_supported(trainer)
        names = ("resume_from_checkpoint", "model_path")
        given = args[0] if args else next((kwargs[name] for name in names if kwargs.get(name)), None)
        self._checkpoint = get_last_checkpoint(trainer.args.output_dir) if given is True else given or None
        self._trainer = trainer
        try:
            return inner(*args, **kwargs)
        except BaseException as error:
            if self._run is not None:
                self._run.failed(error)
            raise
        finally:
            self._end()
            self._trainer = None

    def _end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    # Called by the Trainer.

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch(_calling_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError(
                "FastclipCallback was added to an existing Trainer: pass it to Trainer(callbacks=[...]), or "
                "call callback.watch(trainer) before train()"
            )
        self._end()  # left open if the Trainer retries with smaller batches
        inner = inner_optimizer(trainer.optimizer)
        require_one_mesh(inner)
        limit = self.max_norm if self.max_norm is not None else args.max_grad_norm or math.inf
        self._run = TrainerRun(trainer, limit, self.options)
        self.monitor = self._run.monitor
        self._resume(args, state.global_step)

    def _resume(self, args: Any, step: int) -> None:
        assert self.monitor is not None
        if not step:
            return
        path = state_path(self._checkpoint, args.process_index) if self._checkpoint is not None else ""
        if os.path.exists(path):
            self.monitor.load_state_dict(torch.load(path, map_location=args.device, weights_only=True))
            return
        warnings.warn(
            f"fastclip: the checkpoint {self._checkpoint} holds no monitor state: the monitor continues at "
            f"step {step} without the history of earlier steps",
            stacklevel=2,
        )
        self.monitor.load_state_dict(self.monitor.state_dict() | {"step": step})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self._run is not None:
            self._run.end_step()
            if self._run.monitor.should_stop:
                control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._run is None or state.is_hyper_param_search:
            return
        directory = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        os.makedirs(directory, exist_ok=True)
        path = state_path(directory, args.process_index)
        torch.save(self._run.monitor.state_dict(), path + ".part")
        os.replace(path + ".part", path)


def state_path(checkpoint: str, rank: int) -> str:
    """Return the path of a process's monitor state in a checkpoint."""
    return os.path.join(checkpoint, f"fastclip_monitor_rank{rank:05}.pt")


def _calling_trainer(callback: TrainerCallback) -> Trainer:
    """Return the Trainer that called the callback: it passes everything to callbacks except itself."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(c is callback for c in owner.callback_handler.callbacks):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError(
        "FastclipCallback was not called by a transformers.Trainer; call callback.watch(trainer)"
    )


def require_trainer_supported(trainer: Trainer) -> None:
    """Raise RuntimeError if the optimizer's parameters would not have their gradients in its step."""
    require_supported(trainer.accelerator)
    advice = None
    if getattr(trainer, "use_apex", False):
        advice = "apex: use torch's mixed precision (fp16=True or bf16=True)"
    elif "SAGEMAKER" in str(trainer.args.parallel_mode):
        advice = "SageMaker's model parallelism"
    elif trainer.args.n_gpu > 1:
        advice = "DataParallel: launch one process for each GPU with torchrun, or make only one GPU visible"
    if advice is not None:
        raise RuntimeError(f"fastclip does not work with {advice}")


def require_one_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError for parameters on several device meshes, which the Trainer clips itself."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {str(getattr(p, "device_mesh", None)) for p in parameters}
    if len(meshes) > 1:
        raise RuntimeError(
            "fastclip does not work with parameters on several device meshes, which the Trainer clips "
            f"itself: found {sorted(meshes)}"
        )
