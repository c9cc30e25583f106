# SPDX-License-Identifier: BSD-3-Clause
"""Small tensors of numbers, such as limits and factors, brought to the gradients' device."""

from __future__ import annotations

import torch
from torch import Tensor


def numbers_on(device: torch.device, value: float | Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """[K] in `dtype`, contiguous. A GPU is not waited for: one number from the host becomes the argument of a
    kernel, several go through pinned memory.

    Raises:
        RuntimeError: several numbers on the CPU while a CUDA graph is captured. Every replay would read them
            from memory that is long used for something else.
    """
    if not isinstance(value, Tensor):
        return torch.full((1,), value, dtype=dtype, device=device)
    value = value.detach().reshape(-1)
    if value.device.type != "cpu" or device.type == "cpu":
        return value.to(device, dtype).contiguous()
    if value.numel() == 1:
        return torch.full((1,), value.item(), dtype=dtype, device=device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"expected max_norm or scale on {device} while a CUDA graph is captured, "
            f"but got {value.numel()} numbers on the CPU"
        )
    return value.to(dtype).pin_memory().to(device, non_blocking=True)
