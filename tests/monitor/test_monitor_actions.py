# SPDX-License-Identifier: BSD-3-Clause
"""What events make the monitor do."""

import logging
import math

import pytest
import torch

import fastclip
from fastclip.monitor import Event, Monitor, TrainingUnstable
from helpers.small_training import batches, loss_of, make, run


def test_actions_of_a_kind_replace_those_of_its_severity():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    seen: list[Event] = []
    actions = {"loss_spike": [seen.append, "lower_lr"], "error": "stop", "nonfinite": seen.append}
    monitor = Monitor(model, optimizer, max_norm=1.0, scheduler=scheduler, actions=actions)
    run(monitor, model, optimizer, 20, scale_at=(18,))
    assert [e.kind for e in seen] == ["loss_spike"] and not monitor.should_stop
    assert optimizer.param_groups[0]["lr"] == 0.005 and scheduler.base_lrs == [0.005]
    run(monitor, model, optimizer, 2, nan_at=(20,), start=20)
    assert [e.kind for e in seen] == ["loss_spike", "nonfinite"]  # its own action, not that of its severity
    assert monitor.should_stop  # for the bad batch


def test_action_raise_raises_once_in_the_next_call():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, actions={"nonfinite": "raise"})
    with pytest.raises(TrainingUnstable, match=r"step 3: error: nonfinite: the loss is nan") as caught:
        run(monitor, model, optimizer, 6, nan_at=(3,))
    assert caught.value.event is next(e for e in monitor.events if e.kind == "nonfinite")
    assert len(monitor.records) == 4
    run(monitor, model, optimizer, 2, start=4)  # raised once


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_action_skip_skips_the_update(fused, scaled):
    """Of a loss spike, and of a loss that is not finite though all gradients are; the next one is made."""
    model, optimizer = make(fused=fused)
    scaler = fastclip.GradScaler("cpu", init_scale=16.0) if scaled else None
    actions = {"loss_spike": "skip", "nonfinite": "skip"}
    monitor = Monitor(model, optimizer, max_norm=1.0, scaler=scaler, actions=actions)
    applied = []
    for step, batch in enumerate(batches(80)):
        before = model[0].weight.detach().clone()
        loss = loss_of(model, batch)
        monitor.loss({70: 1000 * loss, 75: loss + math.inf}.get(step, loss))
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        applied.append(not torch.equal(model[0].weight, before))
        assert monitor.records[-1].applied == applied[-1] and monitor.records[-1].held != applied[-1]
    assert [step for step, made in enumerate(applied) if not made] == [70, 75]
    assert monitor.handle.skipped_steps == 2
    assert scaler is None or (scaler.get_scale() == 16.0 and scaler.overflows == 0)


def test_events_are_logged(caplog):
    model, optimizer = make()
    with caplog.at_level(logging.INFO, "fastclip.monitor"):
        run(Monitor(model, optimizer, max_norm=1.0), model, optimizer, 4, nan_at=(2,))
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]
    assert "step 2: error: bad_batch: batch tensor 0 holds 1 NaN" in caplog.text
