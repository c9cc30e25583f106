# SPDX-License-Identifier: BSD-3-Clause
"""The model, optimizer and loss function that a replay runs, and how saved states are loaded into them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

HALVES = (torch.float16, torch.bfloat16)
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")  # what DDP, torch.compile and FSDP prepend
_SHOWN = 5


class ReplayError(RuntimeError):
    """Raised when an incident cannot be replayed; the message is one line."""


@dataclass
class BuiltTraining:
    """The objects that the user's build() returned.

    Attributes:
        loss_function: called with the model and the batch as given to ``monitor.batch``.
        scheduler, scaler: None if build() returned none.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_function: Callable[[nn.Module, Any], Any]
    scheduler: Any = None
    scaler: GradScaler | None = None

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the parameters."""
        return {p.device for p in self.model.parameters()}

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))


def call_build(build: Callable[[], Any]) -> BuiltTraining:
    """Call the user's function and check what it returns.

    Raises:
        ReplayError: build() raises, or returns something unexpected.
    """
    try:
        built = build()
    except Exception as error:
        raise ReplayError(f"build() raised {error_line(error)}") from error
    if isinstance(built, (tuple, list)):
        if len(built) != 3:
            raise ReplayError(
                f"expected build() to return (model, optimizer, loss_function), but got {len(built)} objects"
            )
        return _checked(BuiltTraining(*built))
    needed = ("model", "optimizer", "loss_function")
    missing = [name for name in needed if not hasattr(built, name)]
    if missing:
        raise ReplayError(
            "expected build() to return (model, optimizer, loss_function) or an object with these "
            f"attributes, but got {type(built).__name__} without {', '.join(missing)}"
        )
    optional = (getattr(built, name, None) for name in ("scheduler", "scaler"))
    return _checked(BuiltTraining(*(getattr(built, name) for name in needed), *optional))


def _checked(built: BuiltTraining) -> BuiltTraining:
    wanted = {"model": nn.Module, "optimizer": Optimizer}
    for name, kind in wanted.items():
        value = getattr(built, name)
        if not isinstance(value, kind):
            raise ReplayError(
                f"expected build() to return a {kind.__name__} as {name}, but got {type(value).__name__}"
            )
    if not callable(built.loss_function):
        kind_of = type(built.loss_function).__name__
        raise ReplayError(f"expected build() to return a callable loss_function, but got {kind_of}")
    if built.scaler is not None and not isinstance(built.scaler, GradScaler):
        raise ReplayError(
            f"expected build() to return a torch.amp.GradScaler as scaler, "
            f"but got {type(built.scaler).__name__}"
        )
    if built.scheduler is not None and not hasattr(built.scheduler, "load_state_dict"):
        raise ReplayError(
            f"expected the scheduler of build() to have load_state_dict(), "
            f"but got {type(built.scheduler).__name__}"
        )
    return built


def error_line(error: BaseException) -> str:
    """Return the type and first line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


# Loading a saved state.


def restore(built: BuiltTraining, state: Mapping[str, Any]) -> None:
    """Load a copy of the recorded state into all objects and drop the gradients.

    Raises:
        ReplayError: the state is from another model, optimizer, scheduler or scaler.
    """
    restore_model(built.model, state["model"])
    for parameter in all_parameters(built):
        parameter.grad = None
    _require_same_groups(built.optimizer, state["optimizer"])
    _load("optimizer", built.optimizer, state["optimizer"])
    if built.scheduler is not None and state.get("scheduler") is not None:
        _load("scheduler", built.scheduler, state["scheduler"])
    if state.get("scaler"):
        if built.scaler is None:
            built.scaler = GradScaler(built.device.type)
        _load("scaler", built.scaler, state["scaler"])
        # Drop its record of a step that an earlier run began; there is no public access, see scaler_state.py.
        built.scaler._per_optimizer_states = defaultdict(_fresh_record)


def _fresh_record() -> dict[str, Any]:
    return torch.amp.grad_scaler._refresh_per_optimizer_state()


def _load(name: str, target: Any, state: Any) -> None:
    # Copied, since an optimizer keeps using the tensors of the state that it loads.
    try:
        target.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        kind = type(target).__name__
        raise ReplayError(
            f"cannot load the saved {name} state into the {kind} of build(): {error_line(error)}"
        ) from None


def all_parameters(built: BuiltTraining) -> list[Tensor]:
    """Return the parameters of the model, and those that only the optimizer has."""
    found = dict.fromkeys(built.model.parameters())
    found |= dict.fromkeys(p for group in built.optimizer.param_groups for p in group["params"])
    return list(found)


def restore_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the recorded state into the model.

    Raises:
        ReplayError: names, shapes or dtypes differ; the message has the first names.
    """
    own = model.state_dict()
    # Recorded states also hold the buffers that are not persistent.
    further = {name: b for name, b in model.named_buffers(remove_duplicate=False) if name not in own}
    state = renamed(state, own | further)
    restore_buffers(model, {name: state[name] for name in further if name in state})
    state = {name: value for name, value in state.items() if name not in further}
    _require_none("lacks", sorted(set(own) - set(state)), "which the model of build() has")
    _require_none("has", sorted(set(state) - set(own)), "which the model of build() does not")
    for name, value in state.items():
        if not isinstance(value, Tensor) or not isinstance(own[name], Tensor):
            continue
        if value.shape != own[name].shape or value.dtype != own[name].dtype:
            raise ReplayError(
                f"the recorded {name} is {_kind(value)}, but in the model of build() it is {_kind(own[name])}"
            )
    model.load_state_dict(dict(state))


def _require_none(verb: str, names: list[str], which: str) -> None:
    if names:
        shown = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        )
        raise ReplayError(f"the recorded model {verb} {shown}, {which}")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def plain_name(name: str) -> str:
    """Return the name without the prefixes that wrappers of a model add."""
    for wrapper in _WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def renamed(state: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state under the names of `own`, where these differ only by prefixes of wrappers."""
    if set(state) == set(own):
        return state
    names = {plain_name(name): name for name in own}
    return {names.get(plain_name(name), name): value for name, value in state.items()}


def _require_same_groups(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise ReplayError for the state of another optimizer, which torch would load without an error."""
    kind = type(optimizer).__name__
    groups = state["param_groups"]
    sizes, own = ([len(group["params"]) for group in g] for g in (groups, optimizer.param_groups))
    if sizes != own:
        raise ReplayError(
            f"the recorded optimizer has parameter groups of {sizes} parameters, but the {kind} of build() "
            f"has groups of {own}"
        )
    known = set(optimizer.defaults) | set(optimizer.param_groups[0])
    missing, further = set(optimizer.defaults) - set(groups[0]), set(groups[0]) - known
    further -= {"params", "initial_lr", "param_names"}
    # Either alone may be due to another version of torch, or to a scheduler.
    if missing and further:
        raise ReplayError(
            f"the saved optimizer state is not from {kind}, which build() returned: it has "
            f"{', '.join(sorted(further))} and lacks {', '.join(sorted(missing))}"
        )


@torch.no_grad()
def restore_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Copy the recorded buffers into the model; raise ReplayError for those that it lacks."""
    own = dict(model.named_buffers(remove_duplicate=False))
    for name, value in renamed(buffers, own).items() if buffers else ():
        if name not in own or own[name].shape != value.shape:
            raise ReplayError(f"the model of build() has no buffer {name} of shape {list(value.shape)}")
        own[name].copy_(value)


@contextmanager
def float32_parameters(model: nn.Module) -> Iterator[None]:
    """Convert half precision parameters and buffers to float32 for the duration of the context."""
    parameters = {p: p.data for p in model.parameters() if p.dtype in HALVES}
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.dtype in HALVES
    ]
    try:
        for parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.float()
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.float()
        yield
    finally:
        for parameter, data in parameters.items():
            parameter.grad = None
            parameter.data = data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
