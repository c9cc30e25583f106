# SPDX-License-Identifier: BSD-3-Clause
"""`fastclip bench`: timing of clip_grad_norm_ against torch's on this machine.

The project's own benchmarks, in the repository's folder benchmarks, use the same modules.
"""
