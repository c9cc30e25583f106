# SPDX-License-Identifier: BSD-3-Clause
"""Temporary changes to objects of other libraries, each of which can be undone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_ABSENT = object()
_WRAPPER = "_fastclip_wrapper"  # attribute of a method that a MethodWrapper has put in place


class MethodWrapper:
    """Replaces one method of one object by `around(inner, *args, **kwargs)` until :meth:`undo`.

    Wrappers that were put on the method before keep working, and so do later ones, such as a learning rate
    scheduler's: the new method is bound, as torch.optim.lr_scheduler requires, and carries the attributes and
    the signature of the old one.
    """

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def method(owned_by: object, *args: Any, **kwargs: Any) -> Any:
            if owned_by is not owner:  # a deep copy, which this does not wrap
                return getattr(type(owned_by), name)(owned_by, *args, **kwargs)
            return around(inner, *args, **kwargs) if self.active else inner(*args, **kwargs)

        self.active = True
        self._owner = owner
        self._name = name
        self._before = vars(owner).get(name, _ABSENT)
        self._method = types.MethodType(method, owner)
        vars(method)[_WRAPPER] = self
        setattr(owner, name, self._method)

    def undo(self) -> None:
        """Restore the method.

        If it was wrapped again, it only passes calls on until the outer wrapper is undone too.
        """
        self.active = False
        if vars(self._owner).get(self._name) is not self._method:
            return
        before = self._before
        while (below := getattr(before, _WRAPPER, None)) is not None and not below.active:
            before = below._before
        _restore(self._owner, self._name, before)


def _restore(owner: object, name: str, before: object) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)


@contextmanager
def temporary_attributes(owner: object, **values: object) -> Iterator[None]:
    """Set attributes of an object, and restore them afterwards, also after an error."""
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            _restore(owner, name, value)


@contextmanager
def restored_on_error(owner: object, *names: str) -> Iterator[None]:
    """Restore the attributes if an error is raised."""
    before = {name: vars(owner).get(name, _ABSENT) for name in names}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            _restore(owner, name, value)
        raise


@contextmanager
def without_gradients(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Iterator[None]:
    """Set every ``.grad`` to None, and restore the very same tensors afterwards.

    If ``optimizer.zero_grad`` was called meanwhile, by a hook or by the step itself, the gradients stay
    cleared.
    """
    grads = [parameter.grad for parameter in parameters]
    cleared = False
    zero_grad = optimizer.zero_grad

    def clearing(*args: Any, **kwargs: Any) -> None:
        nonlocal cleared
        cleared = True
        zero_grad(*args, **kwargs)

    with temporary_attributes(optimizer, zero_grad=clearing):
        try:
            for parameter in parameters:
                parameter.grad = None
            yield
        finally:
            for parameter, grad in zip(parameters, grads, strict=True):
                if not cleared and parameter.grad is None:
                    parameter.grad = grad
