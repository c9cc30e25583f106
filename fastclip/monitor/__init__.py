# SPDX-License-Identifier: BSD-3-Clause
"""Watching a training: records of every step, precursors of its failure, and where to look first."""

from __future__ import annotations

from . import detectors, sinks
from .actions import TrainingUnstable
from .detectors import Detector, default_detectors
from .diagnosis.diagnose import Diagnosis, diagnose
from .diagnosis.recommend import Recommendation, recommend
from .incidents.capture import IncidentSaved
from .incidents.options import Incidents
from .monitor import Monitor
from .record import MEANINGS, Event, Record

__all__ = [
    "MEANINGS",
    "Detector",
    "Diagnosis",
    "Event",
    "IncidentSaved",
    "Incidents",
    "Monitor",
    "Recommendation",
    "Record",
    "TrainingUnstable",
    "default_detectors",
    "detectors",
    "diagnose",
    "recommend",
    "sinks",
]
