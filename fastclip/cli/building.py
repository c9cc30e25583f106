# SPDX-License-Identifier: BSD-3-Clause
"""Import of functions given on the command line as MODULE:FUNCTION, such as training:build."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from ..replay.build import ReplayError, error_line


def function_named(text: str) -> Callable[[], Any]:
    """Import the function; raise ReplayError if that fails or it is not callable."""
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ReplayError(f"expected MODULE:FUNCTION such as train:build, but got {text!r}")
    try:
        function = attrgetter(name)(importlib.import_module(module_name))
    except ModuleNotFoundError as error:
        raise ReplayError(f"{text}: no module named {error.name!r}") from error
    except AttributeError as error:
        raise ReplayError(f"{text}: {error}") from error
    except Exception as error:
        raise ReplayError(f"{text}: importing it raised {error_line(error)}") from error
    if not callable(function):
        raise ReplayError(f"{text}: expected a function, but got {type(function).__name__}")
    return function


@contextmanager
def importable(directory: str) -> Iterator[None]:
    """Make the modules of a directory importable for the duration of the context."""
    before = list(sys.path)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path[:] = before
