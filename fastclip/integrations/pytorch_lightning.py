# SPDX-License-Identifier: BSD-3-Clause
"""The callback for the Trainer of `pytorch_lightning`; fastclip.integrations.lightning has the other one."""

from .lightning_callback import callback_class

__all__ = ["FastclipCallback"]

FastclipCallback = callback_class("pytorch_lightning", __name__, "pytorch-lightning")
