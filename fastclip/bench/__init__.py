# SPDX-License-Identifier: BSD-3-Clause
"""Timing of torch's clipping and fastclip's in turns."""
