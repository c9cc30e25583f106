# SPDX-License-Identifier: BSD-3-Clause
"""Detectors of norms, losses and loss scales: reports, silence, NaN, gaps and resumption."""

import io
import math

import pytest
import torch

from fastclip.monitor import Event, Record, default_detectors, detectors
from fastclip.monitor.detectors.trailing_window import TrailingWindow
from helpers.records import INF, NAN, clipped, detect, healthy, labels, lognormal, numbers, seeded, wild


def steps_of(events):
    return [event.step for event in events]


# The base class and the trailing window.


def test_trailing_window_matches_its_definition():
    rng, window, kept = seeded(), TrailingWindow(9), []
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


def test_detector_reports_a_persistent_condition_every_hundred_steps():
    assert steps_of(detect(Always(), [Record(s, loss=1.0) for s in range(250)])) == [0, 100, 200]


def test_detector_reports_again_on_return_higher_severity_or_another_subject():
    def run(*steps):
        return steps_of(detect(Always(), [Record(step, loss=loss, rank=rank) for step, loss, rank in steps]))

    assert run((0, 1.0, 0), (5, 1.0, 0), (15, 1.0, 0), (26, 1.0, 0)) == [0, 26]  # over 10 steps apart
    assert run((0, 1.0, 0), (1, 2.0, 0), (2, 2.0, 0), (3, 1.0, 0)) == [0, 1]
    assert run((0, 1.0, 0), (1, 1.0, 3), (2, 1.0, 0), (3, 1.0, 3)) == [0, 1]
    assert run((50, 1.0, 0), (3, 1.0, 0), (4, 1.0, 0)) == [50, 3]  # the run was restarted


@pytest.mark.parametrize("seed", range(3))
def test_detectors_resumed_every_tenth_step_report_the_same_events(seed):
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
            events += map(repr, detect(listed, [wild(rng, step)]))
        return events

    events = run(0)
    assert run(10) == events
    kinds = {event.partition("'")[2].partition("'")[0] for event in events}
    assert len(kinds) >= 12, kinds


def test_state_dict_allows_tensors_named_like_its_keys():
    one, other = detectors.BatchShift(), detectors.BatchShift()
    rng = seeded()
    run = [Record(s, batch={"window": labels(rng), "values": numbers(rng)}) for s in range(40)]
    detect(one, run)
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()


def test_load_state_dict_refuses_the_state_of_another_detector():
    detector = detectors.NormGrowth()
    before = detector.state_dict()
    with pytest.raises(ValueError, match="state of NormGrowth to have the keys"):
        detector.load_state_dict(detectors.ClipShare().state_dict())
    assert detector.state_dict() == before


def test_detectors_survive_anything_and_still_report_afterwards():
    """After 2,000 steps of anything, each detector still reports what it is for."""
    rng, listed = seeded(7), default_detectors(num_classes=10)
    detect(listed, [wild(rng, s) for s in range(2000)])
    detect(listed, [Record(s) for s in range(2000, 2100)])
    for detector in listed:
        assert "nan" not in str(detector.state_dict()) and "inf" not in str(detector.state_dict())
    events = detect(listed, [healthy(rng, s) for s in range(2100, 2900)])
    assert all(e.step < 2500 for e in events), events
    last = healthy(rng, 2900, norm=40.0, loss=90.0)
    last.batch["0"] = numbers(rng, mean=50.0)
    assert {e.kind for e in detect(listed, [last])} == {"norm_spike", "loss_spike", "batch_shift"}


@pytest.mark.parametrize("name", ["loss", "total_norm", "loss_scale", "param_norm"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_detectors_forget_a_nonfinite_value(name, value):
    """The state after a step with NaN is that without the step, except for what was reported."""
    one, other = default_detectors(), default_detectors()
    rng = seeded()
    run = [healthy(rng, s) for s in range(200)]
    bad = Record(100, **{name: value})
    detect(one, run[:100])
    events = detect(one, [bad])
    assert events and events[0].severity == "error"
    detect(one, run[101:])
    detect(other, run[:100] + run[101:])
    for a, b in zip(one, other, strict=True):
        assert {**a.state_dict(), "told": 0} == {**b.state_dict(), "told": 0}, a.kind


# Norms and loss.


def test_norm_growth_reports_two_high_norms_in_a_row():
    rng = seeded()
    norms = [lognormal(rng, 0.1) for _ in range(200)]
    norms[150], norms[170], norms[171] = 5.0, 2.6, 2.6
    (event,) = detect(detectors.NormGrowth(), [clipped(s, n) for s, n in enumerate(norms)])
    assert event.step == 171 and event.values["total_norm"] == 2.6
    assert event.values["median"] == pytest.approx(1.0, abs=0.1)
    assert "for 2 steps in a row" in event.message


def test_norm_growth_reports_before_its_window_is_full():
    """A divergence at step 40 is reported, though the window is not full."""
    rng = seeded()
    norms = [lognormal(rng, 0.1) * max(1.0, 1.5 ** (s - 40)) for s in range(60)]
    assert 41 < detect(detectors.NormGrowth(), [clipped(s, n) for s, n in enumerate(norms)])[0].step < 46


def test_norm_spike_reports_a_single_step():
    rng = seeded()
    norms = [lognormal(rng, 0.2) for _ in range(200)]
    norms[100], norms[120] = 30.0, 5.0
    (event,) = detect(detectors.NormSpike(), [clipped(s, n) for s, n in enumerate(norms)])
    assert event.step == 100 and event.values["z"] > 8


def test_loss_spike_reports_within_the_first_steps():
    assert steps_of(
        detect(detectors.LossSpike(), [clipped(s, loss=x) for s, x in enumerate([11, 10.9, 10.8, 10.8, 30])])
    ) == [4]
    assert (
        detect(detectors.LossSpike(), [clipped(s, loss=x) for s, x in enumerate([2, 4, 1, 3, 6, 5, 8])]) == []
    )


def test_nonfinite_reports_three_times_and_then_every_hundredth_step():
    run = [Record(s, loss=NAN if 5 <= s < 230 else 1.0) for s in range(240)]
    events = detect(detectors.NonFinite(), run)
    assert steps_of(events) == [5, 6, 7, 104, 204] and events[0].severity == "error"


@pytest.mark.parametrize(
    "fields, severity, words",
    [
        ({"loss": INF}, "error", "the loss is inf"),
        ({"loss": NAN, "loss_scale": 4.0, "applied": False}, "error", "the step was skipped"),
        ({"nan_count": 2, "loss_scale": 4.0, "applied": False}, "info", "hold 2 NaN and 0 Inf"),
        ({"inf_count": 1, "loss_scale": 4.0, "applied": True}, "error", "hold 0 NaN and 1 Inf"),
        ({"inf_count": 1, "applied": False}, "error", "skipped"),
        ({"total_norm": INF}, "error", "though every element is finite"),
        ({"param_norm": NAN}, "error", "the weights are no longer finite"),
        (
            {"nan_count": 1, "worst": [{"name": "w"}, {"name": "v", "nan_count": 1}]},
            "error",
            "most of them in v",
        ),
    ],
)
def test_nonfinite_names_what_is_not_finite(fields, severity, words):
    (event,) = detect(detectors.NonFinite(), [Record(3, **fields)])
    assert event.severity == severity and words in event.message


def test_failed_reports_every_exception():
    run = [Record(s, error="ValueError: no" if s in (3, 4) else None) for s in range(9)]
    assert steps_of(detect(detectors.Failed(), run)) == [3, 4]


# Loss scale.


def scaled(scales, first=0, overflows=0):
    """Return the records of a scaler: a step that overflows has the scale before it was halved."""
    run = []
    for step, (scale, overflow) in enumerate(scales, start=first):
        overflows += overflow
        run.append(Record(step, loss_scale=scale, overflows=overflows, applied=not overflow))
    return run


def search(start, end):
    halvings = int(math.log2(start / end))
    return [(start / 2**i, True) for i in range(halvings)] + [(end, False)] * 50


@pytest.mark.parametrize("start, end", [(65536.0, 4096.0), (65536.0, 8192.0), (2.0**32, 65536.0)])
def test_loss_scale_ignores_the_search_for_a_scale(start, end):
    later = [
        (end / 2, True),
        *[(end / 2, False)] * 30,
        (end / 4, True),
        *[(end / 4, False)] * 30,
        (end, False),
    ]
    assert detect(detectors.LossScale(), scaled(search(start, end) + later)) == []


def test_loss_scale_reports_a_collapse():
    calm = [(65536.0, False)] * 50
    events = detect(detectors.LossScale(), scaled(calm + search(65536.0, 2.0**-8)))
    assert [(e.step, e.severity) for e in events][:2] == [(54, "warning"), (67, "error")]
    every_second = [(65536.0 / 2 ** (i // 2), i % 2 == 0) for i in range(20)]
    assert detect(detectors.LossScale(), scaled(calm + every_second))[0].step == 60  # a 32nd
    never = detect(detectors.LossScale(), scaled(search(65536.0, 2.0**-4)))
    assert [(e.step, e.severity) for e in never] == [(5, "warning"), (17, "error")]
    assert "no step has succeeded yet" in never[0].message and "below 1" in never[1].message
    assert detect(detectors.LossScale(), scaled(search(2.0**32, 2.0**4)))[0].step == 21
    assert detect(detectors.LossScale(), [Record(0, loss_scale=0.0)])[0].severity == "error"


def test_event_from_dict_restores_the_event():
    event = Event("k", 3, "error", "m", {"a": 1}, 2)
    assert Event.from_dict(event.to_dict() | {"later": 1}) == event
