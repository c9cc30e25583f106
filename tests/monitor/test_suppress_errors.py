# SPDX-License-Identifier: BSD-3-Clause
"""Defects of the monitor, which must not end a training."""

import warnings

import pytest

from fastclip.monitor import suppress_errors as module
from fastclip.monitor.suppress_errors import suppress_errors


@pytest.fixture(autouse=True)
def _not_yet_warned(monkeypatch):
    monkeypatch.setattr(module, "_warned", set())


def fail(task, error):
    with suppress_errors(task):
        raise error


def test_suppress_errors_warns_once_for_each_task():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for task in ("measure a batch", "measure a batch", "keep a loss"):
            fail(task, ValueError("empty"))
    messages = [str(warning.message) for warning in shown]
    assert [message.partition(" (in fail, line ")[0] for message in messages] == [
        "fastclip.Monitor: failed to measure a batch: ValueError: empty",
        "fastclip.Monitor: failed to keep a loss: ValueError: empty",
    ]
    assert all(__file__ in message for message in messages)
    assert {warning.filename for warning in shown} == {__file__}


def test_suppress_errors_raises_what_is_not_an_exception():
    with pytest.raises(KeyboardInterrupt):
        fail("measure a batch", KeyboardInterrupt())
    with pytest.raises(SystemExit):
        fail("measure a batch", SystemExit())
