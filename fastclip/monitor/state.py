# SPDX-License-Identifier: BSD-3-Clause
"""The state that a resumed run needs to give the same events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..optim import Handle
from ..policies import Policy
from .actions import ActionRunner
from .detectors import Detector
from .measure.weights import WeightStatistics
from .record_builder import RecordBuilder
from .skip_latch import SkipLatch


class MonitorState:
    """Everything in a monitor that has a state from step to step."""

    def __init__(
        self,
        handle: Handle,
        builder: RecordBuilder,
        actions: ActionRunner,
        weights: WeightStatistics,
        latch: SkipLatch | None,
        detectors: Sequence[Detector],
    ) -> None:
        self._handle, self._builder, self._actions = handle, builder, actions
        self._weights, self._latch, self._detectors = weights, latch, detectors

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what loads with ``weights_only=True``; `step` is the number of the next step."""
        return {"step": step, "parts": {name: p.state_dict() for name, p in self._by_name().items()}}

    def load_state_dict(self, state: Any) -> int:
        """Continue where another monitor was; return the number of the next step.

        Raises:
            ValueError: it had other detectors, another policy or other actions "skip".
        """
        if not isinstance(state, dict) or not {"step", "parts"} <= set(state):
            raise ValueError(f"expected the state_dict of a monitor, but got {type(state).__name__}")
        saved, own = dict(state["parts"]), self._by_name()
        if "gate" in saved:  # the name in version 0.1
            saved["skip_latch"] = saved.pop("gate")
        missing, unexpected = sorted(set(own) - set(saved)), sorted(set(saved) - set(own))
        if missing or unexpected:
            raise ValueError(
                "expected the state_dict of a monitor with the same max_norm, actions and detectors, but it "
                f"has missing {missing}, unexpected {unexpected}"
            )
        for name, part in own.items():
            part.load_state_dict(saved[name])
        return state["step"]

    def _by_name(self) -> dict[str, Any]:
        policy = self._handle.max_norm
        found = {
            "records": self._builder,
            "requests": self._actions,
            "weights": self._weights,
            "skip_latch": self._latch,
            "policy": policy if isinstance(policy, Policy) else None,
        }
        found |= {f"detector {detector.kind}": detector for detector in self._detectors}
        return {name: part for name, part in found.items() if part is not None}
