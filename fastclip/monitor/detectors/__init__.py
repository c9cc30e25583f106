# SPDX-License-Identifier: BSD-3-Clause
"""Detectors of the precursors of a failing training, each fed one record after the other."""

from __future__ import annotations

from .base import Detector
from .data import BadBatch, BatchShift
from .layers import Activations
from .losses import Failed, LossSpike, NonFinite
from .norms import ClippedBefore, ClipShare, NormDrift, NormGrowth, NormSpike
from .scaling import LossScale, UpdateRatio
from .system import MemoryGrowth, RankDiffers

__all__ = [
    "Activations",
    "BadBatch",
    "BatchShift",
    "ClipShare",
    "ClippedBefore",
    "Detector",
    "Failed",
    "LossScale",
    "LossSpike",
    "MemoryGrowth",
    "NonFinite",
    "NormDrift",
    "NormGrowth",
    "NormSpike",
    "RankDiffers",
    "UpdateRatio",
    "default_detectors",
]


def default_detectors(num_classes: int | None = None) -> list[Detector]:
    """Return one detector of each kind with its documented thresholds, those of the batch first."""
    return [
        BadBatch(num_classes),
        BatchShift(),
        RankDiffers(),
        LossScale(),
        UpdateRatio(),
        Activations(),
        NormGrowth(),
        NormSpike(),
        NormDrift(),
        ClipShare(),
        ClippedBefore(),
        LossSpike(),
        NonFinite(),
        MemoryGrowth(),
        Failed(),
    ]
