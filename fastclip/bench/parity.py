# SPDX-License-Identifier: BSD-3-Clause
"""What must hold before a time is worth printing: norms and gradients against a float64 computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .workloads import Gradients

# Relative error of fastclip's norm.
NORM_ERROR = 1e-6

# torch adds up in float32, which loses several percent over 100 million squares, and rounds the norm
# to the dtype of the gradients. Its error is printed; this only rules out that something else was computed.
TORCH_NORM_ERROR = 0.1

# Bounds the float64 copies.
_PIECE = 1 << 22

Clip = Callable[[Sequence[Tensor], float], Tensor]


class ParityError(AssertionError):
    """A result is wrong: its time means nothing."""


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    yield from flat.reshape(-1).split(_PIECE)


def exact_norm(grads: Iterable[Tensor]) -> float:
    """The 2-norm of all gradients, in float64."""
    squares = (piece.double().square().sum().item() for grad in grads for piece in _pieces(grad))
    return math.sqrt(math.fsum(squares))


def norm_error(total_norm: Tensor, exact: float) -> float:
    """The relative error."""
    return abs(total_norm.item() / exact - 1.0)


def _require_scaled(who: str, gradients: Gradients, coef: float, limit: float, epsilons: int) -> None:
    """Raise unless every element is coef times what it was, within the limit and so many epsilons."""
    for index, (grad, saved) in enumerate(zip(gradients.grads, gradients.saved, strict=True)):
        if coef == 1.0:
            if not torch.equal(grad, saved):
                raise ParityError(f"{who}: gradient {index} was changed though nothing was to be clipped")
            continue
        info = torch.finfo(grad.dtype)
        rtol = limit + epsilons * info.eps
        atol = info.tiny * info.eps  # the spacing of subnormal numbers
        for got, before in zip(_pieces(grad), _pieces(saved), strict=True):
            expected = before.double().mul_(coef)
            off = (got.double() - expected).abs_() > expected.abs().mul_(rtol).add_(atol)
            if off.any() or not got.isfinite().all():
                raise ParityError(
                    f"{who}: gradient {index} is not {coef} times what it was, within {rtol:.1e}"
                )


def check(gradients: Gradients, clip: Clip, max_norm: float, exact: float) -> float:
    """Clip once with fastclip; hold the norm and every gradient element against float64.

    Returns:
        The relative error of the norm. The gradients are restored.

    Raises:
        ParityError: the norm is off by more than NORM_ERROR, or an element by that and its rounding.
    """
    return _check("fastclip", gradients, clip, max_norm, exact, NORM_ERROR)


def check_torch(gradients: Gradients, clip: Clip, max_norm: float, exact: float) -> float:
    """The same for torch: a wide limit for its norm, but gradients that fit the norm it returned.

    So both scale by min(1, max_norm / norm), and their gradients differ by no more than their norms do.
    """
    return _check("torch", gradients, clip, max_norm, exact, TORCH_NORM_ERROR)


def _check(who: str, gradients: Gradients, clip: Clip, max_norm: float, exact: float, limit: float) -> float:
    gradients.restore()
    total_norm = clip(gradients.parameters, max_norm)
    error = norm_error(total_norm, exact)
    if not error <= limit:
        raise ParityError(f"{who}: the norm is off by {error:.1e}, more than {limit:.0e}")
    norm, allowed, epsilons = (total_norm.item(), 0.0, 4) if who == "torch" else (exact, limit, 2)
    _require_scaled(who, gradients, min(1.0, max_norm / (norm + 1e-6)), allowed, epsilons)
    gradients.restore()
    return error
