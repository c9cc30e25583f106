# SPDX-License-Identifier: BSD-3-Clause
"""Steps that are left out before the host has seen them."""

import math

import torch

from fastclip.monitor.skip_latch import Gate, Spikes
from fastclip.policies import SpikeSkip

NAN = math.nan


def test_the_gate_lets_nothing_through_before_the_record_is_seen():
    gate = Gate(frozenset({"nonfinite"}))
    one = torch.tensor(1.0)
    assert [bool(gate.decide(torch.tensor(loss), one)[0]) for loss in (1.0, NAN, 1.0, NAN)] == [0, 1, 1, 1]
    gate.open(2)
    assert not gate.decide(one, one)[0]
    assert gate.decide(torch.tensor(math.inf), one)[0]
    gate.open(4)  # the record of an earlier held step arrives after it has closed again
    assert gate.decide(one, one)[0]
    gate.open(6)
    assert not gate.decide(one, one)[0]
    assert not gate.decide(torch.tensor(NAN), one, told=torch.tensor(False))[0]


def test_what_comes_while_the_gate_is_closed_is_not_remembered():
    gate = Gate(frozenset({"norm_spike", "loss_spike"}))
    gate.norm_rule, gate.loss_rule = (Spikes(SpikeSkip(window=16, minimum=5)) for _ in range(2))

    def decide(value):
        return bool(gate.decide(torch.tensor(value), torch.tensor(value))[0])

    assert not any(decide(1.0 + 0.01 * (i % 3)) for i in range(10))
    assert decide(50.0)
    before = {key: state["window"] for key, state in gate.state_dict().items()}
    assert len(before["norm"]) == 11  # as in SpikeSkip: a level that lasts is accepted
    assert all(decide(value) for value in (60.0, 70.0, NAN, 1.0))
    assert {key: state["window"] for key, state in gate.state_dict().items()} == before
    gate.open(gate.decisions)
    assert not decide(1.0) and not decide(NAN)


def test_the_gate_s_rule_is_that_of_the_policy():
    """In Python on the CPU; what a GPU computes is the policy itself."""
    spikes, policy = Spikes(SpikeSkip(sigma=2.0, window=16, minimum=8)), SpikeSkip(2.0, 16, 8)
    generator = torch.Generator().manual_seed(4)
    found = 0
    for step in range(300):
        value = torch.randn((), generator=generator).exp().double()
        if step % 17 == 3:
            value = torch.tensor(NAN if step % 2 else math.inf, dtype=torch.float64)
        wanted = bool(policy.limit(value.reshape(1), value.reshape(1)).isnan())
        assert spikes.is_spike_on_host(float(value), True) == wanted
        found += wanted
    assert found > 5


def test_the_gate_decides_on_a_device_as_on_the_host(monkeypatch):
    """A GPU's way, taken here on the CPU, against the Python that the CPU has."""
    kinds = frozenset({"nonfinite", "norm_spike", "loss_spike", "loss_scale"})
    for scaled in (False, True):
        host, device = Gate(kinds, overflows=3), Gate(kinds, overflows=3)
        monkeypatch.setattr(device, "_decide_on_host", device._decide_on_device)
        generator, seen = torch.Generator().manual_seed(5), set()
        for step in range(400):
            loss, norm = torch.rand(2, generator=generator, dtype=torch.float64).unbind()
            loss, norm = loss + 1, norm + 1
            if step % 41 == 7:
                loss = loss * 100 if step % 2 else loss * NAN
            if step % 29 == 3 or step > 390:
                norm = norm * 100 if step % 2 and step < 390 else norm * math.inf
            scale = torch.tensor(4.0) if scaled else None
            answers = [tuple(map(int, gate.decide(loss, norm, None, scale))) for gate in (host, device)]
            assert answers[0] == answers[1], step
            seen.add(answers[0][1])
            if step % 3 == 0:
                host.open(step)
                device.open(step)
        assert seen == ({0, 1, 2, 3, 4} if scaled else {0, 1, 2, 3})
