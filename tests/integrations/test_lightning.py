# SPDX-License-Identifier: BSD-3-Clause
"""FastclipCallback in Lightning's Trainer: the same training, every step recorded, and what is refused."""

import csv
import importlib
import itertools
import math
import pickle
import sys

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import fastclip
from fastclip.integrations.lightning import FastclipCallback
from fastclip.monitor import IncidentSaved, sinks
from fastclip.optim import handle_of
from helpers import rank_jobs_lightning as jobs
from helpers.ranks import Ranks

# What Lightning thinks of trainings as small as these, and of what it uses itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval"),
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated"),  # in Lightning
    pytest.mark.filterwarnings("ignore:.*defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),  # after a step left out
    pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:Error detected in .*Backward"),  # detect_anomaly
]

BATCHES, SIZE = 10, 4
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
# Lightning's clipping takes torch's norm, in float32; the rounding of the last bit grows over ten steps.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Samples(Dataset):
    def __init__(self, batches=BATCHES):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(batches * SIZE, 8, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"inputs": self.inputs[index], "targets": self.targets[index], "id": 100 + index}


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def adamw(parameters, fused):
    return torch.optim.AdamW(parameters, lr=0.01, fused=fused)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


class Steps:
    """What the modules of both packages do."""

    def __init__(self, fused=False):
        super().__init__()
        self.net, self.fused, self.losses = network(), fused, []

    def loss_of(self, batch):
        return mse_loss(self.net(batch["inputs"]), batch["targets"])

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss_of(batch))

    def configure_optimizers(self):
        optimizer = adamw(self.parameters(), self.fused)
        return [optimizer], [{"scheduler": halving(optimizer), "interval": "step"}]


class Module(Steps, LightningModule):
    pass


def trainer(*callbacks, kind=Trainer, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return kind(
        callbacks=list(callbacks),
        **{"accelerator": "cpu", "max_epochs": 1, "logger": False, **quiet, **options},
    )


def loader(samples=None):
    return DataLoader(Samples() if samples is None else samples, batch_size=SIZE)


def fit(module, *, samples=None, callback=None, ckpt_path=None, validation=None, **options):
    callback = FastclipCallback(max_norm=0.5) if callback is None else callback
    made = trainer(callback, *options.pop("callbacks", []), **options)
    made.fit(module, loader(samples), validation, ckpt_path=ckpt_path)
    return callback.monitor


def column(monitor, name):
    return [getattr(record, name) for record in monitor.records]


def parameters(module):
    return [p.detach().clone() for p in module.parameters()]


# The same training.


def by_hand(clip, *, fused=False, scaler=None):
    """The losses of a loop in plain PyTorch, and the module."""
    net, losses = network(), []
    optimizer = adamw(net.parameters(), fused)
    scheduler = halving(optimizer)
    for batch in loader():
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            loss = mse_loss(net(batch["inputs"]), batch["targets"])
        losses.append(loss.item())
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            clip(net.parameters(), 0.5)
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    return losses, net


@pytest.mark.parametrize("package", PACKAGES)
def test_the_losses_are_those_of_a_loop_that_clips_with_fastclip_to_the_last_bit(package):
    lightning = importlib.import_module(PACKAGES[package])
    callback = importlib.import_module(f"fastclip.integrations.{package}").FastclipCallback(max_norm=0.5)
    module = type("Module", (Steps, lightning.LightningModule), {})()
    assert isinstance(callback, lightning.Callback)
    trainer(callback, kind=lightning.Trainer).fit(module, loader())
    losses, net = by_hand(fastclip.clip_grad_norm_)
    assert module.losses == losses == column(callback.monitor, "loss")
    assert all(map(torch.equal, module.net.parameters(), net.parameters()))
    assert all(record.clipped for record in callback.monitor.records)


@pytest.mark.parametrize("fused", [False, True])
def test_the_losses_are_those_of_lightnings_own_clipping(fused):
    own, module = Module(fused), Module(fused)
    trainer(gradient_clip_val=0.5).fit(own, loader())
    fit(module)
    torch.testing.assert_close(module.losses, own.losses, **CLOSE)
    torch.testing.assert_close(parameters(module), parameters(own), **CLOSE)


def test_without_max_norm_nothing_is_changed():
    own, module = Module(), Module()
    trainer().fit(own, loader())
    callback = FastclipCallback()
    (made := trainer(callback)).fit(module, loader())
    monitor = callback.monitor
    assert "fastclip/clip_coef" not in made.callback_metrics
    assert made.callback_metrics["fastclip/total_norm"] == monitor.records[-1].total_norm
    assert module.losses == own.losses
    assert all(map(torch.equal, parameters(module), parameters(own)))
    assert set(column(monitor, "clip_coef")) == {None}
    assert all(norm > 0 for norm in column(monitor, "total_norm"))


# Mixed precision.


def mixed(scaler):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fastclip.GradScaler])
@pytest.mark.parametrize("scale", [2.0**10, 2.0**19])  # the second overflows float16 in the first steps
def test_scaled_gradients_are_unscaled_once(fused, scaler, scale):
    made = scaler("cpu", init_scale=scale)
    module = Module(fused)
    monitor = fit(module, **mixed(made))
    norms = []

    def clip(params, max_norm):
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm).item())

    reference = torch.amp.GradScaler("cpu", init_scale=scale)
    losses, net = by_hand(clip, scaler=reference)
    overflows = [norm for norm in norms if not math.isfinite(norm)]
    assert bool(overflows) == (scale > 2**12)
    torch.testing.assert_close(module.losses, losses, rtol=1e-3, atol=1e-4)  # float16 under autocast
    torch.testing.assert_close(column(monitor, "loss"), module.losses, rtol=0, atol=0)
    for record, norm in zip(monitor.records, norms, strict=True):
        assert record.applied is math.isfinite(norm)
        if record.applied:
            assert record.total_norm == pytest.approx(norm, rel=1e-3)
    torch.testing.assert_close(parameters(module.net), parameters(net), rtol=1e-3, atol=1e-4)
    assert made.get_scale() == reference.get_scale()
    assert monitor.records[0].loss_scale == scale


def test_a_fused_optimizer_under_amp_trains_where_lightning_refuses_to_clip():
    for precision in (mixed(torch.amp.GradScaler("cpu")), {"precision": "bf16-mixed"}):
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer(gradient_clip_val=0.5, **precision).fit(Module(fused=True), loader())
    fused, other = Module(fused=True), Module()
    fit(fused, **mixed(torch.amp.GradScaler("cpu", init_scale=1024.0)))
    trainer(gradient_clip_val=0.5, **mixed(torch.amp.GradScaler("cpu", init_scale=1024.0))).fit(
        other, loader()
    )
    torch.testing.assert_close(parameters(fused), parameters(other), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_needs_no_scaler(fused):
    own, module = Module(), Module(fused)
    trainer(gradient_clip_val=0.5, precision="bf16-mixed").fit(own, loader())
    monitor = fit(module, precision="bf16-mixed")
    torch.testing.assert_close(module.losses, own.losses, rtol=1e-2, atol=1e-3)  # bfloat16 under autocast
    assert set(column(monitor, "loss_scale")) == {None}


# Records.


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


def test_every_step_is_recorded_whole(tmp_path):
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
def test_accumulated_batches_are_one_step_and_the_loss_their_mean(accumulated):
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


def test_a_trainer_that_logs_nothing_is_watched_too(recwarn):
    made = trainer(callback := FastclipCallback(max_norm=0.5), barebones=True, logger=None)
    made.fit(Module(), loader())
    assert len(callback.monitor.records) == BATCHES
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]


def test_validation_sanity_check_and_test_are_no_steps():
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


def test_batches_of_which_lightning_makes_no_step_are_in_no_record():
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


def test_a_module_may_step_on_some_batches_only():
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


def test_losses_that_are_no_real_number_are_passed_over():
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
def test_no_batch_is_recorded_where_lightning_shows_another_one():
    class Iterating(Module):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    module = Iterating()
    monitor = fit(module, max_steps=5)
    assert column(monitor, "loss") == module.losses and len(module.losses) == 5
    assert column(monitor, "batch") == [{}] * 5


def test_an_optimizer_that_the_module_has_attached_keeps_its_handle():
    class Attaching(Module):
        def configure_optimizers(self):
            [optimizer], schedulers = super().configure_optimizers()
            self.handle = fastclip.attach(optimizer, 0.5)
            return [optimizer], schedulers

    module, other = Attaching(), Module()
    monitor = fit(module, callback=FastclipCallback())
    assert monitor.handle is module.handle is handle_of(module.handle.optimizer)
    assert module.handle.observers == []
    fit(other)
    assert module.losses == other.losses
    refused_later = trainer(FastclipCallback(max_norm=1.0))
    with pytest.raises(RuntimeError, match="already attached, with max_norm 0.5"):
        refused_later.fit(Attaching(), loader())


# What goes wrong.


def poisoned(batch=6):
    samples = Samples()
    samples.inputs[SIZE * batch + 1, 5] = math.nan
    return samples


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_with_nan_is_left_out_counted_and_named(fused):
    module = Module(fused)
    callback = FastclipCallback(max_norm=0.5, sample_ids=lambda batch: batch["id"])
    monitor = fit(module, samples=poisoned(), callback=callback)
    assert all(p.isfinite().all() for p in module.parameters())
    assert [record.step for record in monitor.records if not record.applied] == [6]
    assert monitor.handle.skipped_steps == 1 and monitor.records[6].nan_count > 0
    assert {"bad_batch", "nonfinite"} <= {event.kind for event in monitor.events if event.step == 6}
    assert "124, 125, 126, 127" in str(monitor.diagnose())
    assert all(math.isfinite(loss) for loss in module.losses[7:])


def test_the_step_that_goes_wrong_is_saved_as_an_incident(tmp_path):
    with pytest.warns(IncidentSaved, match="saved step 6"):
        fit(Module(), samples=poisoned(), callback=FastclipCallback(max_norm=0.5, incidents=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["00000006-nonfinite"]


def test_an_event_with_the_action_stop_stops_the_trainer():
    callback = FastclipCallback(max_norm=0.5, actions={"nonfinite": "stop"})
    made = trainer(callback, max_epochs=3)
    made.fit(Module(), loader(poisoned()))
    assert made.global_step == 7 == len(callback.monitor.records)


def test_a_lower_learning_rate_reaches_the_scheduler():
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
def test_an_exception_is_recorded_and_everything_given_back(error, recorded, tmp_path):
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


def test_an_exception_in_validation_is_no_step():
    callback = FastclipCallback(max_norm=0.5)
    made = trainer(callback, num_sanity_val_steps=0, val_check_interval=3)
    with pytest.raises(ValueError, match="in validation"):
        made.fit(Failing(ValueError("in validation"), "validation"), loader(), loader())
    assert len(callback.monitor.records) == 3
    assert handle_of(made.optimizers[0]) is None


def test_an_event_with_the_action_raise_ends_the_training():
    callback = FastclipCallback(max_norm=0.5, actions={"nonfinite": "raise"})
    with pytest.raises(fastclip.monitor.TrainingUnstable, match="nonfinite"):
        trainer(callback).fit(Module(), loader(poisoned()))
    assert len(callback.monitor.records) in (7, 8)


def test_lightnings_own_means_against_nan_compose():
    callback = FastclipCallback(max_norm=0.5)
    with pytest.raises(RuntimeError, match="returned nan values"):
        trainer(callback, detect_anomaly=True).fit(Module(), loader(poisoned()))
    assert "returned nan values" in callback.monitor.records[6].error
    stopping = EarlyStopping("fastclip/total_norm", check_finite=True, check_on_train_epoch_end=True)
    made = trainer(FastclipCallback(max_norm=0.5), stopping, max_epochs=5)
    made.fit(Module(), loader(poisoned(batch=BATCHES - 1)))
    assert made.global_step == BATCHES


# Checkpoints, several fits.

MEASURED = ("time", "step_time", "samples_per_second", "memory")  # by the clock and the system


def comparable(records):
    return [{k: v for k, v in record.to_dict().items() if k not in MEASURED} for record in records]


def spiking():
    """The last batch of an epoch is a spike, which only who remembers the batches before can know."""
    samples = Samples(batches=24)
    samples.targets[-SIZE:] *= 300
    return samples


def adaptive():
    return FastclipCallback(fastclip.policies.TrailingPercentile(90, window=50, minimum=10))


def test_a_resumed_run_has_the_records_and_events_of_one_that_was_not_interrupted(tmp_path):
    whole, first, second = adaptive(), adaptive(), adaptive()
    uninterrupted, module = Module(), Module()
    trainer(whole, max_epochs=3).fit(uninterrupted, loader(spiking()))
    saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(first, saving, enable_checkpointing=True).fit(Module(), loader(spiking()))
    path = tmp_path / "epoch=0.ckpt"
    assert torch.load(path, weights_only=True)["callbacks"]["FastclipCallback"]["step"] == 24
    trainer(second, max_epochs=3).fit(module, loader(spiking()), ckpt_path=path)
    expected = comparable(whole.monitor.records)
    assert comparable(first.monitor.records) == expected[:24]
    assert comparable(second.monitor.records) == expected[24:]
    assert any(event.kind.endswith("spike") for event in second.monitor.events)
    assert all(map(torch.equal, parameters(module), parameters(uninterrupted)))


def test_a_checkpoint_saved_after_the_training_goes_on_too(tmp_path):
    made = trainer(callback := FastclipCallback(max_norm=0.5))
    made.fit(Module(), loader(poisoned()))
    made.save_checkpoint(tmp_path / "end.ckpt")
    following = FastclipCallback(max_norm=0.5)
    trainer(following, max_epochs=2).fit(Module(), loader(), ckpt_path=tmp_path / "end.ckpt")
    assert column(following.monitor, "step") == list(range(BATCHES, 2 * BATCHES))
    assert following.monitor.records[0].skipped_steps == callback.monitor.records[-1].skipped_steps == 1


def test_a_checkpoint_of_other_options_is_refused_with_advice(tmp_path):
    made = trainer(FastclipCallback(max_norm=0.5))
    made.fit(Module(), loader())
    made.save_checkpoint(tmp_path / "end.ckpt")
    other = FastclipCallback(max_norm=0.5, detectors=[])
    with pytest.raises(ValueError, match="by a FastclipCallback with other options.*delete its entry"):
        trainer(other, max_epochs=2).fit(Module(), loader(), ckpt_path=tmp_path / "end.ckpt")


def test_steps_are_numbered_as_the_trainer_counts_without_a_state_of_the_monitor(tmp_path):
    made = trainer()
    made.fit(Module(), loader())
    made.save_checkpoint(tmp_path / "end.ckpt")
    monitor = fit(Module(), max_epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert column(monitor, "step") == list(range(BATCHES, 2 * BATCHES))


def test_one_callback_serves_one_fit_after_the_other(tmp_path):
    callback, module = FastclipCallback(0.5, str(tmp_path)), Module()
    made = trainer(callback)
    made.fit(module, loader())
    first, optimizer = callback.monitor, made.optimizers[0]
    assert handle_of(optimizer) is None
    made.fit_loop.max_epochs = 2
    made.fit(module, loader())
    assert callback.monitor is not first and len(first.records) == BATCHES
    assert column(callback.monitor, "step") == list(range(BATCHES, 2 * BATCHES))
    trainer(callback).fit(module := Module(), loader())
    assert column(callback.monitor, "step") == list(range(BATCHES))
    assert column(callback.monitor, "loss") == module.losses
    [written] = sinks.read_log(str(tmp_path)).records.values()
    assert [record["step"] for record in written] == list(range(2 * BATCHES))  # the later of the same step


def test_a_search_for_the_learning_rate_before_the_training_is_not_part_of_it(tmp_path):
    module, callback = Module(), FastclipCallback(max_norm=0.5)
    module.lr = 0.01
    made = trainer(callback, LearningRateFinder(num_training_steps=5), default_root_dir=tmp_path)
    made.fit(module, loader())
    assert len(module.losses) == 5 + made.global_step and made.global_step > 0  # 5 with Lightning 2.4
    assert column(callback.monitor, "step") == list(range(made.global_step))
    assert column(callback.monitor, "loss") == module.losses[5:]


def test_the_callback_can_be_sent_to_other_processes():
    callback = FastclipCallback(max_norm=0.5)
    fit(Module(), callback=callback)
    copy = pickle.loads(pickle.dumps(callback))
    with pytest.raises(RuntimeError, match="no training has begun in this process"):
        _ = copy.monitor
    fit(module := Module(), callback=copy)
    assert column(copy.monitor, "loss") == module.losses


def test_a_policy_with_a_limit_for_each_gradient():
    monitor = fit(Module(), callback=FastclipCallback(fastclip.policies.AdaGC()))
    assert len(monitor.records) == BATCHES


# What is refused, before anything is changed.


def refused(module, callback=None, match="", error=ValueError, **options):
    before = parameters(module)
    made = trainer(callback or FastclipCallback(max_norm=0.5), **options)
    with pytest.raises(error, match=match):
        made.fit(module, loader())
    assert all(map(torch.equal, parameters(module), before))
    assert all(handle_of(optimizer) is None for optimizer in made.optimizers)


def test_clipping_by_both_is_refused():
    advice = r"both Trainer.* would clip.* Remove gradient_clip_val and use FastclipCallback\(max_norm={}\)"
    refused(Module(), match=advice.format(0.5), gradient_clip_val=2.0)
    refused(Module(), FastclipCallback(), advice.format(2.0), gradient_clip_val=2.0)
    by_value = {"gradient_clip_val": 2.0, "gradient_clip_algorithm": "value"}
    refused(Module(), match="Remove gradient_clip_val", **by_value)
    assert len(fit(Module(), gradient_clip_val=0.0).records) == BATCHES  # is none


class OwnClipping(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "norm")


def test_a_module_that_clips_itself_is_refused():
    refused(OwnClipping(), match=r"OwnClipping\.configure_gradient_clipping and FastclipCallback would clip")


def test_where_lightning_does_not_call_it_the_modules_own_clipping_does_not_matter():
    class Manual(OwnClipping):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            optimizer.step()

    assert len(fit(Manual()).records) == BATCHES


class Adversarial(Module):
    automatic_optimization = False
    attached = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss_of(batch))
            optimizer.step()

    def configure_optimizers(self):
        optimizers = [adamw(self.net[0].parameters(), True), adamw(self.net[2].parameters(), False)]
        if self.attached:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            self.handles = [fastclip.attach(optimizer, 0.5, scaler=scaler) for optimizer in optimizers]
        return optimizers


def test_several_optimizers_are_refused_and_the_advice_works():
    refused(Adversarial(), match="got 2.*call fastclip.attach for each of them in configure_optimizers")
    for precision in ({}, mixed(torch.amp.GradScaler("cpu", init_scale=1024.0))):
        module = Adversarial()
        module.attached = True
        trainer(**precision).fit(module, loader(poisoned()))
        assert [handle.skipped_steps for handle in module.handles] == [1, 1]
        assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_hide_the_gradients_are_refused(strategy, monkeypatch):
    made = trainer(callback := FastclipCallback(max_norm=0.5))
    # Lightning has them on GPUs only, and DeepSpeed only where it is installed.
    monkeypatch.setattr(type(made), "strategy", strategy.__new__(type("Own", (strategy,), {})))
    with pytest.raises(ValueError, match=f"does not work with {strategy.__name__}: "):
        callback.setup(made, Module(), "fit")
    callback.setup(made, Module(), "test")


def test_the_trainer_of_the_other_package_is_refused():
    import pytorch_lightning

    module = type("Other", (Steps, pytorch_lightning.LightningModule), {})()
    callback = FastclipCallback(max_norm=0.5)
    expected = r"expected a LightningModule and a Trainer of lightning\.pytorch"
    with pytest.raises(ValueError, match=f"{expected}|Expected a parent"):  # Lightning 2.4 does by itself
        trainer(callback, kind=pytorch_lightning.Trainer).fit(module, loader())


def test_options_are_checked_when_the_callback_is_made():
    with pytest.raises(TypeError, match="'max_nrom': expected one of .*activations.*sample_ids"):
        FastclipCallback(max_nrom=1.0)
    with pytest.raises(TypeError, match="'scaler': the Trainer provides it"):
        FastclipCallback(scaler=None)
    with pytest.raises(TypeError, match="sample_ids to be a function of a batch, but got list"):
        FastclipCallback(sample_ids=[1])
    refused(Module(), FastclipCallback(max_norm=-1.0), match="max_norm")


@pytest.mark.parametrize("package", PACKAGES)
def test_without_lightning_the_error_names_what_to_install(package, monkeypatch):
    name = f"fastclip.integrations.{package}"
    for missing in (package, PACKAGES[package]):
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    wanted = "torch-fastclip" if package == "lightning" else "pip install pytorch-lightning"
    with pytest.raises(ImportError, match=wanted):
        importlib.import_module(name)


# Other ways into Lightning.


def test_fabric_clips_with_fastclip_where_torch_is_patched():
    fabric = Fabric(accelerator="cpu")
    net = network()
    model, optimizer = fabric.setup(net, adamw(net.parameters(), False))
    fabric.backward(model(torch.ones(4, 8)).sum())
    grads = [p.grad.clone() for p in net.parameters()]
    expected = fastclip.get_total_norm(grads)
    with fastclip.patch_torch():
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        with pytest.raises(ValueError, match="max_norm"):  # torch takes it
            fabric.clip_gradients(model, optimizer, max_norm=-1.0)
    assert torch.equal(norm, expected) and norm > 0.5
    assert float(fastclip.get_total_norm([p.grad for p in net.parameters()])) == pytest.approx(0.5, rel=1e-5)


def test_fabric_with_a_fused_optimizer_under_amp_clips_where_it_is_attached_and_else_refuses():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    fabric = Fabric(accelerator="cpu", plugins=[FabricMixedPrecision("16-mixed", "cpu", scaler=scaler)])
    net = network()
    before = parameters(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, fused=True)
    handle = fastclip.attach(optimizer, max_norm=0.5, scaler=scaler)
    model, wrapped = fabric.setup(net, optimizer)
    fabric.backward(model(torch.ones(4, 8)).sum())
    with pytest.raises(NotImplementedError), fastclip.patch_torch():
        fabric.clip_gradients(model, wrapped, max_norm=0.5)
    wrapped.step()
    change = torch.cat([(p - q).flatten() for p, q in zip(net.parameters(), before, strict=True)])
    assert change.norm().item() == pytest.approx(0.5, rel=1e-3)
    assert 0.5 < handle.stats.total_norm < 100  # of true gradients: scaled ones are 1024 times as long


# Several processes.


@pytest.fixture(scope="module")
def two():
    processes = Ranks(2)
    yield processes
    processes.stop()


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The same training on one process, with both ranks' batches in one."""
    module = jobs.Module()
    callback = FastclipCallback(max_norm=0.5)
    trainer(callback).fit(module, DataLoader(jobs.data(), batch_size=8))
    return column(callback.monitor, "total_norm"), module


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(two, single, strategy, tmp_path):
    first, second = two.run(jobs.train, str(tmp_path), strategy)
    norms, module = single
    assert first["norms"] == second["norms"] == pytest.approx(norms, rel=1e-5)
    for parameter, mine in zip(first["parameters"], module.parameters(), strict=True):
        assert parameter == pytest.approx(mine.flatten().tolist(), rel=1e-4, abs=1e-5)
    assert first["parameters"] == second["parameters"]
    assert first["logged"] == second["logged"] == first["norms"][-1]
    assert first["told"] == [list(pair) for pair in zip(first["losses"], second["losses"], strict=True)]
    log = sinks.read_log(str(tmp_path / "log"))
    assert sorted(log.records) == [0, 1] and {len(records) for records in log.records.values()} == {4}


def test_nan_on_one_process_is_left_out_by_both_and_stops_both(two, tmp_path):
    first, second = two.run(jobs.train, str(tmp_path), "ddp", 13)
    assert first["applied"] == second["applied"] == [True, False, True]
    assert (1, "rank", 1) in first["events"] and (1, "bad_batch", 1) in second["events"]
    assert first["steps"] == second["steps"] == 3
