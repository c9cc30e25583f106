# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that reach the host late, as from a GPU."""

import pytest
import torch

from fastclip.monitor import Monitor
from fastclip.monitor.async_copy import AsyncCopy
from helpers.small_training import batches, loss_of, make


class PendingCopy:
    """Stands for a copy from a device, which a test completes by hand."""

    def __init__(self, tensors):
        self.tensors, self.complete, self.waited = tensors, False, False
        self.event = self

    def query(self):
        return self.complete

    def synchronize(self):
        self.complete = self.waited = True

    def values(self):
        assert self.complete, "read before it is complete"
        return {key: tensor.tolist() for key, tensor in self.tensors.items()}


@pytest.fixture
def copies(monkeypatch):
    made: list[PendingCopy] = []

    def make_copy(tensors):
        made.append(PendingCopy(tensors))
        return made[-1]

    monkeypatch.setattr("fastclip.monitor.async_copy._PendingCopy", make_copy)
    monkeypatch.setattr("fastclip.monitor.async_copy._is_on_gpu", lambda tensor: True)
    return made


def test_async_copy_keeps_the_order_and_does_not_wait(copies):
    copy = AsyncCopy()
    for label in range(3):
        copy.start(label, {"x": torch.tensor(float(label)), "y": 7})
    copies[1].complete = True
    assert list(copy.finished()) == [] and not any(c.waited for c in copies)  # the first is not complete
    copies[0].complete = True
    assert list(copy.finished()) == [(0, {"x": 0.0, "y": 7}), (1, {"x": 1.0, "y": 7})]
    assert list(copy.finished(wait=True)) == [(2, {"x": 2.0, "y": 7})] and copies[2].waited


def test_async_copy_on_demand_gives_out_only_what_is_waited_for(copies):
    copy = AsyncCopy(on_demand=True)
    copy.start(0, {"x": torch.tensor(1.0)})
    copies[0].complete = True
    assert list(copy.finished()) == []
    assert list(copy.finished(wait=True)) == [(0, {"x": 1.0})]


def test_async_copy_waits_when_the_host_is_far_ahead(copies):
    copy = AsyncCopy()
    for label in range(66):
        copy.start(label, {"x": torch.tensor(float(label))})
    assert [label for label, _ in copy.finished()] == [0, 1]


def test_async_copy_salvages_what_was_copied_before_the_device_failed(copies, monkeypatch):
    copy = AsyncCopy()
    for label in range(3):
        copy.start(label, {"x": torch.tensor(float(label))})
        copies[label].complete = True

    def fail():
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(copies[1], "synchronize", fail)
    assert [label for label, _ in copy.salvaged()] == [0, 1, 2] and list(copy.finished(wait=True)) == []


def test_records_come_one_step_late_from_a_gpu(copies):
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    for step, batch in enumerate(batches(4)):
        loss = loss_of(model, batch)
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(monitor.records) == step
        copies[step].complete = True
    monitor.close()
    assert [r.step for r in monitor.records] == [0, 1, 2, 3]
