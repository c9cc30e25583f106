# SPDX-License-Identifier: BSD-3-Clause
"""The states of the random number generators of this process: Python's, NumPy's, torch's on CPU and CUDA."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state(torch_only: bool = False) -> dict[str, Any]:
    """What :func:`set_rng_state` puts back: "python"; "numpy", its global generator, if NumPy is imported;
    "torch"; "cuda" by the index of the device, once CUDA is in use.

    With `torch_only` the generators of torch alone. The state of a CUDA generator is a seed and an offset
    that the host keeps: nothing waits for a device.
    """
    state: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    if not torch_only:
        state["python"] = random.getstate()
        if (numpy := _imported_numpy()) is not None:
            state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():
        generators = torch.cuda.default_generators
        state["cuda"] = {index: generator.get_state() for index, generator in enumerate(generators)}
    return state


def set_rng_state(state: dict[str, Any]) -> list[str]:
    """Put the generators where they were.

    Returns:
        A sentence on each generator that this process has not got: of a missing device, or of NumPy.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: no state of :func:`rng_state`.
    """
    problems = []
    if "python" in state:
        random.setstate(state["python"])
    torch.default_generator.set_state(state["torch"])
    if "numpy" in state:
        try:
            import numpy
        except ImportError:
            problems.append("the state of NumPy's generator was not set: NumPy is not installed")
        else:
            numpy.random.set_state(state["numpy"])
    for index, its in state.get("cuda", {}).items():
        if index >= torch.cuda.device_count():
            problems.append(
                f"the state of the generator of cuda:{index} was not set: there is no such device"
            )
        else:
            torch.cuda.set_rng_state(its, index)
    return problems


def _imported_numpy() -> Any:
    """NumPy if all of it is there: while it is being imported it has no random numbers."""
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "random") else None
