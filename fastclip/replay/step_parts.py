# SPDX-License-Identifier: BSD-3-Clause
"""The inputs of a run of a step, its mode, and its outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..gradient_stats import TensorStats
from . import samples


@dataclass
class MicroBatch:
    """One saved batch with the state that its forward depended on besides the model."""

    step: int
    micro: int
    rank: int
    batch: Any
    sample_ids: list[Any]
    rng: Any
    autocast: dict[str, dict[str, Any]]
    buffers: dict[str, Tensor]
    training: bool
    loss: float | None
    rng_at_batch: Any = None
    size: int = 0

    def __post_init__(self) -> None:
        self.size = samples.sample_count(self.batch, self.sample_ids)

    def name_of(self, index: int) -> Any:
        """Return the id of a sample, or its index if the ids do not match the samples."""
        return self.sample_ids[index] if len(self.sample_ids) == self.size else index


@dataclass(frozen=True)
class BatchPart:
    """All samples of a micro-batch or some of them; `weight` multiplies the loss."""

    micro: MicroBatch
    indices: tuple[int, ...] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class RunMode:
    """How a step is run.

    Attributes:
        divisor: divides each loss: the number of micro-batches where the training takes their mean.
        float32: whether to run in float32, without autocast and loss scale.
        eval_kinds: which modules are in eval mode: "batch_norm", "dropout".
        backward: whether to compute gradients.
    """

    divisor: float = 1.0
    float32: bool = False
    eval_kinds: tuple[str, ...] = ()
    backward: bool = True


@dataclass
class Outcome:
    """The outcome of a run; the losses are not divided or scaled.

    Attributes:
        gradients: statistics of the gradients, the worst first.
        in_place: the outcome if gradients are unscaled in place, which may differ in the last bit.
    """

    losses: list[float]
    loss: float
    total_norm: float | None = None
    nan_count: int = 0
    inf_count: int = 0
    gradients: list[TensorStats] = field(default_factory=list)
    in_place: Outcome | None = None

    @property
    def nonfinite(self) -> list[TensorStats]:
        """The gradients with NaN or Inf."""
        return [t for t in self.gradients if t.nan_count + t.inf_count]

    @property
    def is_finite(self) -> bool:
        """Whether losses, norm and gradients are all finite."""
        if not math.isfinite(self.loss) or not all(map(math.isfinite, self.losses)):
            return False
        if self.total_norm is not None and not math.isfinite(self.total_norm):
            return False
        return self.nan_count + self.inf_count == 0


@contextmanager
def eval_mode(model: nn.Module, kinds: Sequence[str]) -> Iterator[None]:
    """Set modules of these kinds to eval mode for the duration of the context."""
    types: tuple[type[nn.Module], ...] = ()
    types += (_BatchNorm,) if "batch_norm" in kinds else ()
    types += (_DropoutNd,) if "dropout" in kinds else ()
    found = [module for module in model.modules() if isinstance(module, types) and module.training]
    for module in found:
        module.training = False
    try:
        yield
    finally:
        for module in found:
            module.training = True


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the loss of a sample depends on the other samples of its batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
