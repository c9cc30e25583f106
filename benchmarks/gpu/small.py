# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.gpu.small`: every op once over small lists of all dtypes, for compute-sanitizer."""

from __future__ import annotations

import sys

import torch

from fastclip.backends import native

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def main(device: str) -> int:
    """Run every op; return the exit status."""
    generator = torch.Generator().manual_seed(0)
    grads = []
    for size in (0, 1, 7, 1000, 40_000, 131_072, 300_001):
        for offset, dtype in enumerate(DTYPES):
            whole = torch.randn(size + offset, generator=generator).to(dtype).to(device)
            grads.append(whole[offset:])
    grads[9][3], grads[17][-1] = float("nan"), float("inf")
    for norm_type in (1.0, 2.0, float("inf")):
        native.grad_stats(grads, norm_type)
        for nonfinite in ("propagate", "skip", "zero"):
            copies = [g.clone() for g in grads]
            native.clip_(copies, 0.5, norm_type, nonfinite, [i % 3 for i in range(len(grads))])
            native.clip_(copies, 0.5, norm_type, nonfinite)
    native.scale_(grads, torch.full((len(grads),), 0.5, device=device))
    native.clamp_(grads, 0.1)
    many = [torch.ones(5, device=device) for _ in range(1700)]
    total_norm, _ = native.grad_stats(many, 2.0)
    print(f"done: {total_norm.item():.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main("cuda" if torch.cuda.is_available() else "cpu"))
