# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for the tests of attached optimizers."""

import pytest

from fastclip.optim import step_plan


@pytest.fixture(params=[True, False], ids=["host", "device"])
def host_knows(request, monkeypatch) -> bool:
    """With False the flag and the coefficient stay where they are, as on a GPU, and the kernel decides."""
    if not request.param:
        monkeypatch.setattr(step_plan, "is_on_host", lambda number: False)
    return request.param
