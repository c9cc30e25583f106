# SPDX-License-Identifier: BSD-3-Clause
"""Each detector fires on its thing and not on its healthy neighbours; NaN, gaps and resumption."""

import io
import math

import pytest
import torch

from fastclip.monitor import Event, Record, default_detectors, detectors
from fastclip.monitor.detectors.trailing_window import Window
from helpers.records import INF, NAN, clipped, healthy, labels, lognormal, numbers, seeded, told, wild


def steps_of(events):
    return [event.step for event in events]


# What all share.


def test_a_window_is_that_of_the_definition():
    rng, window, kept = seeded(), Window(9), []
    for _ in range(200):
        value = rng.choice([NAN, INF, -INF, rng.gauss(0, 1), 0.5])
        window.add(value)
        kept = (kept + [value] * math.isfinite(value))[-9:]
        assert window.values() == kept and len(window) == len(kept)
        if kept:
            ordered = torch.tensor(kept, dtype=torch.float64)
            for q in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
                assert window.quantile(q) == pytest.approx(ordered.quantile(q).item())
            assert (window.smallest(), window.largest()) == (min(kept), max(kept))
            assert window.count_from(0.5) == sum(value >= 0.5 for value in kept)


class Always(detectors.Detector):
    kind = "always"
    SUBJECT = ("who",)

    def check(self, record):
        severity = {1.0: "warning", 2.0: "error"}.get(record.loss)
        return self.event(record, severity, "", who=record.rank) if severity else None


def test_an_event_that_lasts_is_told_every_hundred_steps():
    assert steps_of(told(Always(), [Record(s, loss=1.0) for s in range(250)])) == [0, 100, 200]


def test_an_event_that_comes_back_becomes_worse_or_is_of_another_rank_is_told():
    def run(*steps):
        return steps_of(told(Always(), [Record(step, loss=loss, rank=rank) for step, loss, rank in steps]))

    assert run((0, 1.0, 0), (5, 1.0, 0), (15, 1.0, 0), (26, 1.0, 0)) == [0, 26]  # over 10 steps apart
    assert run((0, 1.0, 0), (1, 2.0, 0), (2, 2.0, 0), (3, 1.0, 0)) == [0, 1]
    assert run((0, 1.0, 0), (1, 1.0, 3), (2, 1.0, 0), (3, 1.0, 3)) == [0, 1]
    assert run((50, 1.0, 0), (3, 1.0, 0), (4, 1.0, 0)) == [50, 3]  # the run began anew


@pytest.mark.parametrize("seed", range(3))
def test_resumed_at_every_tenth_step(seed):
    def run(resume_every):
        rng, listed, events = seeded(seed), default_detectors(num_classes=10), []
        for step in range(800):
            if resume_every and step % resume_every == 0:
                file = io.BytesIO()
                torch.save([d.state_dict() for d in listed], file)
                file.seek(0)
                listed = default_detectors(num_classes=10)
                for detector, state in zip(listed, torch.load(file, weights_only=True), strict=True):
                    detector.load_state_dict(state)
            events += map(repr, told(listed, [wild(rng, step)]))
        return events

    events = run(0)
    assert run(10) == events
    kinds = {event.partition("'")[2].partition("'")[0] for event in events}
    assert len(kinds) >= 12, kinds


def test_tensors_may_have_the_names_of_the_state():
    one, other = detectors.BatchShift(), detectors.BatchShift()
    rng = seeded()
    run = [Record(s, batch={"window": labels(rng), "values": numbers(rng)}) for s in range(40)]
    told(one, run)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()


def test_a_state_of_something_else_is_refused():
    detector = detectors.NormGrowth()
    before = detector.state_dict()
    with pytest.raises(ValueError, match="state of NormGrowth to hold"):
        detector.load_state_dict(detectors.ClipShare().state_dict())
    assert detector.state_dict() == before


def test_nothing_raises_and_nothing_is_poisoned():
    """After 2,000 steps of anything, each detector still sees what it is for."""
    rng, listed = seeded(7), default_detectors(num_classes=10)
    told(listed, [wild(rng, s) for s in range(2000)])
    told(listed, [Record(s) for s in range(2000, 2100)])
    for detector in listed:
        assert "nan" not in str(detector.state_dict()) and "inf" not in str(detector.state_dict())
    events = told(listed, [healthy(rng, s) for s in range(2100, 2900)])
    assert all(e.step < 2500 for e in events), events
    last = healthy(rng, 2900, norm=40.0, loss=90.0)
    last.batch["0"] = numbers(rng, mean=50.0)
    assert {e.kind for e in told(listed, [last])} == {"norm_spike", "loss_spike", "batch_shift"}


@pytest.mark.parametrize("name", ["loss", "total_norm", "loss_scale", "param_norm"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_bad_value_changes_nothing_later(name, value):
    """The state after a step with NaN is that without the step, but for what was told."""
    one, other = default_detectors(), default_detectors()
    rng = seeded()
    run = [healthy(rng, s) for s in range(200)]
    bad = Record(100, **{name: value})
    told(one, run[:100])
    events = told(one, [bad])
    assert events and events[0].severity == "error"
    told(one, run[101:])
    told(other, run[:100] + run[101:])
    for a, b in zip(one, other, strict=True):
        assert {**a.state_dict(), "told": 0} == {**b.state_dict(), "told": 0}, a.kind


# Norms and loss.


def test_norm_growth_needs_two_steps():
    rng = seeded()
    norms = [lognormal(rng, 0.1) for _ in range(200)]
    norms[150], norms[170], norms[171] = 5.0, 2.6, 2.6
    (event,) = told(detectors.NormGrowth(), [clipped(s, n) for s, n in enumerate(norms)])
    assert event.step == 171 and event.values["total_norm"] == 2.6
    assert event.values["median"] == pytest.approx(1.0, abs=0.1)
    assert "for 2 steps in a row" in event.message


def test_norm_growth_in_the_beginning():
    """A divergence at step 40 is seen, though the window is not full."""
    rng = seeded()
    norms = [lognormal(rng, 0.1) * max(1.0, 1.5 ** (s - 40)) for s in range(60)]
    assert 41 < told(detectors.NormGrowth(), [clipped(s, n) for s, n in enumerate(norms)])[0].step < 46


def test_norm_spike():
    rng = seeded()
    norms = [lognormal(rng, 0.2) for _ in range(200)]
    norms[100], norms[120] = 30.0, 5.0
    (event,) = told(detectors.NormSpike(), [clipped(s, n) for s, n in enumerate(norms)])
    assert event.step == 100 and event.values["z"] > 8


def test_loss_spike_in_the_beginning():
    assert steps_of(
        told(detectors.LossSpike(), [clipped(s, loss=x) for s, x in enumerate([11, 10.9, 10.8, 10.8, 30])])
    ) == [4]
    assert (
        told(detectors.LossSpike(), [clipped(s, loss=x) for s, x in enumerate([2, 4, 1, 3, 6, 5, 8])]) == []
    )


def test_nonfinite_is_told_three_times_and_then_every_hundredth():
    run = [Record(s, loss=NAN if 5 <= s < 230 else 1.0) for s in range(240)]
    events = told(detectors.NonFinite(), run)
    assert steps_of(events) == [5, 6, 7, 104, 204] and events[0].severity == "error"


@pytest.mark.parametrize(
    "fields, severity, words",
    [
        ({"loss": INF}, "error", "the loss is inf"),
        ({"loss": NAN, "loss_scale": 4.0, "applied": False}, "error", "the step was left out"),
        ({"nan_count": 2, "loss_scale": 4.0, "applied": False}, "info", "hold 2 NaN and 0 Inf"),
        ({"inf_count": 1, "loss_scale": 4.0, "applied": True}, "error", "hold 0 NaN and 1 Inf"),
        ({"inf_count": 1, "applied": False}, "error", "left out"),
        ({"total_norm": INF}, "error", "though every element is finite"),
        ({"param_norm": NAN}, "error", "the model is lost"),
        (
            {"nan_count": 1, "worst": [{"name": "w"}, {"name": "v", "nan_count": 1}]},
            "error",
            "most of them in v",
        ),
    ],
)
def test_nonfinite(fields, severity, words):
    (event,) = told(detectors.NonFinite(), [Record(3, **fields)])
    assert event.severity == severity and words in event.message


def test_every_exception_is_told():
    run = [Record(s, error="ValueError: no" if s in (3, 4) else None) for s in range(9)]
    assert steps_of(told(detectors.Failed(), run)) == [3, 4]


# Loss scale.


def scaled(scales, first=0, overflows=0):
    """As a scaler does it: a step that overflows is seen with the scale it had."""
    run = []
    for step, (scale, overflow) in enumerate(scales, start=first):
        overflows += overflow
        run.append(Record(step, loss_scale=scale, overflows=overflows, applied=not overflow))
    return run


def search(start, end):
    halvings = int(math.log2(start / end))
    return [(start / 2**i, True) for i in range(halvings)] + [(end, False)] * 50


@pytest.mark.parametrize("start, end", [(65536.0, 4096.0), (65536.0, 8192.0), (2.0**32, 65536.0)])
def test_a_search_for_the_scale_is_healthy(start, end):
    later = [
        (end / 2, True),
        *[(end / 2, False)] * 30,
        (end / 4, True),
        *[(end / 4, False)] * 30,
        (end, False),
    ]
    assert told(detectors.LossScale(), scaled(search(start, end) + later)) == []


def test_a_scale_that_collapses():
    calm = [(65536.0, False)] * 50
    events = told(detectors.LossScale(), scaled(calm + search(65536.0, 2.0**-8)))
    assert [(e.step, e.severity) for e in events][:2] == [(54, "warning"), (67, "error")]
    every_second = [(65536.0 / 2 ** (i // 2), i % 2 == 0) for i in range(20)]
    assert told(detectors.LossScale(), scaled(calm + every_second))[0].step == 60  # a 32nd
    never = told(detectors.LossScale(), scaled(search(65536.0, 2.0**-4)))
    assert [(e.step, e.severity) for e in never] == [(5, "warning"), (17, "error")]
    assert "no step has been made yet" in never[0].message and "below 1" in never[1].message
    assert told(detectors.LossScale(), scaled(search(2.0**32, 2.0**4)))[0].step == 21
    assert told(detectors.LossScale(), [Record(0, loss_scale=0.0)])[0].severity == "error"


def test_an_event_equals_its_dict():
    event = Event("k", 3, "error", "m", {"a": 1}, 2)
    assert Event.from_dict(event.to_dict() | {"later": 1}) == event
