# SPDX-License-Identifier: BSD-3-Clause
"""The settings of torch on which the last bits of results depend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .rng import rng_state, set_rng_state


def deterministic_settings() -> dict[str, Any]:
    """Return the current settings, which :func:`use_settings` restores, as JSON values."""
    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),  # the order of a sum depends on it
    }


def _set(settings: Mapping[str, Any]) -> None:
    now = deterministic_settings()
    settings = now | {key: value for key, value in settings.items() if key in now}
    if settings == now:
        return
    torch.use_deterministic_algorithms(settings["algorithms"], warn_only=settings["warn_only"])
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.allow_tf32 = settings["cudnn_tf32"]
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    if settings["threads"] != now["threads"]:
        torch.set_num_threads(settings["threads"])


@contextmanager
def use_settings(settings: Mapping[str, Any]) -> Iterator[None]:
    """Apply the settings and enable gradients for the duration of the context.

    Afterwards the caller's own settings and the states of its random number generators are restored.
    """
    before, generators = deterministic_settings(), rng_state()
    with ExitStack() as stack:
        stack.callback(set_rng_state, generators)
        stack.callback(_set, before)
        stack.enter_context(torch.enable_grad())
        _set(settings)
        yield
