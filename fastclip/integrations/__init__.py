# SPDX-License-Identifier: BSD-3-Clause
"""Callbacks and patches for Transformers, Accelerate and Lightning, each imported on first use."""
