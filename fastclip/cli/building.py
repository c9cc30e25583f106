# SPDX-License-Identifier: BSD-3-Clause
"""Functions of the user that the command line names as MODULE:FUNCTION, such as training:build."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from ..replay.build import ReplayError, error_line


def function_named(text: str) -> Callable[[], Any]:
    """Raises ReplayError if it cannot be imported or called."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ReplayError(f"expected MODULE:FUNCTION such as train:build, but got {text!r}")
    try:
        function = attrgetter(name)(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        raise ReplayError(f"{text}: there is no module {error.name!r}") from error
    except AttributeError as error:
        raise ReplayError(f"{text}: {error}") from error
    except Exception as error:
        raise ReplayError(f"{text}: importing it raised {error_line(error)}") from error
    if not callable(function):
        raise ReplayError(f"{text}: expected a function, but got {type(function).__name__}")
    return function


@contextmanager
def importable(directory: str) -> Iterator[None]:
    """Modules of a directory can be imported meanwhile."""
    before = list(sys.path)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = before
