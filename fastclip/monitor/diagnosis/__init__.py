# SPDX-License-Identifier: BSD-3-Clause
"""Explain records: the causes of an event, the max_norm that fits a run, and a summary of where it stands."""
