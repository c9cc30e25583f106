# SPDX-License-Identifier: BSD-3-Clause
"""clip_, grad_stats and what they return: names, groups, modes."""

import math

import pytest
import torch
from torch import Tensor

import fastclip
from helpers import cases
from helpers.cases import INF, NAN, assert_bitwise_equal


@pytest.fixture
def model() -> torch.nn.Module:
    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    network(torch.randn(8, 4)).square().sum().backward()
    return network


def grads_of(network: torch.nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters() if p.grad is not None]


def poison(network: torch.nn.Module) -> None:
    network[2].weight.grad[0, 1] = NAN
    network[2].weight.grad[1, 1] = INF
    network[0].bias.grad[:] = -INF


def test_clip_returns_the_statistics_of_the_pass(backend, model):
    before = cases.clone(grads_of(model))
    stats = fastclip.clip_(model.named_parameters(), 0.1)
    assert stats.names == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert stats.total_norm.shape == stats.clip_coef.shape == stats.found_inf.shape == ()
    assert stats.total_norm.item() == pytest.approx(cases.exact_norm(before, 2.0), rel=1e-6)
    assert_bitwise_equal(grads_of(model), [g * stats.clip_coef for g in before])
    assert stats.found_inf.dtype == torch.float32 and stats.found_inf == 0
    assert stats.nan_count.dtype == stats.inf_count.dtype == torch.int64
    assert (stats.nan_count.item(), stats.inf_count.item()) == (0, 0)
    norms = [g.norm().item() for g in before]
    assert stats.per_tensor.norm.tolist() == pytest.approx(norms, rel=1e-6)
    by_norm = sorted(range(4), key=lambda i: -norms[i])
    assert [t.name for t in stats.worst(2)] == [stats.names[i] for i in by_norm[:2]]


def test_grad_stats_changes_nothing(backend, model):
    before = cases.clone(grads_of(model))
    versions = [g._version for g in grads_of(model)]
    stats = fastclip.grad_stats(model.named_parameters(), 1.0)
    assert stats.clip_coef is None and stats.found_inf == 0
    assert stats.total_norm.item() == pytest.approx(cases.exact_norm(before, 1.0), rel=1e-6)
    assert_bitwise_equal(grads_of(model), before)
    assert [g._version for g in grads_of(model)] == versions


def test_worst_names_parameters_with_nan_and_inf(backend, model):
    poison(model)
    stats = fastclip.grad_stats(model.named_parameters())
    assert (stats.nan_count.item(), stats.inf_count.item(), stats.found_inf.item()) == (1, 4, 1.0)
    worst = stats.worst(3)
    assert [(t.name, t.nan_count, t.inf_count) for t in worst[:2]] == [("0.bias", 0, 3), ("2.weight", 1, 1)]
    assert worst[0].norm == INF and math.isnan(worst[1].norm) and math.isfinite(worst[2].norm)


def test_names_default_to_positions(backend, model):
    model[0].weight.grad = None
    assert fastclip.grad_stats(model.parameters()).names == [
        "parameters[1]",
        "parameters[2]",
        "parameters[3]",
    ]
    assert fastclip.grad_stats(model[2].weight).names == ["parameters[0]"]


@pytest.mark.parametrize("empty", [[], None])
def test_clip_and_grad_stats_of_no_gradients(backend, empty):
    parameters = [] if empty is not None else [torch.nn.Parameter(torch.zeros(2))]
    for stats in (fastclip.clip_(parameters, 1.0), fastclip.grad_stats(parameters)):
        assert stats.total_norm == 0 and stats.found_inf == 0 and stats.nan_count == 0
        assert stats.worst() == [] and stats.per_tensor.norm.shape == (0,)
    assert fastclip.clip_(parameters, 1.0).clip_coef == 1


# The modes


def test_nonfinite_error_names_parameters_and_changes_nothing(backend, model):
    poison(model)
    before = cases.clone(grads_of(model))
    words = r"2 of 4 gradients hold NaN or Inf: 0.bias \(0 NaN, 3 Inf\), 2.weight \(1 NaN, 1 Inf\)"
    with pytest.raises(RuntimeError, match=words):
        fastclip.clip_(model.named_parameters(), 1.0, nonfinite="error")
    with pytest.raises(RuntimeError, match=r"gradient 1 \(0 NaN, 3 Inf\)"):
        fastclip.clip_grad_norm_(model.parameters(), 1.0, nonfinite="error")
    assert_bitwise_equal(grads_of(model), before)


def test_nonfinite_error_accepts_finite_gradients(backend, model):
    before = cases.clone(grads_of(model))
    stats = fastclip.clip_(model.named_parameters(), 0.1, nonfinite="error")
    assert_bitwise_equal(grads_of(model), [g * stats.clip_coef for g in before])


def test_nonfinite_error_reports_an_overflow_of_finite_elements(backend):
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.full((4,), 1e200, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="the total norm is inf though every element is finite"):
        fastclip.clip_([parameter], 1.0, nonfinite="error")
    assert (parameter.grad == 1e200).all()


def test_nonfinite_error_shortens_long_lists(backend):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(30)]
    for parameter in parameters:
        parameter.grad = torch.tensor([NAN])
    with pytest.raises(RuntimeError, match=r"30 of 30 gradients.* and 20 more"):
        fastclip.clip_(parameters, 1.0, nonfinite="error")


@pytest.mark.parametrize("function", [fastclip.clip_, fastclip.clip_grad_norm_])
def test_nonfinite_zero_and_skip_follow_their_definition(backend, model, function):
    poison(model)
    before = cases.clone(grads_of(model))
    function(model.parameters(), 0.1, nonfinite="skip")
    assert_bitwise_equal(grads_of(model), before)
    function(model.parameters(), 0.1, nonfinite="zero")
    after = torch.cat([g.view(-1) for g in grads_of(model)])
    assert after.isfinite().all() and after.norm().item() == pytest.approx(0.1, rel=1e-4)
    assert (after == 0).sum() == 5


def test_error_if_nonfinite_excludes_zero_and_skip(model):
    for mode in ("zero", "skip"):
        with pytest.raises(ValueError, match=mode):
            fastclip.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True, nonfinite=mode)


@pytest.mark.parametrize("mode", ["ignore", "", None, "Zero"])
def test_clip_raises_on_an_unknown_nonfinite_mode(model, mode):
    for function in (fastclip.clip_, fastclip.clip_grad_norm_):
        with pytest.raises(ValueError, match="nonfinite to be one of 'propagate', 'error', 'zero', 'skip'"):
            function(model.parameters(), 1.0, nonfinite=mode)


# Groups


def test_groups_tensor_gives_each_gradient_its_own_norm(backend, model):
    before = cases.clone(grads_of(model))
    stats = fastclip.clip_(model.named_parameters(), 0.05, groups="tensor")
    assert stats.labels == stats.names and stats.total_norm.shape == stats.clip_coef.shape == (4,)
    for grad, old, norm in zip(grads_of(model), before, stats.total_norm, strict=True):
        assert norm.item() == pytest.approx(old.norm().item(), rel=1e-6)
        assert grad.norm().item() == pytest.approx(min(0.05, norm.item()), rel=1e-4)


@pytest.mark.parametrize("how", ["function", "labels"])
def test_groups_by_layer_equal_clipping_each_layer(backend, model, how):
    model[2].bias.grad = None
    layers = {"0": [model[0].weight, model[0].bias], "2": [model[2].weight]}
    before = {label: cases.clone([p.grad for p in layer]) for label, layer in layers.items()}
    limits = {"0": 0.1, "2": 0.02}
    groups = (lambda name: name.split(".")[0]) if how == "function" else ["0", "0", "2", "2"]
    stats = fastclip.clip_(model.named_parameters(), limits, groups=groups)
    assert stats.labels == ["0", "2"]
    for label, norm, coef in zip(stats.labels, stats.total_norm, stats.clip_coef, strict=True):
        assert norm.item() == pytest.approx(cases.exact_norm(before[label], 2.0), rel=1e-6)
        assert coef.item() == pytest.approx(min(1.0, limits[label] / norm.item()), rel=1e-4)
        assert_bitwise_equal([p.grad for p in layers[label]], [g * coef for g in before[label]])
    assert fastclip.grad_stats(model.named_parameters(), groups=groups).total_norm.shape == (2,)


@pytest.mark.parametrize("norm_type", [1.0, INF, -INF, 3.0, 0.0])
def test_groups_work_with_every_norm_type(backend, norm_type):
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn(5)
    stats = fastclip.grad_stats(parameters, norm_type, groups=["a", "b", "a", "b"])
    for number, members in enumerate((parameters[0::2], parameters[1::2])):
        expected = torch.nn.utils.get_total_norm([p.grad for p in members], norm_type)
        torch.testing.assert_close(stats.total_norm[number], expected)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (dict(max_norm=1.0, groups="layer"), ValueError, "groups to be 'tensor'.*but got 'layer'"),
        (dict(max_norm=1.0, groups=[1, 2]), ValueError, "label each of the 4 parameters, but got 2"),
        (dict(max_norm={"0": 1.0}, groups=lambda n: n[0]), ValueError, r"none for \['2'\]"),
        (dict(max_norm={"0": 1.0, "2": -1.0}, groups=lambda n: n[0]), ValueError, "max_norm"),
        (
            dict(max_norm=torch.ones(3), groups=lambda n: n[0]),
            ValueError,
            r"one a group, but got shape \[3\]",
        ),
        (dict(max_norm=torch.ones(2)), ValueError, r"one element, but got shape \[2\]"),
        (dict(max_norm=1.0, norm_type=None), TypeError, "float"),
    ],
)
def test_clip_raises_on_bad_groups_and_limits(model, arguments, error, words):
    before = cases.clone(grads_of(model))
    with pytest.raises(error, match=words):
        fastclip.clip_(model.named_parameters(), **arguments)
    assert_bitwise_equal(grads_of(model), before)


@pytest.mark.parametrize("bad", [3, ("a",), ("a", 3), "text", ("a", torch.ones(1), 2)])
def test_clip_raises_on_what_is_neither_tensor_nor_pair(model, bad):
    with pytest.raises(TypeError, match=r"tensors or \(name, tensor\) pairs, but got \w+ at index 1"):
        fastclip.clip_([("w", model[0].weight), bad], 1.0)
