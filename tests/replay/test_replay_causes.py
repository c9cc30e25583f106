# SPDX-License-Identifier: BSD-3-Clause
"""Replay finds the cause: samples, half precision, learning rate, or the first module with NaN or Inf."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from torch import nn

import fastclip
from helpers.replay_models import (
    Transformer,
    classification,
    convolutional,
    images,
    loss_event,
    norm_event,
    perceptron,
    record_incident,
    sgd,
    training_of,
    vectors,
    with_bad_samples,
)

STEP = 5


def replayed(tmp_path, make, **options):
    """Record an incident, replay it, check that it reproduces to the last bit, and return the result."""
    path = record_incident(tmp_path, make(), STEP, **options)
    result = fastclip.replay(path, make)
    assert result.reproduced and result.tolerance == 0, result.differences
    return result


def guilty_ids(result):
    return [sorted(sample["id"] % 10000 for sample in subset) for subset in result.samples.guilty]


class VectorTransformer(nn.Module):
    """Rows of an image as a sequence, with dropout and layer norms."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 10)

    def forward(self, inputs):
        return self.head(self.encoder(inputs.squeeze(1)).mean(1))


class TestSamples:
    def test_replay_finds_one_sample_of_64(self, tmp_path):
        data = with_bad_samples(images, STEP, [37])
        result = replayed(tmp_path, lambda: training_of(VectorTransformer(), data=data))
        assert guilty_ids(result) == [[37]]
        assert result.samples.runs <= 2 * math.log2(64) + 2
        assert result.samples.losses[0]["id"] == 10000 * STEP + 37
        assert math.isnan(result.samples.losses[0]["loss"])
        assert math.isfinite(result.samples.losses[1]["loss"]) and len(result.samples.losses) == 64
        assert result.verdict == [
            f"1 of 64 samples causes it: id {10000 * STEP + 37}, with NaN or Inf in the data (1 in 0)"
        ]
        assert "id 50037" in str(result)
        assert "NaN" in json.dumps(result.to_dict(), allow_nan=False)

    def test_replay_finds_several_samples(self, tmp_path):
        data = with_bad_samples(vectors, STEP, [3, 40, 41], math.inf)
        result = replayed(tmp_path, lambda: training_of(perceptron(), data=data))
        assert guilty_ids(result) == [[3], [40], [41]]
        assert result.verdict[0].startswith("3 of 64 samples cause it: id 50003, 50040, 50041")

    @pytest.mark.parametrize(
        "model", [convolutional, lambda: nn.Sequential(nn.BatchNorm1d(64), perceptron())]
    )
    def test_replay_finds_a_sample_despite_batch_normalization(self, tmp_path, model):
        """One bad sample spoils the statistics of all, so subsets run without them."""
        data = with_bad_samples(images if model is convolutional else vectors, STEP, [11])
        result = replayed(tmp_path, lambda: training_of(model(), data=data))
        assert guilty_ids(result) == [[11]]
        assert "subsets are run with batch normalization in eval mode" in result.samples.notes
        assert sum(not math.isfinite(sample["loss"]) for sample in result.samples.losses) == 1

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_replay_finds_the_outlier_of_a_norm_spike(self, tmp_path, reduction):
        """A sample counts by its part of the whole gradient, not as a batch of its own."""

        def loss_function(model, batch):
            return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

        data = with_bad_samples(vectors, STEP, [20], 600.0)
        make = partial(make_perceptron, data=data, loss_function=loss_function)
        result = replayed(tmp_path, make, kind="norm_spike", event_values=norm_event)
        assert result.failure.startswith("a gradient norm above")
        assert guilty_ids(result) == [[20]]
        assert result.samples.losses[0]["index"] == 20

    def test_replay_finds_a_sample_of_the_second_micro_batch(self, tmp_path):
        def data(step, micro):
            return with_bad_samples(vectors, STEP if micro == 1 else -1, [9])(step, micro)

        make = partial(make_perceptron, data=data, micro_batches=3)
        result = replayed(tmp_path, make)
        (guilty,) = result.samples.guilty[0]
        assert (guilty["micro_batch"], guilty["index"]) == (1, 9) and result.samples.count == 192

    def test_replay_blames_bad_parameters_not_samples(self, tmp_path):
        def make(bad=True):
            training = training_of(perceptron())
            if bad:
                training.model[2].bias.data[0] = math.nan
            return training

        result = replayed(tmp_path, make)
        assert result.samples.guilty == [] and result.bad_state == ["2.bias"]
        assert result.verdict == [
            "NaN or Inf was present before the step, in 2.bias: an earlier step is the cause"
        ]
        assert (result.forward.name, result.forward.weights, result.forward.given) == ("2", True, False)


def make_perceptron(**options):
    return training_of(perceptron(), **options)


class TestHalfPrecision:
    @pytest.mark.parametrize("scaler", [torch.amp.GradScaler, fastclip.GradScaler])
    def test_replay_finds_an_overflow_of_scaled_gradients(self, tmp_path, scaler):
        def make():
            return make_perceptron(autocast=torch.float16, scaler=scaler("cpu", init_scale=2.0**22))

        path = record_incident(tmp_path, make(), 0)
        result = fastclip.replay(path, make)
        assert result.reproduced, result.differences
        assert result.float32["vanishes"] and result.float32["dtype"] == "float16"
        assert math.isfinite(result.float32["total_norm"]) and result.forward is None
        assert result.verdict[-1].startswith(
            "float16 overflow of the gradients at a loss scale of 4.1943e+06: finite in float32"
        )

    def test_replay_finds_an_overflow_of_the_forward(self, tmp_path):
        """A matrix product beyond 65504, in the second layer."""

        def make():
            training = training_of(perceptron(), autocast=torch.float16)
            training.model[0].weight.data *= 300
            training.model[2].weight.data *= 3000
            return training

        result = replayed(tmp_path, make)
        assert result.float32["vanishes"]
        assert (result.forward.name, result.forward.kind, result.forward.given) == ("2", "Linear", False)
        assert any(text.startswith("float16 overflow: finite in float32") for text in result.verdict)

    def test_replay_does_not_blame_precision_for_bad_data(self, tmp_path):
        data = with_bad_samples(vectors, STEP, [5])
        result = replayed(tmp_path, partial(make_perceptron, data=data, autocast=torch.bfloat16))
        assert result.float32["vanishes"] is False and len(result.verdict) == 1

    def test_replay_of_float32_has_no_float32_variant(self, tmp_path):
        assert replayed(tmp_path, make_perceptron).float32 is None

    def test_replay_restores_a_half_precision_model(self, tmp_path):
        """The float32 variant converts its parameters, which are restored afterwards."""

        def make():
            model = perceptron().half()
            model[0].weight.data *= 100
            model[2].weight.data *= 2000
            data = lambda step, micro: (vectors(step, micro)[0].half(), vectors(step, micro)[1])  # noqa: E731
            return training_of(model, data=data, optimizer=sgd)

        built = []
        path = record_incident(tmp_path, make(), STEP)
        result = fastclip.replay(path, lambda: built.append(make()) or built[0])
        assert result.reproduced and result.float32["vanishes"], str(result)
        assert {p.dtype for p in built[0].model.parameters()} == {torch.float16}


class TestLearningRate:
    @staticmethod
    def exploding(model=perceptron):
        """One step with a rate that is far too high, just before the incident."""
        rate = lambda step: 20.0 if step == STEP - 1 else 0.05  # noqa: E731
        return training_of(model(), optimizer=sgd, rate=rate, max_norm=None)

    @pytest.mark.parametrize("kind", ["loss_spike", "norm_spike"])
    def test_replay_blames_the_step_before(self, tmp_path, kind):
        events = {"loss_spike": loss_event, "norm_spike": norm_event}
        result = replayed(tmp_path, self.exploding, kind=kind, event_values=events[kind], snapshot=2)
        history = result.history
        assert history["reaches_the_incident"] and history["fails"] and history["from_step"] == 2
        assert not result.samples.is_cause
        tenth = history["a_tenth_in_the_step_before"]
        assert tenth["loss"] < history["losses"][STEP]
        if kind == "loss_spike":
            assert tenth["vanishes"]
            assert result.verdict == [
                f"the learning rate of the step before (step 4: 20): at a tenth of it, the loss of step "
                f"5 is {tenth['loss']:.4g}"
            ]

    def test_replay_without_a_snapshot_compares_earlier_batches(self, tmp_path):
        result = replayed(tmp_path, self.exploding, kind="loss_spike", event_values=loss_event)
        assert result.history is None
        last = result.earlier[-1]
        assert last["step"] == STEP - 1 and last["now"] > 10 * last["recorded"]
        assert result.verdict[0].startswith("the parameters, not this batch: the loss of the batch of step 4")

    def test_replay_computes_the_loss_after_the_update(self, tmp_path):
        """The update of the step itself is too large: only the loss after it shows that."""

        def make(last=1e3):
            rate = lambda step: last if step == STEP else 0.05  # noqa: E731
            return make_perceptron(optimizer=sgd, rate=rate, max_norm=None)

        torch.manual_seed(1)
        full, tenth = make(), copy.deepcopy(make())
        tenth.model.load_state_dict(full.model.state_dict())
        tenth.rate = make(1e2).rate
        path = record_incident(tmp_path, full, STEP, kind="update_ratio")
        record_incident(tmp_path / "tenth", tenth, STEP)
        result = fastclip.replay(path, make)
        update = result.learning_rate
        assert update["rates"] == [1e3] and update["after"] > 10 * update["before"]
        # As in both trainings: the second update does not use the momentum of the first.
        with torch.no_grad():
            losses = [classification(t.model, vectors(STEP, 0)).item() for t in (full, tenth)]
        assert [update["after"], update["after_a_tenth"]] == losses
        assert result.failure is None and result.verdict[0].startswith(
            "its own update raises the loss on its batch"
        )

    def test_replay_blames_several_steps(self, tmp_path):
        rate = lambda step: 5.0 if 1 < step < STEP else 0.05  # noqa: E731
        make = partial(make_perceptron, optimizer=sgd, rate=rate, max_norm=None)
        result = replayed(tmp_path, make, kind="loss_spike", event_values=loss_event, snapshot=2)
        history = result.history
        assert not history["a_tenth_in_the_step_before"]["vanishes"]
        assert history["a_tenth_in_all_steps"]["vanishes"]
        assert result.verdict[0].startswith("the learning rate of steps 2 to 4")


class Dividing(nn.Module):
    """A module whose backward divides by 0 while the forward is finite."""

    def forward(self, inputs):
        return (inputs * 0).square().sum(1, keepdim=True).sqrt() + inputs


class Root(nn.Linear):
    """A module whose own code fails in backward, not that of its base class."""

    def forward(self, inputs):
        return (super().forward(inputs) * 0).sqrt() + inputs


@pytest.mark.parametrize(
    "layers, name, kind",
    [
        ([nn.Linear(64, 64), Dividing(), nn.Linear(64, 10)], "1", "Dividing"),
        (
            [nn.Linear(64, 64), nn.Sequential(nn.ReLU(inplace=True), Dividing()), nn.Linear(64, 10)],
            "1.1",
            None,
        ),
        ([Root(64, 64), nn.Linear(64, 10)], "0", "Root"),
    ],
)
def test_replay_names_the_first_module_of_the_backward(tmp_path, layers, name, kind):
    result = replayed(tmp_path, lambda: training_of(nn.Sequential(*layers)))
    assert result.forward is None and result.backward.name == name
    assert kind is None or result.backward.kind == kind
    assert all(p["name"].startswith("0") for p in result.parameters) and result.parameters


def test_replay_names_the_loss_function_in_the_backward(tmp_path):
    def loss_function(model, batch):
        return classification(model, batch) + (model(batch[0]) * 0).square().sum().sqrt()

    result = replayed(tmp_path, partial(make_perceptron, loss_function=loss_function))
    assert (result.backward.name, result.backward.kind) == ("", "loss_function")


def test_replay_with_variants_changes_no_later_replay(tmp_path):
    """Replays on the same model stay exact after variants ran on it."""
    training = TestLearningRate.exploding(lambda: nn.Sequential(nn.BatchNorm1d(64), perceptron()))
    path = record_incident(tmp_path, training, STEP, kind="loss_spike", event_values=loss_event, snapshot=2)
    transformer = training_of(Transformer())
    other = record_incident(tmp_path / "other", transformer, STEP)
    for _ in range(2):
        assert fastclip.replay(path, lambda: training).reproduced
        assert fastclip.replay(other, lambda: transformer).reproduced
    again = [fastclip.replay(path, lambda: training).to_dict() for _ in range(2)]
    assert again[0] | {"seconds": 0} == again[1] | {"seconds": 0}
