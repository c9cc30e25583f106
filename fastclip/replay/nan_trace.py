# SPDX-License-Identifier: BSD-3-Clause
"""Where NaN or Inf comes from: the first module whose output has it, forward and backward."""

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
    """The first module that makes NaN or Inf of what has none, or is given it.

    Attributes:
        name: of the module; empty for the model itself, or for what no module does.
        kind: its class; "loss_function" for what comes before or behind all modules.
        nan_count, inf_count: of its output, or of the gradient that it gives.
        given: whether its inputs held NaN or Inf already, forward.
        weights: whether its own parameters or buffers do.
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
            " of inputs that have it already"
            if self.given
            else " of its own parameters"
            if self.weights
            else ""
        )
        return f"{where}: {self.nan_count} NaN, {self.inf_count} Inf{why}"


class NonfiniteTrace:
    """What the hooks of a run have seen: of both directions the first."""

    def __init__(self, model: nn.Module) -> None:
        self.forward: BadModule | None = None
        self.backward: BadModule | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._consumers: dict[int, list[nn.Module]] = {}  # by the tensor that they are given, as called
        self._sources: list[Tensor] = []  # kept, so that no other tensor gets the same number
        self._active: list[nn.Module] = []  # whose forward is running, the innermost last
        self._finite_outputs: set[nn.Module] = set()  # whose output's gradient has come, and is finite

    def before(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._active.append(module)
        for _, tensor in tensors_in((inputs, named)):
            if tensor.requires_grad:
                self._consumers.setdefault(id(tensor), []).append(module)
                self._listen(tensor, None, [])

    def after(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
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
            # The innermost module that was given the tensor, or whose own code used it, and that had a finite
            # gradient to pass on.
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
    """Hooks on all modules, for a while. They look at the tensors, and change none.

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
    """NaN and Inf elements."""
    nan = inf = 0
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            nan, inf = nan + int(tensor.isnan().sum()), inf + int(tensor.isinf().sum())
    return nan, inf


def nonfinite_names(tensors: dict[str, Any]) -> list[str]:
    """Of a recorded state: the tensors that hold NaN or Inf."""
    return [name for name, t in tensors.items() if isinstance(t, Tensor) and sum(_count([t])) > 0]
