# SPDX-License-Identifier: BSD-3-Clause
"""The transfer of small tensors, such as max_norm and factors, to the device of the gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def scalars_on(device: torch.device, value: float | Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a value as a contiguous tensor [K] of `dtype` on `device`, without synchronizing with a GPU.

    One number from the host becomes the argument of a kernel; several are copied from pinned memory.

    Raises:
        RuntimeError: `value` holds several numbers on the CPU while a CUDA graph is captured. Every replay
            would read them from memory that may have been reused since.
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
