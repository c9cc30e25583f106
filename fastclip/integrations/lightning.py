# SPDX-License-Identifier: BSD-3-Clause
"""The callback for the Trainer of `lightning`. That of `pytorch_lightning` is in the module of that name."""

from __future__ import annotations

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":
        raise
    raise ImportError(
        'fastclip.integrations.lightning needs Lightning: pip install "torch-fastclip[lightning]"'
    ) from error

from .lightning_callback import TrainerHooks

__all__ = ["FastclipCallback"]


class FastclipCallback(TrainerHooks, Callback):
    __doc__ = TrainerHooks.__doc__
    _package = "lightning.pytorch"
    _module_class = LightningModule
