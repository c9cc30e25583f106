# SPDX-License-Identifier: BSD-3-Clause
"""Events inferred from a log: none in a healthy run, however few of its steps were logged."""

import math

import pytest

from fastclip.logs.inferred_events import infer_events, stride_of
from fastclip.monitor import Record, diagnose, recommend
from helpers.records import BLOOM_LOSSES, BLOOM_NORMS, INF, NAN, clipped, gpt2, lognormal, seeded


@pytest.fixture(scope="module")
def steps():
    return gpt2()


def events(records, counted=False):
    infer_events(records, counted)
    return [event for record in records for event in record.events]


def calm(count, stride=1, first=0, **fields):
    """Return the records of a run in which nothing happens, from a log without limit and counts."""
    rng = seeded()
    return [
        Record(
            first + stride * i, loss=2.2 + rng.gauss(0, 0.03), total_norm=lognormal(rng, 0.1, 0.2), **fields
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("every", [1, 2, 5, 10, 20, 50, 100, 500])
def test_infer_events_is_silent_on_every_nth_step_of_a_healthy_run(steps, every):
    for start in {0, every - 1} if every > 2 else {0}:
        rows = [clipped(s, norm, loss=loss, lr=[lr]) for s, loss, lr, norm in steps[start::every]]
        assert stride_of(rows) == every
        assert events(rows) == []


def test_infer_events_is_silent_on_mean_losses_of_a_healthy_run(steps):
    """The Trainer logs the mean loss since the row before, and the norm of the last step."""
    for every in (10, 50):
        chunks = [steps[i : i + every] for i in range(0, len(steps), every)]
        rows = [Record(c[-1][0], loss=sum(s[1] for s in c) / len(c), total_norm=c[-1][3]) for c in chunks]
        assert events(rows) == []


@pytest.mark.parametrize("every", [10, 100])
def test_infer_events_ignores_a_norm_that_creeps_over_thousands_of_steps(every):
    """Up to fourfold in the course of the run, as at the end of long trainings."""
    rows = calm(1000, every)
    for i, row in enumerate(rows):
        row.total_norm *= 1 + 3 * i / len(rows)
    assert events(rows) == []
    rows = calm(1000, 1)
    for i, row in enumerate(rows):
        row.total_norm *= 1 + 3 * i / len(rows)
    assert {e.kind for e in events(rows)} == {"norm_drift"}, "within a thousand steps it is not"


def test_infer_events_reports_a_norm_that_triples_in_a_dense_log_only():
    for every, kinds in ((100, set()), (1, {"norm_growth"})):
        rows = calm(300, every)
        for i, row in enumerate(rows):
            row.total_norm *= min(3.0, 1.03 ** max(0, i - 200))
        assert {e.kind for e in events(rows)} == kinds


@pytest.mark.parametrize("every", [1, 10, 500])
def test_infer_events_reports_the_bloom_spike_at_any_stride(every):
    rows = calm(60, every)
    for norm, loss in zip(BLOOM_NORMS, BLOOM_LOSSES, strict=True):
        rows.append(Record(rows[-1].step + every, loss=loss, total_norm=norm))
    found = events(rows)
    assert {e.kind for e in found} == {"norm_growth", "norm_spike", "loss_spike"}
    assert found[0].step == rows[-4].step and found[-1].step == rows[-1].step
    assert all(r.step == e.step for r in rows for e in r.events) and rows[-1].step == every * 65
    words = "steps" if every == 1 else "logged steps"
    assert f"of the last 62 {words}, for 2 {words} in a row" in found[0].message
    assert diagnose({0: rows}).event.step == rows[-4].step
    assert recommend(rows).max_norm is not None


@pytest.mark.parametrize("every", [1, 100])
def test_infer_events_reports_a_persistent_condition_once(every):
    rows = calm(100, every)
    for row in rows[60:70]:
        row.total_norm *= 4
    found = events(rows)
    assert [e.kind for e in found] == ["norm_growth"] and found[0].step == rows[61].step


def test_infer_events_reports_clip_share_if_the_limit_is_known():
    for every, rows in ((1, 250), (10, 60)):
        known = [clipped(every * i, 2.0, loss=2.0) for i in range(rows)]
        found = events(known)
        assert [e.kind for e in found] == ["clip_share"], every
        unknown = [Record(every * i, loss=2.0, total_norm=2.0) for i in range(rows)]
        assert events(unknown) == []


# NaN and Inf.


def test_infer_events_does_not_mention_counts_that_were_not_logged():
    rows = calm(20)
    rows[-1].total_norm, rows[-1].loss = NAN, NAN
    (event,) = events(rows)
    assert event.message == "the loss is nan; the gradient norm is nan" and event.severity == "error"
    assert not {"nan_count", "inf_count", "parameters"} & set(event.values)
    rows[-1].nan_count = 3
    (event,) = events(rows, counted=True)
    assert event.message == "the loss is nan; the gradients hold 3 NaN and 0 Inf"
    assert event.values["nan_count"] == 3


def test_infer_events_warns_of_a_nonfinite_norm_that_recovers():
    rows = calm(20)
    rows[3].total_norm, rows[15].total_norm = INF, NAN
    found = events(rows)
    assert [(e.step, e.severity) for e in found] == [(3, "warning"), (15, "warning")]
    assert found[0].message.endswith("later norms are finite, so the step was skipped or changed nothing")
    for row in rows[15:]:
        row.total_norm = NAN
    assert [(e.step, e.severity) for e in events(rows)] == [
        (3, "warning"),
        *((s, "error") for s in (15, 16, 17)),
    ]
    rows = calm(20)
    rows[3].loss = NAN
    assert [e.severity for e in events(rows)] == ["error"], "a NaN loss is not an overflow"


def scaled(scales, bad, every=1):
    rows = calm(len(scales), every)
    for i, (row, scale) in enumerate(zip(rows, scales, strict=True)):
        row.loss_scale = scale
        row.total_norm = INF if i in bad else row.total_norm
    return rows


def test_infer_events_finds_skipped_steps_from_the_loss_scale():
    """The scale is logged before the step or after it: the step with the infinite norm was skipped."""
    before = scaled([65536.0, 65536.0, 32768.0, 16384.0, 16384.0], bad=(1, 2))
    after = scaled([65536.0, 32768.0, 16384.0, 16384.0, 16384.0], bad=(1, 2))
    for rows in (before, after):
        found = events(rows)
        assert [(e.step, e.severity) for e in found] == [(1, "info"), (2, "info")], found
        assert [r.applied for r in rows] == [None, False, False, None, None]
        assert rows[-1].overflows == 2
    assert events(scaled([1024.0, 512.0, 512.0, 1024.0, 512.0], bad=())) == []


def test_infer_events_reports_a_collapsing_loss_scale():
    scales = [2.0**16] * 20 + [2.0 ** (15 - i) for i in range(20)]
    found = events(scaled(scales, bad=range(20, 40)))
    kinds = [(e.kind, e.severity) for e in found if e.kind == "loss_scale"]
    assert kinds[0] == ("loss_scale", "warning") and kinds[-1] == ("loss_scale", "error")


def test_infer_events_keeps_logged_overflows():
    rows = scaled([1024.0, 512.0, 512.0], bad=(1,))
    for row in rows:
        row.overflows = 7
    infer_events(rows)
    assert [r.overflows for r in rows] == [7, 7, 7] and rows[1].applied is None


def test_stride_of_is_the_median_distance():
    assert stride_of([]) == stride_of([Record(3, loss=1.0)]) == 1
    assert stride_of([Record(s, loss=1.0) for s in (1, 10, 20, 30, 35)]) == 10
    both = [Record(s, loss=1.0 if s % 10 == 0 else None, lr=[0.1]) for s in range(100)]
    assert stride_of(both) == 10 and math.isclose(both[1].lr[0], 0.1)
