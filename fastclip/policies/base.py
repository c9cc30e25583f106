# SPDX-License-Identifier: BSD-3-Clause
"""The interface of a policy, and the base class of policies that remember norms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..backends import reference


class Policy(ABC):
    """A rule that gives the limit of each step.

    A class of your own needs only :meth:`limit`. It must consist of tensor operations that leave the tensors
    on their device: a ``.item()`` or an ``if`` on a tensor would make the host wait in every step.

    Attributes:
        per_tensor: True for one limit for each gradient, which then is clipped by its own norm.
        skips: True if the limit may be NaN, which skips the step. Needs ``nonfinite="skip"``.
    """

    per_tensor: ClassVar[bool] = False
    skips: ClassVar[bool] = False

    @abstractmethod
    def limit(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        """Return the limit of this step; called once a step.

        Args:
            total_norm: the norm before clipping of each group, [G]; [1] without groups. Gradients count
                unscaled. It may be NaN or Inf.
            norms: the norm of each gradient, [N]; likewise.

        Returns:
            T, [G], or [N] if `per_tensor`: gradients are multiplied by min(1, T / norm); Inf clips nothing.
            The next step may overwrite it.

        Raises:
            ValueError: the number of groups, or of gradients, is not that of the step before.
        """

    @property
    def threshold(self) -> Tensor | None:
        """The last limit, on the device; None before the first. The next step overwrites it."""
        return None

    def observe_loss(self, loss: Tensor | float) -> None:
        """Observe the loss of the coming step, for rules that depend on it; others ignore it.

        Args:
            loss: one number, the same on every rank: averaged over ranks and accumulated batches.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return all that must be saved for the run to continue as if never interrupted.

        It holds strings, dicts and tensors only, copies on the device, which
        ``torch.load(weights_only=True)`` loads.
        """
        return {"policy": type(self).__name__, "state": {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the policy that returned `state` was.

        Raises:
            ValueError: the state of another class, or with another number of groups, gradients or steps.
        """
        tensors_in(state, self)


def tensors_in(state: dict[str, Any], policy: Policy) -> dict[str, Tensor]:
    """Return the tensors of a state_dict, or raise ValueError if it is not one of the policy's class."""
    wanted = type(policy).__name__
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict) or "policy" not in state:
        raise ValueError(f"expected the state_dict of a {wanted}, but got {type(state).__name__}")
    if state["policy"] != wanted:
        raise ValueError(f"expected the state_dict of a {wanted}, but got that of {state['policy']}")
    return state["state"]


class StatefulPolicy(Policy):
    """A policy that keeps tensors between steps, changed in place: a captured CUDA graph changes them too."""

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}  # made in the first step, which gives size and device

    @abstractmethod
    def _initial(self, size: int) -> dict[str, tuple[tuple[int, ...], float]]:
        """Return shape and first value of each tensor for `size` norms; "threshold" has shape (size,)."""

    @abstractmethod
    def _rule(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        """Return the limit, as :meth:`limit`, from tensors in the dtype of the state, which exists."""

    @property
    def threshold(self) -> Tensor | None:
        return self._state.get("threshold")

    @torch.no_grad()
    def limit(self, total_norm: Tensor, norms: Tensor) -> Tensor:
        dtype = reference.accumulation_dtype(total_norm.device)
        self._begin(norms if self.per_tensor else total_norm, dtype)
        return self._rule(total_norm.to(dtype), norms.to(dtype))

    def _begin(self, own: Tensor, dtype: torch.dtype) -> None:
        """Make the state in the first step; later bring it to the device and dtype of the norms."""
        size = len(own)
        if not self._state:
            self._state = {
                name: torch.full(shape, value, dtype=dtype, device=own.device)
                for name, (shape, value) in self._initial(size).items()
            }
        threshold = self._state["threshold"]
        if len(threshold) != size:
            what = "gradients" if self.per_tensor else "groups"
            raise ValueError(
                f"expected {len(threshold)} {what}, as in the steps before, since {type(self).__name__} "
                f"remembers the norm of each, but got {size}"
            )
        if threshold.device != own.device or threshold.dtype != dtype:  # as loaded, or the model has moved
            self._state = {name: tensor.to(own.device, dtype) for name, tensor in self._state.items()}

    def _set(self, name: str, value: Tensor, where: Tensor | None = None) -> Tensor:
        """Change a tensor of the state in place, all of it or where the mask is True."""
        kept = self._state[name]
        return kept.copy_(value if where is None else torch.where(where, value, kept))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"state": {name: t.clone() for name, t in self._state.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        tensors = tensors_in(state, self)
        if tensors and self._state:
            size = len(self._state["threshold"])
        else:
            size = len(tensors["threshold"]) if "threshold" in tensors else 1
        wanted = {name: list(shape) for name, (shape, _) in self._initial(size).items()}
        got = {name: list(tensor.shape) for name, tensor in tensors.items()}
        if tensors and got != wanted:
            raise ValueError(f"expected a state_dict of {self!r} with the shapes {wanted}, but got {got}")
        if not tensors or not self._state:  # of a policy, or for one, that has not made a step
            self._state = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._state[name].copy_(tensor)  # in place: a captured graph goes on with it
