# SPDX-License-Identifier: BSD-3-Clause
"""Runs that have been logged, by fastclip or by something else, as the monitor's records."""
