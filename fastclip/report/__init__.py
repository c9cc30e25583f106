# SPDX-License-Identifier: BSD-3-Clause
"""A log as one page of HTML that needs nothing else."""

from __future__ import annotations

from .write import report_html, write_report

__all__ = ["report_html", "write_report"]
