# SPDX-License-Identifier: BSD-3-Clause
"""The states of the random number generators of this process: Python's, NumPy's, torch's on CPU and CUDA."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def rng_state(torch_only: bool = False) -> dict[str, Any]:
    """Return the states of the generators, which :func:`set_rng_state` restores.

    They are "python"; "numpy", the global generator, if NumPy is imported; "torch"; and "cuda" by device
    index, once CUDA is in use. Nothing waits for a device: the host holds the seeds and offsets of CUDA.

    Args:
        torch_only: whether to leave Python's and NumPy's generators out.
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
    """Restore the states of the generators.

    Returns:
        A sentence on each generator that this process lacks: that of a missing device, or NumPy's.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: `state` did not come from :func:`rng_state`.
    """
    problems = []
    if "python" in state:
        random.setstate(state["python"])
    torch.default_generator.set_state(state["torch"])
    if "numpy" in state:
        try:
            import numpy
        except ImportError:
            problems.append("the state of NumPy's generator was not restored: NumPy is not installed")
        else:
            numpy.random.set_state(state["numpy"])
    for index, its in state.get("cuda", {}).items():
        if index >= torch.cuda.device_count():
            problems.append(f"the generator state of cuda:{index} was not restored: there is no such device")
        else:
            torch.cuda.set_rng_state(its, index)
    return problems


def _imported_numpy() -> Any:
    """Return NumPy once its import has finished; before, it has no `random`."""
    numpy = sys.modules.get("numpy")
    return numpy if hasattr(numpy, "random") else None
