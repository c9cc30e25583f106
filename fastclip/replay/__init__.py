# SPDX-License-Identifier: BSD-3-Clause
"""Replay of the step of a saved incident, and the search for what made it fail."""

from .build import ReplayError
from .replay import replay
from .result import ReplayResult

__all__ = ["ReplayError", "ReplayResult", "replay"]
