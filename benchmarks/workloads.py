# SPDX-License-Identifier: BSD-3-Clause
"""Named lists of gradient shapes, and gradients of those shapes that can be restored after a clip."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor

Shapes = tuple[tuple[int, ...], ...]

SMOKE = os.environ.get("FASTCLIP_BENCH_SMOKE", "") not in ("", "0")
DTYPES = ("float32", "bfloat16", "float16")

# Far above the smallest float16, far below values whose squares overflow: no dtype meets its limits.
_GRAD_STD = 0.01
_SEED = 0


@dataclass(frozen=True)
class Workload:
    """Shapes, the dtypes measured unless others are asked for, and the share of rows that are zero."""

    name: str
    shapes: Shapes
    dtypes: tuple[str, ...] = DTYPES
    zero_rows: float = 0.0

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def nbytes(self, dtype: str) -> int:
        return self.numel * getattr(torch, dtype).itemsize


def _gpt2(vocab: int, context: int, width: int, layers: int) -> Shapes:
    norm = ((width,), (width,))
    attention = ((3 * width, width), (3 * width,), (width, width), (width,))
    mlp = ((4 * width, width), (4 * width,), (width, 4 * width), (width,))
    return ((vocab, width), (context, width), *(norm + attention + norm + mlp) * layers, *norm)


def _llama(vocab: int, width: int, key_value: int, mlp: int, layers: int) -> Shapes:
    attention = ((width, width), (key_value, width), (key_value, width), (width, width))
    block = (*attention, (mlp, width), (mlp, width), (width, mlp), (width,), (width,))
    return ((vocab, width), *block * layers, (width,), (vocab, width))


def _workloads(smoke: bool) -> tuple[Workload, ...]:
    embedding = ((300, 256),) if smoke else ((50257, 768),)
    return (
        Workload("gpt2_124m", _gpt2(500, 64, 64, 2) if smoke else _gpt2(50257, 1024, 768, 12)),
        # The shapes of TinyLlama-1.1B; float32 gradients and their copies would need 9 GB.
        Workload(
            "llama_1b",
            _llama(500, 64, 16, 176, 2) if smoke else _llama(32000, 2048, 256, 5632, 22),
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


class Gradients:
    """Parameters with gradients, and a copy that brings the gradients back after they were clipped."""

    def __init__(self, workload: Workload, dtype: str) -> None:
        generator = torch.Generator().manual_seed(_SEED)
        self.workload = workload
        self.parameters: list[torch.nn.Parameter] = []
        for shape in workload.shapes:
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype)))
            grad = torch.empty_like(parameter.data).normal_(std=_GRAD_STD, generator=generator)
            if workload.zero_rows:
                # Written, not left as the system hands it out: untouched pages all share one in the cache.
                order = torch.randperm(shape[0], generator=generator)
                grad[order[: round(shape[0] * workload.zero_rows)]] = 0
            parameter.grad = grad
            self.parameters.append(parameter)
        self.saved: list[Tensor] = [grad.clone() for grad in self.grads]

    @property
    def grads(self) -> list[Tensor]:
        return [grad for parameter in self.parameters if (grad := parameter.grad) is not None]

    def restore(self) -> None:
        torch._foreach_copy_(self.grads, self.saved)
