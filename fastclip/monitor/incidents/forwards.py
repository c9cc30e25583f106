# SPDX-License-Identifier: BSD-3-Clause
"""The state that a forward depends on besides the parameters and the batch, copied when it starts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..suppress_errors import suppress_errors
from .rng import rng_state

_LOOK_AGAIN = 100  # steps between searches for replaced buffers
_LEARNING = 3  # steps after which it is known which buffers a forward changes


class ForwardStart:
    """The state at the start of one forward.

    Attributes:
        rng: the states of torch's generators; Python's and NumPy's are captured with the batch.
        autocast: by device type, whether autocast is enabled, and its dtype.
        buffers: by name, copies of the buffers that forwards change.
        training: whether the model is in training mode.
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


class ForwardWatcher:
    """A hook on a model that copies the state at the start of each training forward.

    Which buffers a forward changes, such as those of batch and spectral normalization, is learnt in the first
    steps: all are copied and compared, because batch normalization does not count up version counters. Later
    changes of other buffers are noticed by their version counters.

    Args:
        model: the module whose calls are forwards.
        on_start: called with the state at the start of each forward.
    """

    def __init__(self, model: nn.Module, on_start: Callable[[ForwardStart], None]) -> None:
        self._model = weakref.ref(model)
        self._on_start = on_start
        self._changing: set[str] = set()
        self._steps = 0
        self._versions: dict[str, int] = {}
        self._buffers: dict[str, Tensor] = {}
        self._first: ForwardStart | None = None  # in this step, while the changing buffers are learnt
        # DistributedDataParallel broadcasts the buffers of rank 0 before it calls the module that it wraps.
        called = model.module if isinstance(model, DistributedDataParallel) else model
        self._called = weakref.ref(called)
        # Before FSDP gathers the parameters: a state_dict taken after that would reshard them.
        self._hook = called.register_forward_pre_hook(_Hook(self), prepend=True)

    def before(self, called: nn.Module) -> None:
        """Copy the state, unless the forward is an evaluation."""
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
            start = ForwardStart(model, buffers)
        if self._first is None and self._steps < _LEARNING:
            self._first = start
        self._on_start(start)

    def _all_buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the buffers, searched again now and then because moving a model may replace them."""
        known = self._steps > _LEARNING and self._steps % _LOOK_AGAIN != 0
        return self._buffers if known else dict(model.named_buffers())

    def end_step(self) -> list[str]:
        """Finish the step and return the names of buffers that it changed without a copy."""
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
    def restore_buffers(self, start: ForwardStart) -> None:
        """Set the buffers that forwards change to their values at the start of a forward."""
        model = self._model()
        for name, buffer in model.named_buffers() if model is not None else ():
            if name in self._changing and name in start.buffers:
                buffer.copy_(start.buffers[name])

    def remove(self) -> None:
        """Remove the hook from the model."""
        self._hook.remove()


class _Hook:
    """A forward pre-hook that does nothing on a copy of the model."""

    def __init__(self, forwards: ForwardWatcher | None = None) -> None:
        self._forwards = forwards

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._forwards is not None and not torch.compiler.is_compiling():
            with suppress_errors("keep the state before a forward"):
                self._forwards.before(module)

    def __reduce__(self) -> Any:
        return _Hook, ()
