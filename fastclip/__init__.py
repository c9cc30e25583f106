# SPDX-License-Identifier: BSD-3-Clause
"""Fused gradient clipping and statistics for PyTorch, and a monitor that warns before a training fails.

One pass over all gradients gives their norm, the NaN and Inf counts of each, and the clipped gradients.
"""

from . import backends, policies
from .backends import native as _native
from .clip_grad import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from .grad_scaler import GradScaler
from .gradient_stats import GradStats, clip_, grad_stats
from .monitor import Monitor
from .optim import Handle, attach
from .patch import patch_torch
from .replay.replay import replay

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "GradStats",
    "Handle",
    "Monitor",
    "attach",
    "backends",
    "clip_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
    "grad_stats",
    "patch_torch",
    "policies",
    "replay",
]

_native.load()
