# SPDX-License-Identifier: BSD-3-Clause
"""The callback for the Trainer of `lightning`; fastclip.integrations.pytorch_lightning has the other one."""

from .lightning_callback import callback_class

__all__ = ["FastclipCallback"]

FastclipCallback = callback_class("lightning.pytorch", __name__, '"torch-fastclip[lightning]"')
