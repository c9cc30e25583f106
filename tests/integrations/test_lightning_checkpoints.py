# SPDX-License-Identifier: BSD-3-Clause
"""FastclipCallback with Lightning's checkpoints, several fits and other processes."""

import pickle

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint

import fastclip
from fastclip.integrations.lightning import FastclipCallback
from fastclip.monitor import sinks
from fastclip.optim import handle_of
from helpers.lightning_runs import (
    BATCHES,
    EXPECTED_WARNINGS,
    SIZE,
    Module,
    Samples,
    column,
    fit,
    loader,
    parameters,
    poisoned,
    trainer,
)

pytestmark = EXPECTED_WARNINGS


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


def test_resumed_run_has_the_records_and_events_of_an_uninterrupted_one(tmp_path):
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


def test_checkpoint_saved_after_training_can_be_resumed(tmp_path):
    made = trainer(callback := FastclipCallback(max_norm=0.5))
    made.fit(Module(), loader(poisoned()))
    made.save_checkpoint(tmp_path / "end.ckpt")
    following = FastclipCallback(max_norm=0.5)
    trainer(following, max_epochs=2).fit(Module(), loader(), ckpt_path=tmp_path / "end.ckpt")
    assert column(following.monitor, "step") == list(range(BATCHES, 2 * BATCHES))
    assert following.monitor.records[0].skipped_steps == callback.monitor.records[-1].skipped_steps == 1


def test_checkpoint_of_other_options_raises_with_advice(tmp_path):
    made = trainer(FastclipCallback(max_norm=0.5))
    made.fit(Module(), loader())
    made.save_checkpoint(tmp_path / "end.ckpt")
    other = FastclipCallback(max_norm=0.5, detectors=[])
    with pytest.raises(ValueError, match="by a FastclipCallback with other options.*delete its entry"):
        trainer(other, max_epochs=2).fit(Module(), loader(), ckpt_path=tmp_path / "end.ckpt")


def test_steps_continue_the_trainers_count_without_a_monitor_state(tmp_path):
    made = trainer()
    made.fit(Module(), loader())
    made.save_checkpoint(tmp_path / "end.ckpt")
    monitor = fit(Module(), max_epochs=2, ckpt_path=tmp_path / "end.ckpt")
    assert column(monitor, "step") == list(range(BATCHES, 2 * BATCHES))


def test_one_callback_serves_several_fits(tmp_path):
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


def test_learning_rate_finder_is_not_recorded(tmp_path):
    module, callback = Module(), FastclipCallback(max_norm=0.5)
    module.lr = 0.01
    made = trainer(callback, LearningRateFinder(num_training_steps=5), default_root_dir=tmp_path)
    made.fit(module, loader())
    assert len(module.losses) == 5 + made.global_step and made.global_step > 0  # 5 with Lightning 2.4
    assert column(callback.monitor, "step") == list(range(made.global_step))
    assert column(callback.monitor, "loss") == module.losses[5:]


def test_callback_can_be_pickled():
    callback = FastclipCallback(max_norm=0.5)
    fit(Module(), callback=callback)
    copy = pickle.loads(pickle.dumps(callback))
    with pytest.raises(RuntimeError, match="no training has begun in this process"):
        _ = copy.monitor
    fit(module := Module(), callback=copy)
    assert column(copy.monitor, "loss") == module.losses
