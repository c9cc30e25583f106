# SPDX-License-Identifier: BSD-3-Clause
"""Policies by themselves: each against its published rule, NaN and Inf, state, arguments, no waiting."""

import copy
import io
import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastclip.policies import AdaGC, Policy, SpikeSkip, TrailingPercentile, ZClip
from fastclip.policies.apply import max_norm_for
from helpers import policy_oracles as oracles
from helpers.cases import INF, NAN, assert_bitwise_equal

STEPS = 400
POLICIES = {
    "percentile": lambda: TrailingPercentile(90.0, window=50, minimum=10),
    "zclip": lambda: ZClip(max_grad_norm=None),
    "adagc": lambda: AdaGC(warmup_steps=30),
    "spike_skip": lambda: SpikeSkip(window=40, minimum=20),
}


def ask(policy: Policy, norms: list[float]) -> list[float]:
    """The limits for norms without groups, one after the other."""
    return [policy.limit(torch.tensor([n], dtype=torch.float64), torch.tensor([n])).item() for n in norms]


def ask_by_tensor(policy: Policy, rows: list[list[float]]) -> list[list[float]]:
    given = [torch.tensor(row, dtype=torch.float64) for row in rows]
    return [policy.limit(row.square().sum().sqrt().reshape(1), row).tolist() for row in given]


def assert_same(got, wanted):
    torch.testing.assert_close(
        torch.tensor(got, dtype=torch.float64),
        torch.tensor(wanted, dtype=torch.float64),
        rtol=1e-9,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize(
    "percent, window, minimum", [(95, 500, 100), (10, 50, 1), (80, 32, 32), (100, 9, 3), (50, 1, 1)]
)
def test_trailing_percentile_matches_its_formula(percent, window, minimum):
    norms = oracles.series(STEPS)
    policy = TrailingPercentile(percent, window, minimum)
    assert_same(ask(policy, norms), oracles.percentile_limits(norms, percent, window, minimum))


def test_trailing_percentile_includes_the_norm_of_the_step():
    """A first spike is clipped to where it stands among the others, not to what they are."""
    assert ask(TrailingPercentile(50, 3, 1), [1.0, 1.0, 1.0, 9.0, 9.0]) == [1.0, 1.0, 1.0, 1.0, 9.0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": None},
        {"alpha": 0.9, "z_threshold": 1.0, "max_grad_norm": 3.0, "warmup_steps": 7, "eps": 0.1},
        {"alpha": 0.0, "max_grad_norm": None, "warmup_steps": 1},
    ],
)
def test_zclip_matches_its_formula(options):
    norms = oracles.series(STEPS, 1)
    assert_same(ask(ZClip(**options), norms), oracles.zclip_limits(norms, **options))


@pytest.mark.parametrize("options", [{}, {"absolute": 0.3, "relative": 0.9, "beta": 0.5, "warmup_steps": 20}])
def test_adagc_matches_its_formula(options):
    """Norms from 1e-8 to 10, one of them 0 now and then, and one that is 0 for the whole warm-up."""
    columns = [oracles.series(STEPS, seed, 10.0**-power) for seed, power in enumerate((-1, 0, 2, 8, 3, 4))]
    columns[4][10:14] = columns[4][150:160] = [0.0] * 4
    columns[5][:150] = [0.0] * 150
    rows = [list(row) for row in zip(*columns, strict=False)]
    names = {"absolute": "absolute_limit", "relative": "relative_limit"}
    policy = AdaGC(**{names.get(key, key): value for key, value in options.items()})
    assert_same(ask_by_tensor(policy, rows), oracles.adagc_limits(rows, **options))


@pytest.mark.parametrize("options", [{}, {"sigma": 2.0, "window": 30, "minimum": 5}])
@pytest.mark.parametrize("observed", ["norms", "losses", "now_and_then"])
def test_spike_skip_matches_its_formula(options, observed):
    norms, losses = oracles.series(STEPS, 2), oracles.series(STEPS + 7, 3)[7:]  # NaN in other steps
    policy = SpikeSkip(**options, max_norm=0.5)
    of_norms = oracles.spike_bounds(norms, **options)
    seen = [
        step for step in range(STEPS) if observed == "losses" or (observed == "now_and_then" and step % 3)
    ]
    # A step with NaN or Inf among its gradients moves nothing: its loss does not enter either.
    entering = [losses[s] if math.isfinite(norms[s]) else NAN for s in seen]
    of_losses = dict(zip(seen, oracles.spike_bounds(entering, **options), strict=True))
    skipped = 0
    for step, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
        if step in of_losses:
            policy.observe_loss(torch.tensor(loss, dtype=torch.float64) if step % 2 else loss)
        (limit,) = ask(policy, [norm])
        spike = norm > of_norms[step] or (step in of_losses and not loss <= of_losses[step])
        spike = spike or (step in of_losses and not math.isfinite(loss))
        spike = spike and math.isfinite(norm)
        assert math.isnan(limit) if spike else limit == 0.5, step
        assert_same(policy.threshold.tolist(), [of_norms[step]])
        skipped += spike
    assert skipped > 1


def test_spike_skip_keeps_spikes_in_its_window():
    """Else a lasting change of level would be refused for ever."""
    policy = SpikeSkip(window=40, minimum=20)
    generator = torch.Generator().manual_seed(0)
    level = [1 + x for x in torch.empty(60).uniform_(-0.1, 0.1, generator=generator).tolist()]
    limits = ask(policy, [*level, *(10 * x for x in level)])
    assert not any(map(math.isnan, limits[:60])) and math.isnan(limits[60])
    assert not any(map(math.isnan, limits[64:]))


def test_policies_keep_groups_apart():
    """A NaN in one stops that one only."""
    columns = [oracles.series(200, 4), [2.0 * n + 1 for n in reversed(oracles.series(200, 5))]]
    for make, oracle in (
        (lambda: TrailingPercentile(90, 50, 10), lambda n: oracles.percentile_limits(n, 90, 50, 10)),
        (ZClip, oracles.zclip_limits),
    ):
        policy = make()
        got = [
            policy.limit(torch.tensor(pair, dtype=torch.float64), torch.ones(3)).tolist()
            for pair in zip(*columns, strict=True)
        ]
        for index, column in enumerate(columns):
            assert_same([pair[index] for pair in got], oracle(column))
    policy = SpikeSkip()
    for pair in zip(*columns, strict=True):
        policy.limit(torch.tensor(pair, dtype=torch.float64), torch.ones(3))
    assert_same(policy.threshold.tolist(), [oracles.spike_bounds(column)[-1] for column in columns])


@pytest.mark.parametrize("name", POLICIES)
def test_policies_ignore_nonfinite_norms(name):
    policy = POLICIES[name]()
    with_them, without = oracles.series(120, 6), []
    answers = []
    for norm in with_them:
        before = copy.deepcopy(policy.state_dict()["state"])
        policy.observe_loss(1.0 + 0.1 * (len(without) % 7))
        (limit,) = ask(policy, [norm])
        if math.isfinite(norm):
            without.append(norm)
            answers.append(limit)
        elif before:
            after = policy.state_dict()["state"]
            for key in after:
                if key not in ("loss", "loss_is_given"):  # this step's own
                    assert_bitwise_equal(after[key], before[key])
    gold = POLICIES[name]()
    for index, (norm, answer) in enumerate(zip(without, answers, strict=True)):
        gold.observe_loss(1.0 + 0.1 * (index % 7))
        assert_same(ask(gold, [norm]), [answer])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("in_use", [False, True])
def test_policy_state_dict_continues_the_run(name, in_use):
    """Bit for bit, also by way of a file, and loaded into a policy that has seen other norms."""
    norms = oracles.series(140, 7)
    whole, first, second = (POLICIES[name]() for _ in range(3))
    wanted = ask(whole, norms)
    assert_bitwise_equal(torch.tensor(ask(first, norms[:70])), torch.tensor(wanted[:70]))
    if in_use:
        ask(second, [5.0] * 30)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    addresses = {key: t.data_ptr() for key, t in second._state.items()}
    second.load_state_dict(torch.load(file, weights_only=True))
    kept, copied = first.state_dict(), copy.deepcopy(first.state_dict())
    ask(first, norms[70:])
    for key, tensor in kept["state"].items():
        assert_bitwise_equal(tensor, copied["state"][key])
    got = ask(second, norms[70:])
    assert_bitwise_equal(torch.tensor(got), torch.tensor(wanted[70:]))
    assert_bitwise_equal(second.threshold, whole.threshold)
    if in_use:
        assert {key: t.data_ptr() for key, t in second._state.items()} == addresses  # a graph's own


def test_policy_state_dict_before_the_first_step():
    policy = ZClip()
    assert policy.threshold is None
    ask(policy, [1.0, 2.0])
    policy.load_state_dict(ZClip().state_dict())
    assert policy.threshold is None


@pytest.mark.parametrize(
    "make, state, message",
    [
        (ZClip, lambda: AdaGC().state_dict(), "expected the state_dict of a ZClip, but got that of AdaGC"),
        (ZClip, lambda: 3, "expected the state_dict of a ZClip, but got int"),
        (ZClip, dict, "expected the state_dict of a ZClip, but got dict"),
    ],
)
def test_load_state_dict_raises_on_the_state_of_something_else(make, state, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make().load_state_dict(state())


def test_load_state_dict_raises_on_another_shape():
    given = TrailingPercentile(window=300)
    ask(given, [1.0])
    with pytest.raises(ValueError, match=r"expected .*window=200.* 'window': \[1, 200\].*got .*\[1, 300\]"):
        TrailingPercentile(window=200).load_state_dict(given.state_dict())
    used = AdaGC()
    ask_by_tensor(used, [[1.0, 2.0]])
    other = AdaGC()
    ask_by_tensor(other, [[1.0, 2.0, 3.0]])
    before = used.state_dict()["state"]
    with pytest.raises(ValueError, match=r"'gamma': \[2\].*got .*'gamma': \[3\]"):
        used.load_state_dict(other.state_dict())
    assert_bitwise_equal(used._state["gamma"], before["gamma"])


def test_policies_raise_on_another_number_of_groups_or_gradients():
    policy = ZClip()
    ask(policy, [1.0])
    with pytest.raises(ValueError, match="expected 1 groups, as in the steps before, .* ZClip .* but got 2"):
        policy.limit(torch.ones(2), torch.ones(2))
    policy = AdaGC()
    ask_by_tensor(policy, [[1.0, 2.0]])
    with pytest.raises(ValueError, match="expected 2 gradients, .* AdaGC .* but got 3"):
        policy.limit(torch.ones(1), torch.ones(3))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: TrailingPercentile(0), ValueError, "percentile to be .* > 0 and <= 100, but got 0"),
        (lambda: TrailingPercentile(101.0), ValueError, "percentile to be .* but got 101"),
        (lambda: TrailingPercentile(NAN), ValueError, "percentile to be .* but got nan"),
        (lambda: TrailingPercentile("95"), TypeError, "percentile to be a number, but got str"),
        (lambda: TrailingPercentile(window=0), ValueError, "window to be >= 1, but got 0"),
        (lambda: TrailingPercentile(window=10.0), TypeError, "window to be an int, but got float"),
        (lambda: TrailingPercentile(window=10), ValueError, "minimum to be from 1 to 10, but got 100"),
        (lambda: ZClip(alpha=1.0), ValueError, "alpha to be .* >= 0 and < 1, but got 1"),
        (lambda: ZClip(z_threshold=-1), ValueError, "z_threshold to be .* > 0, but got -1"),
        (lambda: ZClip(max_grad_norm=-1), ValueError, "max_grad_norm to be .* >= 0, but got -1"),
        (lambda: ZClip(warmup_steps=0), ValueError, "warmup_steps to be >= 1, but got 0"),
        (lambda: ZClip(eps=0), ValueError, "eps to be .* > 0, but got 0"),
        (lambda: AdaGC(absolute_limit=0), ValueError, "absolute_limit to be .* > 0, but got 0"),
        (lambda: AdaGC(relative_limit=INF), ValueError, "relative_limit to be a finite .* but got inf"),
        (lambda: AdaGC(beta=True), TypeError, "beta to be a number, but got bool"),
        (lambda: AdaGC(warmup_steps=True), TypeError, "warmup_steps to be an int, but got bool"),
        (lambda: SpikeSkip(sigma=0), ValueError, "sigma to be .* > 0, but got 0"),
        (lambda: SpikeSkip(window=8), ValueError, "minimum to be from 3 to 8, but got 64"),
        (lambda: SpikeSkip().observe_loss(torch.ones(2)), ValueError, r"loss .* one element.*shape \[2\]"),
    ],
)
def test_policies_raise_on_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


class NoWaiting(TorchDispatchMode):
    """Raises for whatever hands a number to the host."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::item"):
            raise AssertionError(f"{function.name()} waits for the device")
        if function.name() == "aten::nonzero":
            raise AssertionError("a mask as an index waits for the device")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_never_wait_for_the_device(name, device):
    policy = POLICIES[name]()
    norms = torch.rand(4, device=device)
    loss = torch.rand((), device=device)
    with NoWaiting():
        for _ in range(3):
            policy.observe_loss(loss)
            limit = policy.limit(norms.norm().reshape(1), norms)
            max_norm_for(limit, norms)
            policy.state_dict()
    kept = {key: id(tensor) for key, tensor in policy._state.items()}
    policy.limit(norms.norm().reshape(1), norms)
    assert {key: id(tensor) for key, tensor in policy._state.items()} == kept  # changed in place


def test_max_norm_for_corrects_the_epsilon():
    """Through torch's formula the coefficient is min(1, limit / norm), of tiny norms too."""
    norm = torch.tensor([1e-45, 1e-8, 1e-8, 1.0, 0.0, 3.0, INF, NAN, 2.0, 2.0], dtype=torch.float64)
    limit = torch.tensor([5e-46, 1e-9, 1e-8, 0.25, 0.0, INF, 2.0, 2.0, NAN, 0.0], dtype=torch.float64)
    coefficient = torch.clamp(max_norm_for(limit, norm) / (norm + 1e-6), max=1.0)
    wanted = torch.tensor([0.5, 0.1, 1.0, 0.25, 1.0, 1.0, 0.0, NAN, NAN, 0.0], dtype=torch.float64)
    torch.testing.assert_close(coefficient, wanted, rtol=1e-12, atol=0, equal_nan=True)
