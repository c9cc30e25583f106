# SPDX-License-Identifier: BSD-3-Clause
"""What a forward depends on beside the parameters and the batch, as it was at its start."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..suppress import guarded
from .rng import rng_state

_LOOK_AGAIN = 100  # steps
_LEARNING = 3  # steps until it is known which buffers a forward changes


class Start:
    """What is kept of one forward.

    Attributes:
        rng: of torch; what draws from the others draws before the forward.
        autocast: by device type, whether it is on and for which dtype.
        buffers: by name, copies of those that a forward changes.
        training: the mode of the model.
    """

    def __init__(self, model: nn.Module, buffers: dict[str, Tensor]) -> None:
        self.rng = rng_state(torch_only=True)
        self.autocast = {
            kind: {
                "enabled": torch.is_autocast_enabled(kind),
                "dtype": str(torch.get_autocast_dtype(kind)),
            }
            for kind in ("cpu", "cuda")
        }
        self.buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        self.training = model.training


class Forwards:
    """Tells the start of each forward of a model that is a part of the training.

    Buffers that a forward changes, such as those of batch and spectral normalization, are found in the first
    steps, in which all are copied and compared, since batch normalization leaves version counters alone;
    later by these.

    Args:
        model: the module whose calls are forwards.
        began: called with the Start of each.
    """

    def __init__(self, model: nn.Module, began: Callable[[Start], None]) -> None:
        self._model = weakref.ref(model)
        self._began = began
        self._changing: set[str] = set()
        self._steps = 0
        self._versions: dict[str, int] = {}
        self._buffers: dict[str, Tensor] = {}
        self._first: Start | None = None  # of the step, while it is found out what changes
        # DistributedDataParallel first gives all ranks the buffers of rank 0, and then calls what it wraps.
        called = model.module if isinstance(model, DistributedDataParallel) else model
        self._called = weakref.ref(called)
        # Before FSDP gathers the parameters: a state_dict in between takes them away from the forward.
        self._hook = called.register_forward_pre_hook(_Hook(self), prepend=True)

    def before(self, called: nn.Module) -> None:
        model = self._model()
        if model is None or called is not self._called():
            return
        if not (called.training or torch.is_grad_enabled()):
            return
        buffers = self._buffers = self._all_buffers(model)
        if not self._versions:
            self._versions = {name: buffer._version for name, buffer in buffers.items()}
        if self._steps >= _LEARNING:
            buffers = {name: b for name, b in buffers.items() if name in self._changing}
        with torch.no_grad():
            start = Start(model, buffers)
        if self._first is None and self._steps < _LEARNING:
            self._first = start
        self._began(start)

    def _all_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Looked for in each of the first steps, and now and then: moving a model may replace them."""
        known = self._steps > _LEARNING and self._steps % _LOOK_AGAIN != 0
        return self._buffers if known else dict(model.named_buffers())

    def end_step(self) -> list[str]:
        """The step is over. Returns the buffers that it changed and of which no copy was made."""
        model, versions = self._model(), self._versions
        if model is None:
            return []
        buffers = self._buffers
        now = {name: buffer._version for name, buffer in buffers.items()}
        changed = {name for name, version in versions.items() if now.get(name, version) != version}
        if self._first is not None:
            copies = self._first.buffers
            changed |= {n for n, copy in copies.items() if n in buffers and not torch.equal(copy, buffers[n])}
            self._first = None
        unseen = sorted(changed - self._changing) if self._steps >= _LEARNING else []
        self._changing |= changed
        self._versions = {}
        self._steps += 1
        return unseen

    @torch.no_grad()
    def put_back(self, start: Start) -> None:
        """Bring the buffers that forwards change to what they were at the start of one."""
        model = self._model()
        for name, buffer in model.named_buffers() if model is not None else ():
            if name in self._changing and name in start.buffers:
                buffer.copy_(start.buffers[name])

    def remove(self) -> None:
        self._hook.remove()


class _Hook:
    """A forward pre-hook that a copy of the model can carry, where it does nothing."""

    def __init__(self, forwards: Forwards | None = None) -> None:
        self._forwards = forwards

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._forwards is not None and not torch.compiler.is_compiling():
            guarded(self._forwards.before, module)

    def __reduce__(self) -> Any:
        return _Hook, ()
