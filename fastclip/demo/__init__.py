# SPDX-License-Identifier: BSD-3-Clause
"""The demonstration: a small language model trained with torch's clipping and with fastclip's."""
