# SPDX-License-Identifier: BSD-3-Clause
"""What FastclipCallback records and logs of a training with Lightning, also of one that goes wrong."""

import csv
import itertools
import math

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

import fastclip
from fastclip.integrations.lightning import FastclipCallback
from fastclip.monitor import IncidentSaved, sinks
from fastclip.optim import handle_of
from helpers.lightning_runs import (
    BATCHES,
    EXPECTED_WARNINGS,
    SIZE,
    Module,
    Samples,
    adamw,
    column,
    fit,
    loader,
    mixed,
    poisoned,
    trainer,
)

pytestmark = EXPECTED_WARNINGS


class Measuring(Module):
    """Measures the gradients as Lightning shows them before the step."""

    def on_fit_start(self):
        self.norms, self.logged = [], []

    def log_dict(self, numbers, **options):
        self.logged.append(float(numbers["fastclip/total_norm"]))
        super().log_dict(numbers, **options)

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad.double().flatten() for p in self.parameters()]
        self.norms.append(torch.linalg.vector_norm(torch.cat(grads)).item())


def test_every_step_is_recorded_with_batch_loss_and_norm(tmp_path):
    module = Measuring()
    callback = FastclipCallback(0.5, str(tmp_path), sample_ids=lambda batch: batch["id"])
    monitor = fit(module, callback=callback)
    samples = Samples()
    assert column(monitor, "step") == list(range(BATCHES))
    assert column(monitor, "loss") == module.losses
    assert column(monitor, "total_norm") == pytest.approx(module.norms, rel=1e-6)
    assert column(monitor, "clip_coef") == pytest.approx([0.5 / (n + 1e-6) for n in module.norms], rel=1e-6)
    assert column(monitor, "lr") == [[0.01 * 0.5 ** (step // 3)] for step in range(BATCHES)]
    assert set(column(monitor, "applied")) == {True}
    for step, record in enumerate(monitor.records):
        inputs = samples.inputs[SIZE * step : SIZE * step + SIZE]
        assert record.sample_ids == list(range(100 + SIZE * step, 100 + SIZE * step + SIZE))
        assert record.batch["inputs"]["mean"] == pytest.approx(inputs.mean().item(), abs=1e-6)
        assert {gradient["name"] for gradient in record.worst} <= dict(module.named_parameters()).keys()
    [written] = sinks.read_log(str(tmp_path)).records.values()
    assert written == [record.to_dict() for record in monitor.records]


@pytest.mark.parametrize("accumulated", [2, 3, 4])
def test_accumulated_batches_are_one_step_with_their_mean_loss(accumulated):
    module = Measuring()
    monitor = fit(module, accumulate_grad_batches=accumulated)
    parts = [module.losses[i : i + accumulated] for i in range(0, BATCHES, accumulated)]
    assert column(monitor, "micro_batches") == [len(part) for part in parts]
    assert column(monitor, "loss") == pytest.approx([sum(part) / len(part) for part in parts], rel=1e-6)
    assert column(monitor, "total_norm") == pytest.approx(module.norms, rel=1e-6)
    assert module.logged == pytest.approx(module.norms, rel=1e-6)  # once a step


def test_numbers_are_logged_for_each_step(tmp_path):
    module, logger = Module(), CSVLogger(tmp_path)
    monitor = fit(module, logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == column(monitor, "step")
    for name in ("total_norm", "clip_coef", "skipped_steps"):
        logged = [float(row[f"fastclip/{name}"]) for row in rows]
        assert logged == pytest.approx(column(monitor, name), rel=1e-6)


def test_barebones_trainer_is_recorded_and_logs_nothing(recwarn):
    made = trainer(callback := FastclipCallback(max_norm=0.5), barebones=True, logger=None)
    made.fit(Module(), loader())
    assert len(callback.monitor.records) == BATCHES
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]


def test_validation_sanity_check_and_test_are_not_steps():
    module, callback = Module(), FastclipCallback(max_norm=0.5, activations="leaf", activations_every=1)
    made = trainer(callback, val_check_interval=3, num_sanity_val_steps=2)
    other = Samples()
    other.inputs.fill_(1e6)
    made.fit(module, loader(), loader(other))
    made.validate(module, loader(other), verbose=False)
    made.test(module, loader(other), verbose=False)
    assert column(callback.monitor, "step") == list(range(BATCHES))
    assert column(callback.monitor, "loss") == module.losses
    assert max(record.activations["net.0"]["max"] for record in callback.monitor.records) < 100


def test_batches_without_a_step_are_not_recorded():
    class Skipping(Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 and self.current_epoch == 0 else None

        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    callback = FastclipCallback(max_norm=0.5, sample_ids=lambda batch: batch["id"])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # with one there is no step without a loss
    monitor = fit(Skipping(), callback=callback, max_epochs=2, **mixed(scaler))
    firsts = [record.sample_ids[0] for record in monitor.records]
    assert firsts == [100, 108, 100, *range(108, 140, 4)]
    assert {len(record.sample_ids) for record in monitor.records} == {SIZE}


def test_module_that_steps_on_every_second_batch():
    class EverySecond(Module):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    module = EverySecond()
    monitor = fit(module)
    assert column(monitor, "loss") == module.losses[1::2]


def test_manual_optimization_with_one_optimizer():
    class Manual(Measuring):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.losses.append((loss := self.loss_of(batch)).item())
            self.manual_backward(loss)
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            return adamw(self.parameters(), self.fused)

    for fused, options in itertools.product([False, True], [{}, "scaled"]):
        module = Manual(fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        monitor = fit(module, **(mixed(scaler) if options else {}))
        halves = zip(module.losses[::2], module.losses[1::2], strict=True)
        assert column(monitor, "loss") == pytest.approx([(a + b) / 2 for a, b in halves], rel=1e-6)
        assert column(monitor, "micro_batches") == [2] * (BATCHES // 2)
        if not options:
            assert column(monitor, "total_norm") == pytest.approx(module.norms, rel=1e-6)


def test_losses_that_are_not_real_scalars_are_ignored():
    class Odd(Module):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss_of(batch)
            loss = torch.complex(loss, loss) if batch_idx % 2 else torch.stack([loss, loss])
            self.manual_backward(loss, gradient=torch.ones_like(loss))
            optimizer.step()

    monitor = fit(Odd())
    assert column(monitor, "loss") == [None] * BATCHES == column(monitor, "error")
    assert all(norm > 0 for norm in column(monitor, "total_norm"))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")  # that it is experimental
def test_batches_of_dataloader_iter_are_not_recorded():
    class Iterating(Module):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    module = Iterating()
    monitor = fit(module, max_steps=5)
    assert column(monitor, "loss") == module.losses and len(module.losses) == 5
    assert column(monitor, "batch") == [{}] * 5


@pytest.mark.parametrize("fused", [False, True])
def test_batch_with_nan_is_skipped_counted_and_named(fused):
    module = Module(fused)
    callback = FastclipCallback(max_norm=0.5, sample_ids=lambda batch: batch["id"])
    monitor = fit(module, samples=poisoned(), callback=callback)
    assert all(p.isfinite().all() for p in module.parameters())
    assert [record.step for record in monitor.records if not record.applied] == [6]
    assert monitor.handle.skipped_steps == 1 and monitor.records[6].nan_count > 0
    assert {"bad_batch", "nonfinite"} <= {event.kind for event in monitor.events if event.step == 6}
    assert "124, 125, 126, 127" in str(monitor.diagnose())
    assert all(math.isfinite(loss) for loss in module.losses[7:])


def test_nonfinite_step_is_saved_as_an_incident(tmp_path):
    with pytest.warns(IncidentSaved, match="saved step 6"):
        fit(Module(), samples=poisoned(), callback=FastclipCallback(max_norm=0.5, incidents=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["00000006-nonfinite"]


def test_action_stop_stops_the_trainer():
    callback = FastclipCallback(max_norm=0.5, actions={"nonfinite": "stop"})
    made = trainer(callback, max_epochs=3)
    made.fit(Module(), loader(poisoned()))
    assert made.global_step == 7 == len(callback.monitor.records)


def test_action_lower_lr_reaches_the_scheduler():
    class Scheduled(Module):
        def configure_optimizers(self):
            optimizer = adamw(self.parameters(), False)
            constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # of its own base rate
            return [optimizer], [{"scheduler": constant, "interval": "step"}]

    callback = FastclipCallback(max_norm=0.5, actions={"nonfinite": "lower_lr"})
    monitor = fit(Scheduled(), samples=poisoned(), callback=callback)
    assert column(monitor, "lr") == [[0.01]] * 7 + [[0.005]] * 3


class Failing(Module):
    def __init__(self, error, where="training"):
        super().__init__()
        self.error, self.where = error, where

    def training_step(self, batch, batch_idx):
        if batch_idx == 4 and self.where == "training":
            raise self.error
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.where == "validation":
            raise self.error


class Abort(BaseException):
    """As KeyboardInterrupt, for which Lightning would exit the process."""


@pytest.mark.parametrize("error, recorded", [(ValueError("no such label"), True), (Abort(), False)])
def test_exception_is_recorded_and_all_changes_undone(error, recorded, tmp_path):
    callback = FastclipCallback(0.5, str(tmp_path), sample_ids=lambda batch: batch["id"])
    made, module = trainer(callback), Failing(error)
    with pytest.raises(type(error)) as caught:
        made.fit(module, loader())
    assert caught.value is error
    records = callback.monitor.records
    assert len(records) == 4 + recorded
    if recorded:
        assert records[4].error == "ValueError: no such label" and records[4].sample_ids[0] == 116
        assert records[4].events[0].kind == "exception"
    [written] = sinks.read_log(str(tmp_path)).records.values()
    assert len(written) == len(records)
    assert handle_of(made.optimizers[0]) is None
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())


def test_exception_in_validation_is_not_a_step():
    callback = FastclipCallback(max_norm=0.5)
    made = trainer(callback, num_sanity_val_steps=0, val_check_interval=3)
    with pytest.raises(ValueError, match="in validation"):
        made.fit(Failing(ValueError("in validation"), "validation"), loader(), loader())
    assert len(callback.monitor.records) == 3
    assert handle_of(made.optimizers[0]) is None


def test_action_raise_ends_the_training():
    callback = FastclipCallback(max_norm=0.5, actions={"nonfinite": "raise"})
    with pytest.raises(fastclip.monitor.TrainingUnstable, match="nonfinite"):
        trainer(callback).fit(Module(), loader(poisoned()))
    assert len(callback.monitor.records) in (7, 8)


def test_detect_anomaly_and_early_stopping_work_beside_the_callback():
    callback = FastclipCallback(max_norm=0.5)
    with pytest.raises(RuntimeError, match="returned nan values"):
        trainer(callback, detect_anomaly=True).fit(Module(), loader(poisoned()))
    assert "returned nan values" in callback.monitor.records[6].error
    stopping = EarlyStopping("fastclip/total_norm", check_finite=True, check_on_train_epoch_end=True)
    made = trainer(FastclipCallback(max_norm=0.5), stopping, max_epochs=5)
    made.fit(Module(), loader(poisoned(batch=BATCHES - 1)))
    assert made.global_step == BATCHES
