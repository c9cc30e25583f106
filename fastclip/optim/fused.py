# SPDX-License-Identifier: BSD-3-Clause
"""Which optimizers clip in their own fused kernel, and what that kernel does to a step that it skips."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether a kernel that can clip updates all of the optimizer's groups with gradients.

    The groups decide: `fused` can be given to each and overrides what the optimizer was created with.
    """
    if not _has_fused_step(type(optimizer)):
        return False
    groups = [g for g in optimizer.param_groups if any(p.grad is not None for p in g["params"])]
    return all(group.get("fused") for group in groups)


def _has_fused_step(kind: type[Optimizer]) -> bool:
    """Return whether the class steps by torch's own code, which hands both scalars to a kernel."""
    # Unwrapped, since torch wraps the step of a class anew when it first makes an instance of it.
    own = inspect.unwrap(kind.step)
    return any(own is inspect.unwrap(known.step) for known in (Adam, AdamW, SGD, Adagrad))


def parameters_without_momentum(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters for which SGD is about to create a momentum buffer."""
    if not isinstance(optimizer, SGD) or not any(group["momentum"] for group in optimizer.param_groups):
        return []
    return [p for p in parameters if optimizer.state.get(p, {}).get("momentum_buffer") is None]


def zero_new_momentum(optimizer: Optimizer, parameters: Sequence[Tensor], found_inf: Tensor) -> None:
    """Zero new momentum buffers if the step was skipped.

    torch's fused SGD leaves the buffers of a skipped first step uninitialized.
    """
    for parameter in parameters:
        buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
        if buffer is not None:
            buffer.masked_fill_(found_inf.to(buffer.device) != 0, 0)


def needs_host_decision(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Return whether the kernel alone cannot skip this step correctly.

    SGD does not dampen its momentum in the first step that it applies. Zeros in the buffers cannot tell the
    kernel that this step is still to come, so the host has to skip.
    """
    new = parameters_without_momentum(optimizer, parameters)
    return bool(new) and any(group["dampening"] for group in optimizer.param_groups)
