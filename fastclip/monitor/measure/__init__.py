# SPDX-License-Identifier: BSD-3-Clause
"""The numbers that are taken of one step: its gradients, weights, activations and batches."""
