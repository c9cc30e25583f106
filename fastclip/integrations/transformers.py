# SPDX-License-Identifier: BSD-3-Clause
"""Transformers: a callback that lets the Trainer clip with fastclip and watches what it trains."""

from __future__ import annotations

import inspect
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
from .trainer_run import TrainerRun

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        'fastclip.integrations.transformers needs Transformers: pip install "torch-fastclip[hf]"'
    ) from error

__all__ = ["FastclipCallback"]

_OF_THE_TRAINER = ("self", "model", "optimizer", "max_norm", "scheduler", "scaler")


class FastclipCallback(TrainerCallback):
    """Clips and watches what a Trainer trains::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[FastclipCallback(log_dir="runs/1")])
        trainer.train()

    From the begin of ``train()`` to its end the gradients are clipped by fastclip in the optimizer's step,
    and a step with NaN or Inf in a gradient is left out; every batch, loss and step is recorded by a
    :class:`fastclip.Monitor`; the Trainer logs the norm before clipping as "grad_norm", and a few numbers
    more. NaN losses are no longer hidden from the Trainer's log. An event with the action "stop" stops the
    training. The monitor's state is part of each checkpoint.

    Args:
        max_norm: a number >= 0, or one of fastclip.policies. None: ``max_grad_norm`` of the arguments of the
            training, where 0 means no limit.
        options: as for :class:`fastclip.Monitor`, all but model, optimizer, scheduler and scaler.

    Attributes:
        monitor: the Monitor of the training that runs, or of the last one; None before the first.

    Raises:
        TypeError: an option that the Monitor does not have.
        RuntimeError: by ``train()``, before it begins: DeepSpeed, Megatron-LM, FSDP1, XLA devices, apex,
            SageMaker, DataParallel, parameters on several device meshes; a callback that was added to a
            Trainer by ``add_callback``: see :meth:`watch`.
    """

    def __init__(self, max_norm: MaxNorm | None = None, **options: Any) -> None:
        known = [
            name for name in inspect.signature(Monitor.__init__).parameters if name not in _OF_THE_TRAINER
        ]
        if unknown := sorted(set(options) - set(known)):
            raise TypeError(f"expected options of fastclip.Monitor ({', '.join(known)}), but got {unknown}")
        self.max_norm, self.options = max_norm, options
        self.monitor: Monitor | None = None
        self._trainer: Trainer | None = None  # that is training
        self._checkpoint: str | None = None
        self._run: TrainerRun | None = None
        self._watched: list[Trainer] = []

    def watch(self, trainer: Trainer) -> FastclipCallback:
        """Watch a Trainer that was made without this callback; call it before ``train()``.

        Returns:
            The callback.

        Raises:
            TypeError: not a Trainer.
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

    # What the Trainer calls.

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch(_calling_trainer(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError(
                "FastclipCallback was added to a Trainer that was already there: pass it to "
                "Trainer(callbacks=[...]), or call callback.watch(trainer) before train()"
            )
        self._end()  # begun before, where the Trainer has tried again with smaller batches
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
            f"fastclip: there is no state of a monitor in the checkpoint {self._checkpoint}: the monitor "
            f"counts on from step {step} and remembers nothing of the steps before",
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
    """Where in a checkpoint the state of a process's monitor is."""
    return os.path.join(checkpoint, f"fastclip_monitor_rank{rank:05}.pt")


def _calling_trainer(callback: TrainerCallback) -> Trainer:
    """The Trainer that has called the callback: it tells callbacks all but itself."""
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
    """Raise RuntimeError for a way of training in which the gradients are not the optimizer's own."""
    require_supported(trainer.accelerator)
    advice = None
    if getattr(trainer, "use_apex", False):
        advice = "apex: use the mixed precision of torch (fp16=True or bf16=True)"
    elif "SAGEMAKER" in str(trainer.args.parallel_mode):
        advice = "the model parallelism of SageMaker"
    elif trainer.args.n_gpu > 1:
        advice = "DataParallel: launch one process for each GPU with torchrun, or show one GPU alone"
    if advice is not None:
        raise RuntimeError(f"fastclip does not work with {advice}")


def require_one_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError for parameters on several device meshes: the Trainer clips them by itself."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    meshes = {str(getattr(p, "device_mesh", None)) for p in parameters}
    if len(meshes) > 1:
        raise RuntimeError(
            "fastclip.integrations does not work with parameters on several device meshes: the Trainer clips "
            f"them by itself. Found {sorted(meshes)}"
        )
