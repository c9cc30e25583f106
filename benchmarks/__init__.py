# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks against torch.nn.utils.clip_grad_norm_: `python -m benchmarks`, or pytest case by case."""
