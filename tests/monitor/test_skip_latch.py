# SPDX-License-Identifier: BSD-3-Clause
"""Steps that are skipped before the host has seen them."""

import math

import pytest
import torch

from fastclip.monitor.skip_latch import SkipLatch
from fastclip.monitor.spike_rule import SpikeRule
from fastclip.policies import SpikeSkip

NAN = math.nan
KINDS = frozenset({"nonfinite", "norm_spike", "loss_spike", "loss_scale"})
CPU = torch.device("cpu")


class DeviceLatch(SkipLatch):
    """Decides on the CPU with the tensors that a GPU has."""

    @staticmethod
    def device_for(total_norm):
        return total_norm.device


@pytest.mark.parametrize("kind", [SkipLatch, DeviceLatch])
def test_latch_skips_until_the_record_of_the_step_is_seen(kind):
    latch = kind(frozenset({"nonfinite"}))
    one = torch.tensor(1.0)
    assert [bool(latch.decide(torch.tensor(loss), one)[0]) for loss in (1.0, NAN, 1.0, NAN)] == [0, 1, 1, 1]
    latch.release(2)
    assert not latch.decide(one, one)[0]
    assert latch.decide(torch.tensor(math.inf), one)[0]
    latch.release(4)  # the record of an earlier skipped step arrives after it has closed again
    assert latch.decide(one, one)[0]
    latch.release(6)
    assert not latch.decide(one, one)[0]
    assert not latch.decide(torch.tensor(NAN), one, loss_is_given=torch.tensor(False))[0]


@pytest.mark.parametrize("kind", [SkipLatch, DeviceLatch])
def test_windows_ignore_steps_while_the_latch_is_closed(kind):
    latch = kind(frozenset({"norm_spike", "loss_spike"}))
    latch.norm_rule, latch.loss_rule = (SpikeRule(size=16, minimum=5) for _ in range(2))

    def decide(value):
        return bool(latch.decide(torch.tensor(value), torch.tensor(value))[0])

    assert not any(decide(1.0 + 0.01 * (i % 3)) for i in range(10))
    assert decide(50.0)
    before = latch.state_dict()
    assert len(before["norm"]["window"]) == 11  # as in SpikeSkip: a level that lasts is accepted
    assert all(decide(value) for value in (60.0, 70.0, NAN, 1.0))
    assert latch.state_dict() == before
    latch.release(latch.decisions)
    assert not decide(1.0) and not decide(NAN)


@pytest.mark.parametrize("device", [None, CPU])
def test_spike_rule_is_that_of_the_policy(device):
    rule, policy = SpikeRule(sigma=2.0, size=16, minimum=8), SpikeSkip(2.0, 16, 8)
    rule.move_to(device)
    generator = torch.Generator().manual_seed(4)
    found = 0
    for step in range(300):
        value = torch.randn((), generator=generator).exp().double()
        if step % 17 == 3:
            value = torch.tensor(NAN if step % 2 else math.inf, dtype=torch.float64)
        wanted = bool(policy.limit(value.reshape(1), value.reshape(1)).isnan())
        number, is_open = (float(value), True) if device is None else (value, torch.tensor(True))
        assert bool(rule.is_spike(number, is_open)) == wanted
        found += wanted
    assert found > 5


def numbers(steps, scaled):
    """Loss, norm and scale of each step, some of them spikes or not finite."""
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        loss, norm = torch.rand(2, generator=generator, dtype=torch.float64).unbind()
        loss, norm = loss + 1, norm + 1
        if step % 41 == 7:
            loss = loss * 100 if step % 2 else loss * NAN
        if step % 29 == 3 or step > 390:
            norm = norm * 100 if step % 2 and step < 390 else norm * math.inf
        yield loss, norm, torch.tensor(4.0) if scaled else None


def decisions(latch, steps, scaled, first=0):
    """What the latch decides in steps `first` and later; it is released in every third step."""
    made = []
    for step, (loss, norm, scale) in enumerate(numbers(steps, scaled)):
        if step >= first:
            made.append(tuple(map(int, latch.decide(loss, norm, None, scale))))
            if step % 3 == 0:
                latch.release(latch.decisions)
    return made


@pytest.mark.parametrize("scaled", [False, True])
def test_latch_decides_on_a_device_as_on_the_host(scaled):
    host = decisions(SkipLatch(KINDS, overflows=3), 400, scaled)
    device = decisions(DeviceLatch(KINDS, overflows=3), 400, scaled)
    assert device == host
    assert {reason for _, reason in host} == ({0, 1, 2, 3, 4} if scaled else {0, 1, 2, 3})


@pytest.mark.parametrize(("before", "after"), [(DeviceLatch, SkipLatch), (SkipLatch, DeviceLatch)])
@pytest.mark.parametrize(("at", "scaled"), [(1, False), (40, True), (127, False), (130, True), (393, True)])
def test_latch_resumes_on_the_other_device(before, after, at, scaled):
    """`at`, a step before which it is open: in a window that is not full, in a full one, in a streak."""
    first, second = before(KINDS, overflows=3), after(KINDS, overflows=3)
    made = decisions(first, at, scaled)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert (first.state_dict()["overflow_streak"] > 0) == (at == 393)
    made += decisions(second, 400, scaled, first=at)
    assert made == decisions(SkipLatch(KINDS, overflows=3), 400, scaled)


def test_latch_keeps_its_windows_when_the_model_moves(monkeypatch):
    whole = decisions(SkipLatch(KINDS, overflows=3), 400, True)
    latch = SkipLatch(KINDS, overflows=3)
    made = decisions(latch, 200, True)
    monkeypatch.setattr(latch, "device_for", DeviceLatch.device_for)
    assert made + decisions(latch, 400, True, first=200) == whole


def state_of_0_1(values, on_device):
    """What version 0.1 saved of a window: in the first entry on the CPU, in the second one on a GPU."""
    policy = SpikeSkip()
    for value in values if on_device else ():
        policy.limit(torch.tensor([value]), torch.tensor([value]))
    return {"window": [] if on_device else values[-128:], "rule": policy.state_dict()}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("count", [0, 100, 200])
def test_latch_loads_the_state_of_version_0_1(on_device, count):
    values = [float(i % 7) for i in range(count)]
    latch = SkipLatch(frozenset({"norm_spike"}))
    latch.load_state_dict({"norm": state_of_0_1(values, on_device)})
    assert latch.state_dict() == {"norm": {"window": values[-128:]}, "overflow_streak": 0}
    with pytest.raises(ValueError, match=r"rules for \['norm'\], but got \['loss'\]"):
        latch.load_state_dict({"loss": {"window": []}})


def test_state_of_the_latch_loads_with_weights_only(tmp_path):
    latch = DeviceLatch(KINDS, overflows=3)
    decisions(latch, 393, True)
    torch.save(latch.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == latch.state_dict()
    assert latch.state_dict()["overflow_streak"] > 0
