# SPDX-License-Identifier: BSD-3-Clause
"""The callback for the Trainer of `pytorch_lightning`. That of `lightning` is in the module of that name."""

from __future__ import annotations

try:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.callbacks import Callback
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "pytorch_lightning":
        raise
    raise ImportError(
        "fastclip.integrations.pytorch_lightning needs it: pip install pytorch-lightning"
    ) from error

from .lightning_callback import TrainerHooks

__all__ = ["FastclipCallback"]


class FastclipCallback(TrainerHooks, Callback):
    __doc__ = TrainerHooks.__doc__
    _package = "pytorch_lightning"
    _module_class = LightningModule
