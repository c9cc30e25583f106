# SPDX-License-Identifier: BSD-3-Clause
"""Changes to objects that belong to others, each of which is taken back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_ABSENT = object()


class MethodWrapper:
    """One method of one object, called by way of `around(inner, *args, **kwargs)` until :meth:`undo`.

    What wraps the method later on, such as a learning rate scheduler, keeps working, and so does what had
    wrapped it before: the new method is a bound one, as torch.optim.lr_scheduler needs it, and carries the
    attributes and the signature of the old.
    """

    def __init__(self, owner: object, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def method(_: object, *args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs) if self.active else inner(*args, **kwargs)

        self.active = True
        self._owner = owner
        self._name = name
        self._before = vars(owner).get(name, _ABSENT)
        self._method = types.MethodType(method, owner)
        setattr(owner, name, self._method)

    def undo(self) -> None:
        """Put back what was there. Where the method was wrapped again, it stays and only passes calls on."""
        self.active = False
        if vars(self._owner).get(self._name) is self._method:
            _restore(self._owner, self._name, self._before)


def _restore(owner: object, name: str, before: object) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)


@contextmanager
def attributes(owner: object, **values: object) -> Iterator[None]:
    """Set attributes of an object; afterwards each is as it was, also if something raises."""
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
    """If something raises, bring the attributes back to what they were."""
    before = {name: vars(owner).get(name, _ABSENT) for name in names}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            _restore(owner, name, value)
        raise


@contextmanager
def without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Every ``.grad`` is None; afterwards each is the very same tensor again."""
    grads = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
