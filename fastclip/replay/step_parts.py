# SPDX-License-Identifier: BSD-3-Clause
"""What a run of a step is given, and what it gives."""

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
    """What was saved of one forward: the batch, and all that it depended on beside the model."""

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
        """The id of a sample; its index where there are no ids, or not one for each."""
        return self.sample_ids[index] if len(self.sample_ids) == self.size else index


@dataclass(frozen=True)
class BatchPart:
    """Some samples of a micro-batch, or all; `weight` multiplies its loss."""

    micro: MicroBatch
    indices: tuple[int, ...] | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class RunMode:
    """How a step is run other than it was.

    Attributes:
        divisor: of each loss; as many as the micro-batches where their mean is meant.
        float32: without autocast and in float32, and without a loss scale.
        eval_kinds: which modules are in eval mode: "batch_norm", "dropout".
        backward: whether gradients are wanted.
    """

    divisor: float = 1.0
    float32: bool = False
    eval_kinds: tuple[str, ...] = ()
    backward: bool = True


@dataclass
class Outcome:
    """What a run gave; the losses as they are before they are divided and scaled."""

    losses: list[float]
    loss: float
    total_norm: float | None = None
    nan_count: int = 0
    inf_count: int = 0
    gradients: list[TensorStats] = field(default_factory=list)  # the worst first
    in_place: Outcome | None = None  # of gradients that were unscaled in place: in the last bit maybe another

    @property
    def nonfinite(self) -> list[TensorStats]:
        """The gradients with NaN or Inf."""
        return [t for t in self.gradients if t.nan_count + t.inf_count]

    @property
    def is_finite(self) -> bool:
        if not math.isfinite(self.loss) or not all(map(math.isfinite, self.losses)):
            return False
        if self.total_norm is not None and not math.isfinite(self.total_norm):
            return False
        return self.nan_count + self.inf_count == 0


@contextmanager
def eval_mode(model: nn.Module, kinds: Sequence[str]) -> Iterator[None]:
    """Modules of these kinds in eval mode, for a while."""
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
    """Whether a sample's loss depends on the other samples of its batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())
