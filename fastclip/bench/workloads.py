# SPDX-License-Identifier: BSD-3-Clause
"""Named lists of gradient shapes, and gradients that can be restored after they were clipped."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Shapes = tuple[tuple[int, ...], ...]

SMOKE = os.environ.get("FASTCLIP_BENCH_SMOKE", "") not in ("", "0")
CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16")

# Neither the values nor their squares come near the limits of any dtype.
_GRAD_STD = 0.01
_SEED = 0


@dataclass(frozen=True)
class Workload:
    """The shapes of a model's gradients, the dtypes to measure by default, and the share of zero rows."""

    name: str
    shapes: Shapes
    dtypes: tuple[str, ...] = DTYPES
    zero_rows: float = 0.0

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def nbytes(self, dtype: str) -> int:
        return self.numel * getattr(torch, dtype).itemsize


def gpt2(vocab: int, context: int, width: int, layers: int) -> Shapes:
    """Return the shapes of the parameters of a GPT-2."""
    norm = ((width,), (width,))
    attention = ((3 * width, width), (3 * width,), (width, width), (width,))
    mlp = ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
    return ((vocab, width), (context, width), *(norm + attention + norm + mlp) * layers, *norm)


def llama(vocab: int, width: int, key_value: int, mlp: int, layers: int) -> Shapes:
    """Return the shapes of the parameters of a Llama."""
    attention = ((width, width), (key_value, width), (key_value, width), (width, width))
    block = (*attention, (mlp, width), (mlp, width), (width, mlp), (width,), (width,))
    return ((vocab, width), *block * layers, (width,), (vocab, width))


def _workloads(smoke: bool) -> tuple[Workload, ...]:
    embedding = ((300, 256),) if smoke else ((50257, 768),)
    return (
        Workload("gpt2_124m", gpt2(500, 64, 64, 2) if smoke else gpt2(50257, 1024, 768, 12)),
        # The shapes of TinyLlama-1.1B; float32 gradients and their copies would need 9 GB.
        Workload(
            "llama_1b",
            llama(500, 64, 16, 176, 2) if smoke else llama(32000, 2048, 256, 5632, 22),
            dtypes=("bfloat16",),
        ),
        Workload("many_tiny", ((64,),) * (100 if smoke else 5000)),
        Workload("mid_150", ((4096,),) * (15 if smoke else 150)),
        Workload("one_1m", ((50_000 if smoke else 1_000_000,),)),
        Workload("one_huge", ((200_000 if smoke else 100_000_000,),)),
        Workload("mostly_zero_embedding", embedding, zero_rows=0.99),
        Workload("dense_embedding", embedding),
    )


WORKLOADS = {workload.name: workload for workload in _workloads(SMOKE)}


class RestorableGradients:
    """Parameters with random gradients, and a copy that restores the gradients after they were clipped.

    Args:
        parameters: on any devices; their gradients are replaced.
        zero_rows: the share of zero rows in each gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], zero_rows: float = 0.0) -> None:
        self.parameters = list(parameters)
        generators: dict[torch.device, torch.Generator] = {}
        for parameter in self.parameters:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(_SEED)
            generator = generators[device]
            grad = torch.empty_like(parameter.data).normal_(std=_GRAD_STD, generator=generator)
            if zero_rows:
                # Zeros have to be written: pages that were never touched all share one in the cache.
                order = torch.randperm(len(grad), generator=generator, device=device)
                grad[order[: round(len(grad) * zero_rows)]] = 0
            parameter.grad = grad
        self.saved: list[Tensor] = [grad.clone() for grad in self.grads]

    @classmethod
    def of(cls, workload: Workload, dtype: str, device: torch.device | str = "cpu") -> RestorableGradients:
        """Return gradients of the shapes of a workload."""
        made = (
            nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
            for shape in workload.shapes
        )
        return cls(made, workload.zero_rows)

    @property
    def grads(self) -> list[Tensor]:
        return [grad for parameter in self.parameters if (grad := parameter.grad) is not None]

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for grad in self.saved)

    def restore(self) -> None:
        """Copy the saved values back."""
        torch._foreach_copy_(self.grads, self.saved)
