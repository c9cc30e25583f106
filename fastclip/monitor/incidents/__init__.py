# SPDX-License-Identifier: BSD-3-Clause
"""Incidents: steps that go wrong, captured in a training, stored atomically, read without running code."""
