# SPDX-License-Identifier: BSD-3-Clause
"""The Trainer of Transformers with fastclip's callback, held against the Trainer without it."""

import math
import os
from unittest import mock

import pytest
import torch
from torch import nn

import fastclip
from fastclip.monitor.sinks import read_log

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from fastclip.integrations.transformers import FastclipCallback  # noqa: E402

NAN = math.nan
# The norm is summed in another order, and Adam divides by roots of squares: the last bits differ.
SAME = dict(rel=1e-4)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Trainers and Accelerators share a state, and tell later ones their settings by the environment."""
    with mock.patch.dict(os.environ):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def gpt2(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    rates = {name: dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, **rates
    )
    return GPT2LMHeadModel(config)


def texts(count: int = 44) -> list[dict]:
    """Sequences of 16 tokens, the first of which are often no labels: batches of different weight."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for number in range(count):
        ids = torch.randint(32, (16,), generator=generator)
        labels = ids.clone()
        labels[: 2 * (number % 6)] = -100
        data.append({"input_ids": ids, "labels": labels})
    return data


class Regression(nn.Module):
    """Takes numbers, so that a sample can hold NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, inputs, labels=None):
        outputs = self.second(self.first(inputs).relu()).squeeze(-1)
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}


def numbers(count: int = 40, nan_at: int | None = None) -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    data = [
        {"inputs": torch.randn(6, generator=generator), "labels": torch.randn(()), "sample_ids": number}
        for number in range(count)
    ]
    if nan_at is not None:
        data[nan_at]["inputs"][3] = NAN
    return data


def trainer_for(model, data, directory, *callbacks, kind=Trainer, **arguments):
    settings = dict(
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_steps=12,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.5,
    )
    settings |= arguments
    return kind(
        model, TrainingArguments(str(directory), **settings), train_dataset=data, callbacks=list(callbacks)
    )


def logged(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


class TrueNorms(TrainerCallback):
    """The norm of the gradients by torch, before anybody clips."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.model = kwargs["model"]
        inner = kwargs["optimizer"]

        def before(*_):
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

        # A fused optimizer's gradients are clipped by its kernel: here they are still whole.
        inner.optimizer.register_step_pre_hook(before)


def parameters_of(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def written(directory) -> list[dict]:
    [records] = read_log(str(directory)).records.values()
    return records


def assert_restored(trainer) -> None:
    assert not {"clip_grad_norm_", "clip_grad_value_", "backward"} & set(vars(trainer.accelerator))
    # A learning rate scheduler leaves a step of its own behind.
    assert not hasattr(trainer.optimizer.optimizer.step, "_fastclip_wrapper")
    for name in ("training_step", "log", "_maybe_log_save_evaluate", "get_batch_samples"):
        assert name not in vars(trainer)
    assert fastclip.optim.handle_of(trainer.optimizer.optimizer) is None
    assert trainer.args.logging_nan_inf_filter is True


@pytest.mark.parametrize("accumulated", [1, 2])
def test_training_matches_the_plain_trainer_and_is_recorded_and_logged(tmp_path, accumulated):
    limit = {1: 1.0, 2: 0.6}[accumulated]  # clips some of the steps
    options = dict(gradient_accumulation_steps=accumulated, optim="adamw_torch_fused", max_grad_norm=limit)
    plain = trainer_for(gpt2(), texts(), tmp_path / "plain", **options)
    plain.train()
    norms = TrueNorms()
    callback = FastclipCallback(log_dir=str(tmp_path / "log"))
    watched = trainer_for(gpt2(), texts(), tmp_path / "watched", norms, callback, **options)
    watched.train()

    assert logged(watched, "loss") == pytest.approx(logged(plain, "loss"), **SAME)
    assert logged(watched, "learning_rate") == logged(plain, "learning_rate")
    assert logged(watched, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), **SAME)
    assert logged(watched, "grad_norm") == pytest.approx(norms.norms, rel=1e-6)
    torch.testing.assert_close(parameters_of(watched), parameters_of(plain), rtol=1e-3, atol=1e-3)
    assert all(type(n) is float for n in logged(watched, "grad_norm"))

    records = list(callback.monitor.records)
    assert [r.step for r in records] == list(range(12))
    assert [r.total_norm for r in records] == logged(watched, "grad_norm")
    # Transformers 4 rounds the losses that it logs to four places.
    assert [r.loss for r in records] == pytest.approx(logged(watched, "loss"), abs=5.1e-5)
    rates = logged(watched, "learning_rate")
    used = [r.lr[0] for r in records]  # some versions log this, and the older ones the rate of the next step
    assert used == pytest.approx(rates) or used[1:] == pytest.approx(rates[:-1])
    assert all(set(r.batch) == {"input_ids", "labels"} and r.applied for r in records)
    assert records[0].batch["input_ids"]["shape"] == [4, 16]
    assert records[0].micro_batches == accumulated
    assert sum(r.clipped for r in records) not in (0, 12)
    assert logged(watched, "fastclip/clipped_share") == [float(r.clipped) for r in records]
    assert logged(watched, "fastclip/largest_norm") == [r.total_norm for r in records]
    assert [r["step"] for r in written(tmp_path / "log")] == list(range(12))
    assert_restored(watched)


class Doubled(Trainer):
    """A loss that no hook of the model sees."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = 2 * model(**inputs)["loss"]
        return (loss, None) if return_outputs else loss


@pytest.mark.parametrize("case", ["label_smoothing", "own_loss", "fewer_batches_at_the_end", "bf16"])
def test_recorded_loss_is_the_one_trained_on(tmp_path, case):
    arguments = dict(gradient_accumulation_steps=2, max_steps=6)
    model, data, kind = gpt2(), texts(20), Trainer  # five batches: the last step of an epoch has one
    if case == "label_smoothing":
        arguments["label_smoothing_factor"] = 0.2
    elif case == "own_loss":
        model, data, kind = Regression(), without_ids(numbers(20)), Doubled
    elif case == "bf16":
        arguments["bf16"] = True
    callback = FastclipCallback()
    trainer = trainer_for(model, data, tmp_path, callback, kind=kind, **arguments)
    gradients, losses = [], []

    class Differences(TrainerCallback):
        """What the gradients of a step are those of: the loss by its finite difference is too coarse, but
        the sum of what was given to backward() is exact."""

        def on_train_begin(self, args, state, control, **kwargs):
            accelerator = trainer.accelerator
            inner = accelerator.backward

            def backward(loss, **options):
                losses.append(float(loss.detach()) / accelerator.gradient_accumulation_steps)
                return inner(loss, **options)

            accelerator.backward = backward

        def on_step_end(self, args, state, control, **kwargs):
            gradients.append(math.fsum(losses))
            losses.clear()

        def on_train_end(self, args, state, control, **kwargs):
            del trainer.accelerator.backward

    trainer.callback_handler.callbacks.insert(0, Differences())
    trainer.train()
    records = list(callback.monitor.records)
    assert [r.loss for r in records] == pytest.approx(gradients, rel=1e-5)
    assert [r.micro_batches for r in records] == [2, 2, 1] * 2
    assert [r.loss for r in records] == pytest.approx(logged(trainer, "loss"), abs=5.1e-5)


def without_ids(data: list[dict]) -> list[dict]:
    return [{name: value for name, value in sample.items() if name != "sample_ids"} for sample in data]


def test_sample_with_nan_is_named_skipped_and_logged(tmp_path):
    callback = FastclipCallback(log_dir=str(tmp_path / "log"))
    trainer = trainer_for(
        Regression(),
        numbers(40, nan_at=17),
        tmp_path,
        callback,
        remove_unused_columns=False,
        logging_steps=2,
        max_steps=10,
    )
    trainer.train()
    assert parameters_of(trainer).isfinite().all()
    records = list(callback.monitor.records)
    [bad] = [r for r in records if not r.is_finite]
    assert 17 in bad.sample_ids and len(bad.sample_ids) == 4
    assert bad.applied is False and bad.nan_count and bad.worst[0]["nan_count"]
    assert bad.worst[0]["name"] in dict(trainer.model.named_parameters())
    assert bad.batch["inputs"]["nan"] == 1 and "sample_ids" not in bad.batch
    assert {e.kind for e in bad.events} >= {"nonfinite", "bad_batch"}
    assert "17" in str(callback.monitor.diagnose())

    window = bad.step // 2
    losses, left_out = logged(trainer, "loss"), logged(trainer, "fastclip/left_out_steps")
    assert [math.isnan(loss) for loss in losses] == [number == window for number in range(5)]
    assert left_out == logged(trainer, "fastclip/nonfinite_steps") == [int(n == window) for n in range(5)]
    assert math.isnan(logged(trainer, "train_loss")[0])
    assert all(math.isfinite(norm) for norm in logged(trainer, "fastclip/largest_norm"))
    assert len(written(tmp_path / "log")) == 10
    assert_restored(trainer)


def without_times(record) -> dict:
    """Of a record, what does not depend on the clock."""
    fields = record.to_dict()
    for name in ("time", "step_time", "samples_per_second", "tokens_per_second", "memory", "ranks"):
        fields.pop(name, None)
    return fields


def test_resumed_training_has_the_same_records_and_events(tmp_path):
    arguments = dict(save_strategy="steps", save_steps=7, gradient_accumulation_steps=2, max_steps=20)

    def run(directory, **further):
        callback = FastclipCallback(
            fastclip.policies.TrailingPercentile(75, window=8, minimum=4),
            log_dir=str(directory / "log"),
            detectors=[Counting()],
            weights_every=5,
        )
        # Whole steps in an epoch: else the Trainer itself resumes elsewhere, up to 4.57 at least.
        trainer = trainer_for(gpt2(dropout=0.1), texts(40), directory, callback, **arguments)
        trainer.train(**further)
        return trainer, list(callback.monitor.records)

    whole, expected = run(tmp_path)
    [*checkpoints] = sorted(tmp_path.glob("checkpoint-*"))
    assert [path.name for path in checkpoints] == ["checkpoint-14", "checkpoint-20", "checkpoint-7"]
    resumed, records = run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
    assert [without_times(r) for r in records] == [without_times(r) for r in expected[14:]]
    assert records[0].step == 14 and any(e for r in records for e in r.events)
    assert torch.equal(parameters_of(resumed), parameters_of(whole))
    assert logged(resumed, "fastclip/max_norm") == logged(whole, "fastclip/max_norm")
    assert len(written(tmp_path / "log")) == 20  # those made twice count once

    (tmp_path / "checkpoint-14" / "fastclip_monitor_rank00000.pt").unlink()
    with pytest.warns(UserWarning, match="holds no monitor state"):
        _, records = run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-14"))
    assert [r.step for r in records] == list(range(14, 20))


class Counting(fastclip.monitor.detectors.Detector):
    """An event for each third record that it has seen."""

    kind = "third"
    STATE = ("seen",)
    COOLDOWN = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def check(self, record):
        self.seen += 1
        return self.event(record, "warning", f"record {self.seen}") if self.seen % 3 == 0 else None


def test_actions_stop_raise_and_lower_the_learning_rate(tmp_path):
    def run(action):
        callback = FastclipCallback(detectors=[Counting()], actions={"third": action})
        trainer = trainer_for(gpt2(), texts(), tmp_path, callback, lr_scheduler_type="constant", max_steps=5)
        trainer.train()
        assert_restored(trainer)
        return list(callback.monitor.records)

    assert len(run("stop")) == 3
    assert [r.lr[0] for r in run("lower_lr")] == [1e-2, 1e-2, 1e-2, 5e-3, 5e-3]
    with pytest.raises(fastclip.monitor.TrainingUnstable, match="record 3"):
        run("raise")


class Broken(torch.utils.data.Dataset):
    """Fails when its 25th sample is asked for."""

    def __init__(self) -> None:
        self.data, self.asked = texts(), 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.asked += 1
        if self.asked == 25:
            raise OSError("the disk is gone")
        return self.data[index]


@pytest.mark.parametrize("where", ["data", "model", "step"])
def test_training_that_raises_is_closed_and_its_error_recorded(tmp_path, where):
    callback = FastclipCallback(log_dir=str(tmp_path / "log"))
    model = gpt2()
    data = Broken() if where == "data" else texts()
    trainer = trainer_for(model, data, tmp_path, callback)

    class Failing(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3 and where == "model":
                model.lm_head.forward = lambda inputs: 1 / 0
            if state.global_step == 3 and where == "step":
                kwargs["optimizer"].optimizer.register_step_pre_hook(lambda *_: 1 / 0)

    trainer.add_callback(Failing())
    with pytest.raises(OSError if where == "data" else ZeroDivisionError):
        trainer.train()
    assert_restored(trainer)
    records = written(tmp_path / "log")
    if where == "data":
        assert len(records) >= 3 and "error" not in records[-1]
    else:
        assert [r.get("error") for r in records] == [None] * 3 + ["ZeroDivisionError: division by zero"]


class WithScaler(Trainer):
    """float16 on the CPU: what Accelerate does on a GPU, with torch's scaler for the CPU."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_loss_scaler_of_the_trainer_is_used(tmp_path, optim):
    arguments = dict(kind=WithScaler, optim=optim, gradient_accumulation_steps=2)
    plain = trainer_for(gpt2(), texts(), tmp_path, **arguments)
    plain.train()
    callback = FastclipCallback()
    watched = trainer_for(gpt2(), texts(), tmp_path, callback, **arguments)
    watched.train()
    records = list(callback.monitor.records)
    scales = [r.loss_scale for r in records]
    assert scales[0] == 2.0**20 and len(set(scales)) > 1
    overflows = [r.applied is False for r in records]
    assert 0 < sum(overflows) < 6 and overflows == [r.nan_count + r.inf_count > 0 for r in records]
    # The norm of true gradients: what the Trainer without fastclip logs where nothing has overflowed.
    expected = logged(plain, "grad_norm")
    for norm, own, overflow in zip(logged(watched, "grad_norm"), expected, overflows, strict=True):
        assert math.isfinite(norm) is not overflow
        assert overflow or norm == pytest.approx(own, rel=1e-2)
    assert watched.accelerator.scaler.get_scale() == plain.accelerator.scaler.get_scale()
    assert logged(watched, "learning_rate") == logged(plain, "learning_rate")
    assert logged(watched, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-2)
    assert fastclip.optim.handle_of(watched.optimizer.optimizer) is None


def test_max_grad_norm_zero_clips_nothing_and_logs_the_norm(tmp_path):
    callback = FastclipCallback()
    trainer = trainer_for(gpt2(), texts(), tmp_path, callback, max_grad_norm=0.0, max_steps=3)
    trainer.train()
    records = list(callback.monitor.records)
    assert logged(trainer, "grad_norm") == [r.total_norm for r in records]
    assert [r.clipped for r in records] == [False] * 3 and records[0].max_norm == math.inf


@pytest.mark.parametrize(
    "policy", [fastclip.policies.ZClip(), fastclip.policies.SpikeSkip(window=8, minimum=4), 0.25]
)
def test_max_norm_of_the_callback_overrides_max_grad_norm(tmp_path, policy):
    callback = FastclipCallback(policy)
    trainer = trainer_for(gpt2(), texts(), tmp_path, callback, gradient_accumulation_steps=2, max_steps=6)
    trainer.train()
    records = list(callback.monitor.records)
    assert logged(trainer, "grad_norm") == [r.total_norm for r in records]
    if policy == 0.25:
        assert all(r.max_norm == 0.25 and r.clipped for r in records)
    if isinstance(policy, fastclip.policies.SpikeSkip):
        assert policy.state_dict()["state"]["loss_count"] == 6


def test_second_training_has_a_new_monitor_and_removed_callback_does_nothing(tmp_path):
    callback = FastclipCallback()
    trainer = trainer_for(gpt2(), texts(), tmp_path, callback, max_steps=2)
    trainer.train()
    first = callback.monitor
    trainer.train()
    assert callback.monitor is not first and [r.step for r in callback.monitor.records] == [0, 1]
    second = callback.monitor
    trainer.remove_callback(callback)
    trainer.train()
    assert callback.monitor is second and len(second.records) == 2
    assert_restored(trainer)


def test_watch_takes_an_existing_trainer(tmp_path):
    trainer = trainer_for(gpt2(), texts(), tmp_path, max_steps=2)
    trainer.add_callback(FastclipCallback())
    with pytest.raises(RuntimeError, match=r"callback\.watch\(trainer\) before train"):
        trainer.train()
    trainer.pop_callback(FastclipCallback)
    callback = FastclipCallback().watch(trainer).watch(trainer)
    trainer.train()
    assert len(callback.monitor.records) == 2
    with pytest.raises(TypeError, match="expected trainer to be a transformers.Trainer, but got int"):
        callback.watch(3)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"])
def test_backends_that_clip_themselves_raise_before_training(tmp_path, monkeypatch, kind):
    callback = FastclipCallback()
    trainer = trainer_for(gpt2(), texts(), tmp_path, callback)
    monkeypatch.setattr(
        type(trainer.accelerator), "distributed_type", property(lambda self: DistributedType[kind])
    )
    if hasattr(type(trainer.accelerator), "is_fsdp2"):
        monkeypatch.setattr(type(trainer.accelerator), "is_fsdp2", property(lambda self: False))
    with pytest.raises(RuntimeError, match="fastclip does not work with .*" + kind[:4]):
        trainer.train()
    assert trainer.state.global_step == 0 and trainer.optimizer is None


def test_apex_dataparallel_and_unknown_options_raise(tmp_path, monkeypatch):
    callback = FastclipCallback()
    trainer = trainer_for(gpt2(), texts(), tmp_path, callback)
    monkeypatch.setattr(trainer, "use_apex", True, raising=False)
    with pytest.raises(RuntimeError, match="apex"):
        trainer.train()
    trainer.use_apex = False
    monkeypatch.setattr(type(trainer.args), "n_gpu", property(lambda self: 2))
    with pytest.raises(RuntimeError, match="DataParallel: launch one process for each GPU with torchrun"):
        trainer.train()
    assert trainer.optimizer is None
    with pytest.raises(TypeError, match="unexpected argument 'scheduler': the Trainer provides it"):
        FastclipCallback(scheduler=None)


def test_compiled_model_is_recorded(tmp_path):
    torch.compiler.reset()
    callback = FastclipCallback()
    trainer = trainer_for(
        Regression(), without_ids(numbers()), tmp_path, callback,
        torch_compile=True, torch_compile_backend="eager", max_steps=3,
    )  # fmt: skip
    trainer.train()
    records = list(callback.monitor.records)
    assert [r.step for r in records] == [0, 1, 2]
    assert [r.total_norm for r in records] == logged(trainer, "grad_norm")
    assert records[0].worst[0]["name"] in dict(trainer.model.named_parameters())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_incident_of_the_trainer_is_replayed(tmp_path, accumulated):
    from fastclip.replay.replay import replay

    class Spoilt(Trainer):
        """One loss of step 4 is NaN."""

        def compute_loss(self, model, inputs, *args, **kwargs):
            return spoiling(model, inputs, super().compute_loss(model, inputs, *args, **kwargs))

    def spoiling(model, inputs, loss):
        return loss * NAN if int(inputs["input_ids"][0, 0]) == marked else loss

    data = texts()
    marked = 33 - 2
    for sample in data:
        sample["input_ids"][0] = sample["input_ids"][0] % 31
    data[20]["input_ids"][0] = marked
    callback = FastclipCallback(incidents=str(tmp_path / "incidents"))
    trainer = trainer_for(
        gpt2(dropout=0.1), data, tmp_path, callback, kind=Spoilt, gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=1, max_steps=44 // accumulated,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="saved step"):
        trainer.train()
    [incident] = (tmp_path / "incidents").iterdir()

    def build():
        model = gpt2(dropout=0.1)
        optimizer = trainer_for(model, data, tmp_path).create_optimizer()

        def loss_function(model, batch):
            return spoiling(model, batch, model(**batch)["loss"])

        return model, optimizer, loss_function

    verdict = replay(str(incident), build)
    assert verdict.reproduced, str(verdict)
    assert "bit for bit" in str(verdict)
