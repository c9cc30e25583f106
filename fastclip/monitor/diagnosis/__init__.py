# SPDX-License-Identifier: BSD-3-Clause
"""Explanations of records: the causes of an event, a max_norm that fits a run, and an overview of the run."""
