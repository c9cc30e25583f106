# SPDX-License-Identifier: BSD-3-Clause
"""The check before anything is timed: norms and gradients against a float64 computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .workloads import RestorableGradients

# The largest relative error of fastclip's norm.
NORM_ERROR = 1e-6

# torch sums in float32, which loses several percent over 100 million squares, and rounds the norm to the
# gradients' dtype. Its error is printed; this limit only rules out that something else was computed.
TORCH_NORM_ERROR = 0.1

# Elements converted to float64 at a time, which bounds the memory of the copies.
_PIECE = 1 << 22

Clip = Callable[[Sequence[Tensor], float], Tensor]


class ParityError(AssertionError):
    """A result is wrong, so its time would mean nothing."""


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    yield from flat.reshape(-1).split(_PIECE)


def exact_norm(grads: Iterable[Tensor]) -> float:
    """Return the 2-norm of all gradients, computed in float64."""
    squares = (piece.double().square().sum().item() for grad in grads for piece in _pieces(grad))
    return math.sqrt(math.fsum(squares))


def norm_error(total_norm: Tensor, exact: float) -> float:
    """Return the relative error of a norm."""
    return abs(total_norm.item() / exact - 1.0)


def _require_scaled(
    who: str, gradients: RestorableGradients, coef: float, limit: float, epsilons: int
) -> None:
    """Raise unless each element is coef times its saved value, within limit + epsilons * eps."""
    for index, (grad, saved) in enumerate(zip(gradients.grads, gradients.saved, strict=True)):
        if coef == 1.0:
            if not torch.equal(grad, saved):
                raise ParityError(f"{who}: gradient {index} changed, but nothing was to be clipped")
            continue
        info = torch.finfo(grad.dtype)
        rtol = limit + epsilons * info.eps
        atol = info.tiny * info.eps  # the spacing of subnormal numbers
        for got, before in zip(_pieces(grad), _pieces(saved), strict=True):
            expected = before.double().mul_(coef)
            off = (got.double() - expected).abs_() > expected.abs().mul_(rtol).add_(atol)
            if off.any() or not got.isfinite().all():
                raise ParityError(
                    f"{who}: gradient {index} is not {coef} times its former value within {rtol:.1e}"
                )


def check(gradients: RestorableGradients, clip: Clip, max_norm: float, exact: float) -> float:
    """Clip once with fastclip; check the norm and every gradient element against float64.

    The gradients are restored.

    Returns:
        The relative error of the norm.

    Raises:
        ParityError: the norm is off by more than NORM_ERROR, or an element by more than that and rounding.
    """
    return _check("fastclip", gradients, clip, max_norm, exact, NORM_ERROR)


def check_torch(gradients: RestorableGradients, clip: Clip, max_norm: float, exact: float) -> float:
    """Do the same with torch: its norm has a wide limit, its gradients must fit the norm it returned.

    Both then scale by min(1, max_norm / norm), and their gradients differ no more than their norms do.
    """
    return _check("torch", gradients, clip, max_norm, exact, TORCH_NORM_ERROR)


def _check(
    who: str, gradients: RestorableGradients, clip: Clip, max_norm: float, exact: float, limit: float
) -> float:
    gradients.restore()
    total_norm = clip(gradients.parameters, max_norm)
    error = norm_error(total_norm, exact)
    if not error <= limit:
        raise ParityError(f"{who}: the norm is off by {error:.1e}, more than {limit:.0e}")
    norm, allowed, epsilons = (total_norm.item(), 0.0, 4) if who == "torch" else (exact, limit, 2)
    _require_scaled(who, gradients, min(1.0, max_norm / (norm + 1e-6)), allowed, epsilons)
    gradients.restore()
    return error
