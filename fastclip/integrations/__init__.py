# SPDX-License-Identifier: BSD-3-Clause
"""Trainers of other libraries: Transformers, Accelerate and Lightning, each imported when it is asked for."""
