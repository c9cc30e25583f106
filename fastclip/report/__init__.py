# SPDX-License-Identifier: BSD-3-Clause
"""Report of a run: its log as one self-contained HTML page."""

from __future__ import annotations

from .write import report_html, write_report

__all__ = ["report_html", "write_report"]
