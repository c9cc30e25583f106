# SPDX-License-Identifier: BSD-3-Clause
"""The search for the first module that produces NaN or Inf, in the forward and in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..monitor.measure.batches import tensors_in


@dataclass
class BadModule:
    """The first module with NaN or Inf in its output, or in the gradient that it passes on.

    Attributes:
        name: the name of the module; empty for the model itself and for code outside of all modules.
        kind: its class; "loss_function" for code outside of all modules.
        nan_count, inf_count: counts in its output, or in the gradient that it passes on.
        given: whether its inputs were already non-finite; False in the backward pass.
        weights: whether its own parameters or buffers are non-finite; False in the backward pass.
    """

    name: str
    kind: str
    nan_count: int
    inf_count: int
    given: bool = False
    weights: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        where = f"{self.name} ({self.kind})" if self.name else self.kind
        why = (
            "; its inputs were already non-finite"
            if self.given
            else "; its own parameters or buffers are non-finite"
            if self.weights
            else ""
        )
        return f"{where}: {self.nan_count} NaN, {self.inf_count} Inf{why}"


class NonfiniteTrace:
    """The first bad modules of a run, forward and backward, as seen by its hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: BadModule | None = None
        self.backward: BadModule | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._consumers: dict[int, list[nn.Module]] = {}  # by id of an input, in the order of their calls
        self._sources: list[Tensor] = []  # held so that no id is reused
        self._active: list[nn.Module] = []  # those whose forward is running, the innermost last
        self._finite_outputs: set[nn.Module] = set()  # those that received a finite gradient of an output

    def before(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Run as a forward pre-hook of each module."""
        self._active.append(module)
        for _, tensor in tensors_in((inputs, named)):
            if tensor.requires_grad:
                self._consumers.setdefault(id(tensor), []).append(module)
                self._listen(tensor, None, [])

    def after(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Run as a forward hook of each module."""
        self._active.pop()
        outputs = [tensor for _, tensor in tensors_in(output)]
        if self.forward is None:
            nan, inf = _count(outputs)
            if nan + inf:
                given = sum(_count([tensor for _, tensor in tensors_in((inputs, named))])) > 0
                own = [*module.parameters(), *module.buffers()]
                self.forward = self._bad(module, nan, inf, given, sum(_count(own)) > 0)
        for tensor in outputs:
            if tensor.requires_grad:
                self._listen(tensor, module, list(self._active))

    def parameter(self, module: nn.Module, grad: Tensor) -> None:
        """Run as a gradient hook of each parameter."""
        if self.backward is None:
            nan, inf = _count([grad])
            if nan + inf:
                self.backward = self._bad(module, nan, inf)

    def _listen(self, tensor: Tensor, producer: nn.Module | None, around: list[nn.Module]) -> None:
        self._sources.append(tensor)
        key = id(tensor)
        tensor.register_hook(lambda grad: self._gradient(key, producer, around, grad))

    def _gradient(self, key: int, producer: nn.Module | None, around: list[nn.Module], grad: Tensor) -> None:
        if self.backward is not None:
            return
        nan, inf = _count([grad])
        if nan + inf:
            # The innermost module that used the tensor and that received a finite gradient.
            makers = [m for m in around + self._consumers.get(key, []) if m in self._finite_outputs]
            self.backward = (
                self._bad(makers[-1], nan, inf) if makers else BadModule("", "loss_function", nan, inf)
            )
        elif producer is not None:
            self._finite_outputs.add(producer)

    def _bad(
        self, module: nn.Module, nan: int, inf: int, given: bool = False, weights: bool = False
    ) -> BadModule:
        return BadModule(self._names[module], type(module).__name__, nan, inf, given, weights and not given)


@contextmanager
def trace_nonfinite(model: nn.Module) -> Iterator[NonfiniteTrace]:
    """Trace a run with hooks on all modules, which change no tensor.

    Gradients are traced by tensor hooks: module hooks would forbid in-place operations on the outputs.
    """
    trace = NonfiniteTrace(model)
    hooks: list[Any] = []
    owners: dict[Tensor, nn.Module] = {}
    for module in model.modules():
        owners |= dict.fromkeys(module.parameters(recurse=False), module)
        if not isinstance(module, torch.jit.ScriptModule):
            hooks.append(module.register_forward_pre_hook(trace.before, with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(trace.after, with_kwargs=True))
    hooks += [p.register_hook(_for(trace, module)) for p, module in owners.items() if p.requires_grad]
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def _for(trace: NonfiniteTrace, module: nn.Module) -> Any:
    return lambda grad: trace.parameter(module, grad)


@torch.no_grad()
def _count(tensors: list[Tensor]) -> tuple[int, int]:
    """Return the numbers of NaN and Inf elements."""
    nan = inf = 0
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            nan, inf = nan + int(tensor.isnan().sum()), inf + int(tensor.isinf().sum())
    return nan, inf


def nonfinite_names(tensors: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that hold NaN or Inf."""
    return [name for name, t in tensors.items() if isinstance(t, Tensor) and sum(_count([t])) > 0]
