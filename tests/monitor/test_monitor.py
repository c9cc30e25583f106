# SPDX-License-Identifier: BSD-3-Clause
"""What the monitor records, held against the same numbers computed by hand."""

import math

import pytest
import torch

import fastclip
from fastclip.monitor import MEANINGS, Monitor
from fastclip.monitor.sinks import read_log
from helpers.small_training import batches, loss_of, make


def test_record_holds_every_number_of_a_step():
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    monitor = Monitor(
        model, optimizer, max_norm=0.3, weights_every=1, activations="leaf", activations_every=1
    )
    for step, batch in enumerate(batches(4)):
        monitor.batch(*batch, sample_ids=torch.arange(8) + 8 * step)
        loss = loss_of(model, batch)
        monitor.loss(loss, double=2 * loss)
        loss.backward()
        norms = [p.grad.norm().item() for p in model.parameters()]
        total = math.hypot(*norms)
        before = [p.detach().clone() for p in model.parameters()]
        lr, output = scheduler.get_last_lr(), model[0](batch[0]).detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        record = monitor.records[-1]
        assert record.step == step and record.rank == 0 and record.micro_batches == 1
        assert record.loss == loss.item() and record.losses == {"double": 2 * loss.item()}
        assert record.lr == lr and record.max_norm == 0.3 and record.applied is True
        assert record.total_norm == pytest.approx(total, rel=1e-5)
        assert record.clip_coef == pytest.approx(min(1.0, 0.3 / (total + 1e-6)), rel=1e-5)
        assert record.clipped == (total > 0.3)
        by_name = dict(zip(dict(model.named_parameters()), norms, strict=True))
        largest = sorted(by_name, key=by_name.__getitem__, reverse=True)[:3]
        assert [t["name"] for t in record.worst] == largest
        assert [t["norm"] for t in record.worst] == pytest.approx([by_name[n] for n in largest], rel=1e-5)
        assert record.param_norm == pytest.approx(math.hypot(*[p.norm() for p in before]), rel=1e-5)
        for (name, p), old in zip(model.named_parameters(), before, strict=True):
            if p.dim() > 1:
                assert record.update_ratio[name] == pytest.approx(
                    ((p - old).norm() / old.norm()).item(), rel=1e-4
                )
        rms = output.square().mean().sqrt().item()
        assert record.activations["0"]["rms"] == pytest.approx(rms, rel=1e-5)
        assert record.activations["0"]["max"] == pytest.approx(output.abs().max().item(), rel=1e-5)
        assert record.activations["0"]["mean"] == pytest.approx(output.mean().item(), rel=1e-4, abs=1e-6)
        assert set(record.activations) == {"0", "1", "2"} and record.activations["1"]["mean"] > 0
        inputs, labels = record.batch["0"], record.batch["1"]
        assert inputs["shape"] == [8, 6] and inputs["dtype"] == "float32" and labels["dtype"] == "int64"
        assert inputs["mean"] == pytest.approx(batch[0].mean().item(), rel=1e-5, abs=1e-7)
        assert inputs["std"] == pytest.approx(batch[0].std(correction=0).item(), rel=1e-5)
        assert (inputs["min"], inputs["max"]) == (batch[0].min().item(), batch[0].max().item())
        assert labels["histogram"] == torch.bincount(batch[1]).tolist()
        assert record.sample_ids == list(range(8 * step, 8 * step + 8))
        assert record.memory.keys() >= {"resident"} or step
    assert record.samples_per_second == pytest.approx(8 / record.step_time)
    assert set(monitor.records[0].to_dict()) <= set(MEANINGS)
    assert len(monitor.records[0].tensor_norms) == 4 and not monitor.records[1].tensor_norms
    assert monitor.records[0].tensor_names == ["0.weight", "0.bias", "2.weight", "2.bias"]


def plain_run(model, optimizer, max_norm, nan_at=()):
    """The same training by torch alone; steps with NaN are skipped."""
    losses = []
    for step, batch in enumerate(batches(12)):
        inputs = batch[0].clone()
        if step in nan_at:
            inputs[2, 1] = math.nan
        loss = loss_of(model, (inputs, batch[1]))
        loss.backward()
        if step not in nan_at:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [True, False])
def test_monitor_trains_as_torch_and_skips_steps_with_nan(fused):
    """With NaN skipped, and the counts and names of it in the record."""
    gold = plain_run(*make(fused=fused), 0.2, nan_at=(3, 4))
    model, optimizer = make(fused=fused)
    monitor = Monitor(model, optimizer, max_norm=0.2)
    for step, (inputs, labels) in enumerate(batches(12)):
        if step in (3, 4):
            inputs[2, 1] = math.nan
        monitor.batch(inputs, labels)
        loss = loss_of(model, (inputs, labels))
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for record, expected in zip(monitor.records, gold, strict=True):
        assert record.loss == pytest.approx(expected, rel=1e-5, nan_ok=True)
        assert record.applied == (record.step not in (3, 4))
        assert record.skipped_steps == min(2, max(0, record.step - 2)) and record.overflows == 0
    bad = monitor.records[3]
    assert bad.nan_count == sum(p.numel() for p in model.parameters()) and math.isnan(bad.total_norm)
    assert all(t["nan_count"] for t in bad.worst) and bad.batch["0"]["nan"] == 1
    assert [e.kind for e in bad.events] == ["bad_batch", "nonfinite"]


def test_monitor_without_max_norm_changes_nothing():
    """Neither gradients nor steps, NaN included, though nothing clips."""
    for nan_at in (None, 5):
        parameters = []
        for observed in (False, True):
            model, optimizer = make()
            monitor = Monitor(model, optimizer) if observed else None
            for step, batch in enumerate(batches(8)):
                loss = loss_of(model, batch)
                loss.backward()
                if step == nan_at:
                    model[0].weight.grad[0, 0] = math.nan
                if monitor:
                    monitor.loss(loss)
                kept = [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                for p, g in zip(model.parameters(), kept, strict=True):
                    torch.testing.assert_close(p.grad, g, rtol=0, atol=0, equal_nan=True)
                optimizer.zero_grad()
            parameters.append([p.detach().clone() for p in model.parameters()])
            if monitor:
                assert monitor.records[-1].max_norm is None and monitor.records[-1].clip_coef is None
                assert monitor.records[1].total_norm > 0
        for plain, watched in zip(*parameters, strict=True):
            torch.testing.assert_close(plain, watched, rtol=0, atol=0, equal_nan=True)
        assert parameters[0][0].isnan().any() == (nan_at is not None)


def test_record_of_accumulated_batches_is_one_step():
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    losses = []
    for number, batch in enumerate(batches(6), start=1):
        monitor.batch(*batch, sample_ids=[number])
        loss = loss_of(model, batch)
        monitor.loss(loss)
        losses.append(loss.item())
        (loss / 3).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert [r.micro_batches for r in monitor.records] == [3, 3]
    assert [r.loss for r in monitor.records] == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])
    assert [r.sample_ids for r in monitor.records] == [[1, 2, 3], [4, 5, 6]]
    assert sum(monitor.records[0].batch["1"]["histogram"]) == 24


@pytest.mark.parametrize("order", ["before", "after", "never", "as_context"])
def test_record_has_its_loss_wherever_it_is_given(order):
    """Each loss belongs to its step, wherever it is given; without any there are records all the same."""
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0)
    losses = []
    for batch in batches(5):
        if order == "as_context":
            with monitor.batch(*batch):
                loss = loss_of(model, batch)
                monitor.loss(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            continue
        if order != "never":
            monitor.batch(*batch)
        loss = loss_of(model, batch)
        losses.append(loss.item())
        if order == "before":
            monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if order == "after":
            monitor.loss(loss.item())
    monitor.close()
    assert [r.step for r in monitor.records] == [0, 1, 2, 3, 4]
    assert [r.loss for r in monitor.records] == ([None] * 5 if order == "never" else losses)
    assert all(r.total_norm > 0 for r in monitor.records)


def test_monitor_uses_the_handle_of_an_attached_optimizer():
    model, optimizer = make()
    handle = fastclip.attach(optimizer, 0.7)
    monitor = Monitor(model, optimizer)
    assert monitor.handle is handle
    with pytest.raises(RuntimeError, match=r"already attached, with max_norm 0\.7.*clear who clips"):
        Monitor(model, optimizer, max_norm=1.0)
    with pytest.raises(ValueError, match="scaler to be the one that the optimizer was attached with"):
        Monitor(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    for batch in batches(2):
        loss_of(model, batch).backward()
        optimizer.step()
    monitor.close()
    assert [r.max_norm for r in monitor.records] == [0.7, 0.7]
    assert fastclip.optim.handle_of(optimizer) is handle  # who attached it detaches it
    own = Monitor(*make())
    own.close()
    own.close()
    assert fastclip.optim.handle_of(own.handle.optimizer) is None


def test_monitor_records_an_exception_and_raises_it(tmp_path):
    model, optimizer = make()
    monitor = Monitor(model, optimizer, max_norm=1.0, log_dir=str(tmp_path))
    inputs, labels = next(batches(1))
    labels[3] = 7
    with (
        pytest.raises(IndexError, match="out of bounds"),
        monitor.batch(inputs, labels, sample_ids=list("abcdefgh")),
    ):
        monitor.loss(loss_of(model, (inputs, labels)))
    (record,) = read_log(tmp_path).records[0]
    assert "IndexError: Target 7 is out of bounds" in record["error"] and record["batch"]["1"]["max"] == 7
    diagnosis = monitor.diagnose()
    assert diagnosis.cause == "labels" and diagnosis.findings[0].sample_ids == list("abcdefgh")


def test_record_names_gradients_with_nan_first_with_nonfinite_zero():
    model, optimizer = make()
    fastclip.attach(optimizer, 1.0, nonfinite="zero")
    monitor = Monitor(model, optimizer)
    loss_of(model, next(batches(1))).backward()
    model[0].bias.grad[2] = math.nan
    optimizer.step()
    monitor.close()
    (record,) = monitor.records
    assert record.worst[0]["name"] == "0.bias" and record.worst[0]["nan_count"] == record.nan_count == 1
    assert record.applied and math.isfinite(record.total_norm)
