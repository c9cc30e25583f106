# SPDX-License-Identifier: BSD-3-Clause
"""The monitor with a loss scaler, and what reaches its logs."""

import json
import math

import pytest
import torch

import fastclip
from fastclip.monitor import MEANINGS, Monitor
from helpers.small_training import batches, loss_of, make


@pytest.mark.parametrize("scaler_class", [fastclip.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clips", [True, False])
def test_monitor_records_unscaled_norms_and_skipped_steps(scaler_class, fused, clips):
    """Norms are unscaled; a step that the scaler leaves out is a record that says so."""
    model, optimizer = make(fused=fused)
    scaler = scaler_class("cpu", init_scale=2.0**10)
    monitor = Monitor(model, optimizer, max_norm=0.5 if clips else None, scaler=scaler)
    for step, batch in enumerate(batches(6)):
        loss = loss_of(model, batch)
        monitor.loss(loss)
        scaler.scale(loss).backward()
        norms = [p.grad.norm().item() / scaler.get_scale() for p in model.parameters()]
        true, largest = math.hypot(*norms), max(norms)
        if step == 2:
            model[0].bias.grad[1] = math.inf
        scale, before = scaler.get_scale(), model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record = monitor.records[-1]
        assert record.step == step and record.loss_scale == scale and record.loss == loss.item()
        assert record.applied == (step != 2) == (not torch.equal(before, model[0].weight))
        if step == 2:
            assert record.inf_count == 1 and record.worst[0]["name"] == "0.bias"
            assert [e.severity for e in record.events] == ["info"]
        else:
            assert record.total_norm == pytest.approx(true, rel=1e-5)
            assert record.worst[0]["norm"] == pytest.approx(largest, rel=1e-5)
    assert (record.overflows, record.skipped_steps) == (1, 1) and scaler.get_scale() == 2.0**9
    if not clips:
        for p, q in zip(model.parameters(), scaled_by_torch(fused), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0)


def scaled_by_torch(fused):
    """The parameters after the same steps without a monitor."""
    model, optimizer = make(fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step, batch in enumerate(batches(6)):
        scaler.scale(loss_of(model, batch)).backward()
        if step == 2:
            model[0].bias.grad[1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model.parameters()


def test_record_has_the_scale_of_the_step_if_the_loss_comes_later():
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    monitor = Monitor(model, optimizer, max_norm=1.0, scaler=scaler)
    for batch in batches(3):
        loss = loss_of(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        monitor.loss(loss)
    assert [r.loss_scale for r in monitor.records] == [4.0, 8.0, 16.0]


def test_monitor_writes_to_a_tensorboard_writer(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = make()
    with SummaryWriter(str(tmp_path)) as writer:
        monitor = Monitor(model, optimizer, max_norm=1.0, sinks=[writer])
        for batch in batches(3):
            loss = loss_of(model, batch)
            monitor.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.close()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    norms = [(e.step, e.value) for e in events.Scalars("gradient/total_norm")]
    assert norms == [(r.step, pytest.approx(r.total_norm)) for r in monitor.records]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([r.loss for r in monitor.records])


def test_training_continues_when_a_sink_raises():
    class Broken:
        def log(self, data, step):
            raise OSError("no space left on device")

    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, sinks=[Broken()])
    with pytest.warns(UserWarning, match="Broken failed at step 0 with OSError: no space left"):
        for batch in batches(3):
            loss_of(model, batch).backward()
            optimizer.step()
        with pytest.warns(UserWarning, match="failed 2 more times"):
            monitor.close()
    assert len(monitor.records) == 3


def test_log_is_strict_json_with_the_meanings_of_its_fields(tmp_path):
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, log_dir=str(tmp_path))
    for inputs, labels in batches(3):
        inputs[0, 0] = math.nan
        loss = loss_of(model, (inputs, labels))
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    header, *lines = (tmp_path / "rank00000.jsonl").read_text().splitlines()
    assert json.loads(header)["fields"] == MEANINGS
    for line in lines:
        assert set(json.loads(line, parse_constant=pytest.fail)) <= set(MEANINGS)
    assert len(lines) == 3
