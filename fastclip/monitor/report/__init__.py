# SPDX-License-Identifier: BSD-3-Clause
"""A log as one page of HTML that needs nothing else."""
