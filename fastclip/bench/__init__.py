# SPDX-License-Identifier: BSD-3-Clause
"""Timing of clip_grad_norm_ against torch's on this machine: `fastclip bench`.

The project's own benchmarks, in the folder benchmarks of its repository, are built on the same parts.
"""
