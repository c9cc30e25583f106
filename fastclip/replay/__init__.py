# SPDX-License-Identifier: BSD-3-Clause
"""Run the step of a saved incident again and find out what made it fail."""

from .build import ReplayError
from .replay import replay
from .result import ReplayResult

__all__ = ["ReplayError", "ReplayResult", "replay"]
