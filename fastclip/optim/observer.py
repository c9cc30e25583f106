# SPDX-License-Identifier: BSD-3-Clause
"""The protocol of objects that follow an optimizer's steps."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .step_plan import StepPlan


class Observer(Protocol):
    """The protocol for objects that follow each step of an attached optimizer, including skipped ones."""

    def before_update(self, plan: StepPlan | None) -> Tensor | None:
        """Receive what the gradients' pass found, or None without gradients.

        Returns:
            A flag, []: other than 0 skips the step. None leaves the decision as it is.
        """

    def after_step(self) -> None:
        """Receive the end of the step."""
