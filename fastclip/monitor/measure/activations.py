# SPDX-License-Identifier: BSD-3-Clause
"""The inputs and outputs of modules: sampled activations, and the token ids given to embeddings."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...dispatch import run_stats
from ..async_copy import Value
from ..suppress_errors import suppress_errors
from .batches import is_plain, tensors_in
from .sampling import is_due


def leaf_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without children by name; "model" if the model itself is one."""
    return {name or "model": m for name, m in model.named_modules() if next(m.children(), None) is None}


def chosen_modules(model: nn.Module, activations: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the modules that the argument `activations` names, by name.

    Raises:
        ValueError: the model has no such name, is compiled, or the word is not "leaf".
        TypeError: it is not a collection of names.
    """
    if activations is None:
        return {}
    if is_compiled(model):
        raise ValueError(
            "expected activations=None with a compiled model, whose graph does not call later hooks, "
            f"but got activations={activations!r}"
        )
    if activations == "leaf":
        return leaf_modules(model)
    if isinstance(activations, str):
        raise ValueError(
            f"expected activations to be 'leaf', a list of names or None, but got {activations!r}"
        )
    known = {name or "model": module for name, module in model.named_modules()}
    if missing := [name for name in activations if name not in known]:
        raise ValueError(f"expected activations to name modules of the model, but it has no {missing}")
    return {name: known[name] for name in activations}


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile was applied to the model or a part of it."""
    return any(
        hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


class ModuleHook:
    """A forward hook that measures one module in training, but not its copies, nor its evaluation.

    It can be copied and pickled with the module; the copy does nothing.

    Args:
        measure: called with the module's inputs, or with its output.
    """

    def __init__(self, module: nn.Module, measure: Callable[[Any], None]) -> None:
        self._module = weakref.ref(module)
        self._measure = measure

    def __call__(self, module: nn.Module, inputs: Any, output: Any = None) -> None:
        if torch.compiler.is_compiling() or self._module() is not module:
            return
        if module.training or torch.is_grad_enabled():
            with suppress_errors("measure a module"), torch.no_grad():
                self._measure(inputs if output is None else output)

    def __reduce__(self) -> Any:
        return _CopiedHook, ()


class _CopiedHook:
    """The hook of a copied module, which measures nothing."""

    def __call__(self, *arguments: Any) -> None:
        pass


class ActivationStatistics:
    """Mean, rms, largest absolute value and non-finite count of the outputs of modules.

    The hooks exist only in the steps that are sampled, so that other forward passes cost nothing more.
    Of several calls of a module in one step, as in gradient accumulation, the last one counts.

    Args:
        modules: the modules by name.
        every: steps between two samples, see :func:`is_due`; 0 for none.
    """

    def __init__(self, modules: dict[str, nn.Module], every: int) -> None:
        self._modules, self._every = modules, every
        self._hooks: list[RemovableHandle] = []
        self._values: dict[str, Value] = {}

    def begin(self, step: int) -> None:
        """Measure from now on, if the step is sampled."""
        if self._hooks or not is_due(step, self._every):
            return
        for name, module in self._modules.items():
            hook = ModuleHook(module, partial(self._measure, name))
            self._hooks.append(module.register_forward_hook(hook))

    def end(self) -> dict[str, Value]:
        """Stop measuring and return what was measured: [4] by name, see :func:`_moments`."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        values, self._values = self._values, {}
        return values

    def _measure(self, name: str, output: Any) -> None:
        tensor = next((t for _, t in tensors_in(output) if t.dtype.is_floating_point), None)
        if tensor is not None and is_plain(local_tensor(tensor)):
            self._values[f"activations/{name}"] = _moments(local_tensor(tensor.detach()))


def _moments(tensor: Tensor) -> Tensor:
    """Return mean, rms and largest absolute value of the finite elements, and the number of others, [4]."""
    _, stats = run_stats([tensor.contiguous()], 2.0)
    if tensor.device.type == "cpu" and stats[0, 1:].sum() == 0:  # as nearly always: three passes do
        low, high = tensor.aminmax()
        mean, rms = tensor.mean(dtype=torch.float32), (stats[0, 0] / tensor.numel()).sqrt()
        return torch.stack([mean, rms.float(), torch.maximum(high, -low).float(), mean.new_zeros(())])
    finite = tensor.isfinite()
    values = torch.where(finite, tensor, 0).float()
    count = finite.sum().clamp(min=1)
    low, high = values.aminmax()
    mean, square = values.sum() / count, values.square().sum() / count
    return torch.stack([mean, square.sqrt(), torch.maximum(high, -low), (~finite).sum().float()])


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor on this process; other tensors as they are."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


class TokenIds:
    """The smallest and the largest index given to each embedding, measured before it looks them up."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: dict[str, int] = {}
        self._values: dict[str, Value] = {}
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                self.sizes[name or "model"] = module.num_embeddings
                hook = ModuleHook(module, partial(self._measure, name or "model"))
                self._hooks.append(module.register_forward_pre_hook(hook))

    def take(self) -> dict[str, Value]:
        """Return what was measured since the last call."""
        values, self._values = self._values, {}
        return values

    def remove(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _measure(self, name: str, inputs: tuple[Any, ...]) -> None:
        if not inputs or not isinstance(inputs[0], Tensor):
            return
        ids = local_tensor(inputs[0].detach())
        if not is_plain(ids):
            return
        key, size = f"token_ids/{name}/", self.sizes[name]
        low, high = ids.aminmax()
        if ids.device.type != "cpu":
            self._note(key + "min", low, torch.minimum)
            self._note(key + "max", high, torch.maximum)
            self._note(key + "outside", ((ids < 0) | (ids >= size)).sum(), torch.add)
            return
        smallest, largest = int(low), int(high)
        self._note(key + "min", smallest, min)
        self._note(key + "max", largest, max)
        if smallest < 0 or largest >= size:
            self._note(key + "outside", int(((ids < 0) | (ids >= size)).sum()), operator.add)

    def _note(self, key: str, value: Value, combine: Callable[[Any, Any], Value]) -> None:
        known = self._values.get(key)
        self._values[key] = value if known is None else combine(known, value)


def activations_of(values: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the record's activation statistics by module, from numbers on the host."""
    names = ("mean", "rms", "max", "nonfinite")
    return {
        key.removeprefix("activations/"): dict(zip(names, value, strict=True))
        for key, value in values.items()
        if key.startswith("activations/")
    }


def token_ids_of(values: dict[str, Any], sizes: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the record's token ids by embedding: smallest, largest, how many out of range, and its size."""
    found: dict[str, dict[str, int]] = {}
    for key, value in values.items():
        if key.startswith("token_ids/"):
            name, _, what = key.removeprefix("token_ids/").rpartition("/")
            found.setdefault(name, {"outside": 0, "size": sizes[name]})[what] = value
    return found
