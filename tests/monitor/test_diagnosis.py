# SPDX-License-Identifier: BSD-3-Clause
"""Diagnosis of events, recommendation of a max_norm, and the overview of a run."""

import pytest

from fastclip.monitor import Event, Record, diagnose, recommend
from fastclip.monitor.diagnosis.overview import run_overview
from fastclip.monitor.diagnosis.recommend import next_lower, warm_up_steps
from helpers.records import (
    INF,
    NAN,
    bad_gradients,
    clipped,
    healthy,
    labels,
    lognormal,
    numbers,
    seeded,
    watched,
)


def run(last=100, start=0, num_classes=10, lr=None, rank=0, **fields):
    """Return the records of a run that is healthy up to its last step, which has these fields."""
    rng = seeded()
    changes = {} if lr is None else {"lr": [lr]}
    records = [healthy(rng, s, rank, **changes) for s in range(start, last)]
    batch = {"0": numbers(rng), "1": labels(rng)} | fields.pop("batch", {})
    return watched([*records, healthy(rng, last, rank, batch=batch, **(changes | fields))], num_classes)


NAN_LOSS = bad_gradients() | {"loss": NAN}
SPIKE = {"loss": 30.0, "norm": 50.0}

# By cause: its area and a run that has it.
CAUSES = {
    "nonfinite_batch": ("data", lambda: run(batch={"0": numbers(seeded(), nan=7)}, **NAN_LOSS)),
    "token_ids": (
        "data",
        lambda: run(
            token_ids={"e": {"outside": 2, "size": 9, "min": 0, "max": 12}}, error="IndexError: index"
        ),
    ),
    "labels": ("data", lambda: run(batch={"1": labels(seeded(), max=12)}, error="IndexError: Target 12")),
    "empty_batch": ("data", lambda: run(batch={"0": {"shape": [0, 100]}}, **NAN_LOSS)),
    "empty_samples": ("data", lambda: run(batch={"0": numbers(seeded(), empty=3)}, **SPIKE)),
    "length": ("data", lambda: run(batch={"0": numbers(seeded()) | {"shape": [32, 4096]}}, **SPIKE)),
    "label_shift": ("data", lambda: run(batch={"1": labels(seeded(), 512, 10, [1] + [0] * 9)}, **SPIKE)),
    "input_shift": ("data", lambda: run(batch={"0": numbers(seeded(), mean=9.0)}, **SPIKE)),
    "outlier": ("data", lambda: run(batch={"0": numbers(seeded(), max=1e5)}, **SPIKE)),
    "rank_nonfinite": ("data", lambda: run(ranks={"loss": [1.0, NAN, 1.0]}, **NAN_LOSS)),
    "learning_rate": ("rate", lambda: run(update_ratio={"a": 0.9, "b": 0.8}, **SPIKE)),
    "vanishing_updates": ("rate", lambda: still()),
    "no_warm_up": ("rate", lambda: run(lr=0.1, **SPIKE)),
    "rising_rate": ("rate", lambda: rising()),
    "clipping": ("rate", lambda: always_clipped()),
    "loss_scale": ("amp", lambda: collapsing()),
    "float16_range": ("amp", lambda: run(start=1000, last=1100, activations={"ffn": top(4e4)}, **NAN_LOSS)),
    "activations": (
        "model",
        lambda: run(start=1000, last=1100, loss_scale=None, activations={"body": top(90)}, **SPIKE),
    ),
    "nonfinite_gradients": ("model", lambda: run(start=1000, last=1100, **NAN_LOSS)),
    "largest_gradients": ("model", lambda: run(start=1000, last=1100, **SPIKE)),
    "memory": ("system", lambda: leaking()),
    "rank": ("system", lambda: slow()),
    "unknown": (None, lambda: run(start=1000, last=1100, norm=None, worst=[], loss=30.0)),
}


def top(largest):
    return {"mean": 0.0, "rms": largest / 4, "max": largest, "nonfinite": 0}


def still():
    rng = seeded()
    ratios = {"update_ratio": {"a": 0.0, "b": 1e-11}}
    return watched([healthy(rng, s, **ratios, applied=True, lr=[1e-3]) for s in range(1000, 1030)])


def rising():
    rng = seeded()
    calm = [healthy(rng, s, lr=[1e-5 * (s - 999)]) for s in range(1000, 1100)]
    return watched([*calm, healthy(rng, 1100, lr=[1e-3], **SPIKE)])


def always_clipped():
    rng = seeded()
    return watched([healthy(rng, s, norm=lognormal(rng, 0.2, 5.0)) for s in range(1000, 1300)])


def collapsing():
    rng = seeded()
    records = [healthy(rng, s) for s in range(1000, 1100)]
    for i in range(30):
        scale = 1024.0 / 2**i
        records.append(
            healthy(rng, 1100 + i, loss_scale=scale, overflows=i, applied=False, **bad_gradients("w"))
        )
    return watched(records)


def leaking():
    rng = seeded()
    return watched(
        [healthy(rng, s, memory={"resident": 10**9 + 10**6 * s} if s % 10 == 0 else {}) for s in range(700)]
    )


def slow():
    rng = seeded()
    seconds = {"loss": [1.0] * 3, "seconds": [0.1, 0.1, 0.3]}
    return watched([healthy(rng, s, ranks=seconds) for s in range(1000, 1060)])


@pytest.mark.parametrize("cause", CAUSES)
def test_diagnose_names_the_true_cause_first(cause):
    area, make = CAUSES[cause]
    found = diagnose({0: make()})
    assert found.event is not None and found.cause == cause, str(found)
    if area is None:
        assert not found.findings and "Nothing in the batches" in str(found)
    else:
        assert found.findings[0].area == area
        assert all(f"step {f.step}, rank {f.rank}: {f.text}" in str(found) for f in found.findings)


def test_diagnose_orders_causes_by_data_rate_model():
    found = diagnose(
        {0: run(lr=0.1, batch={"0": numbers(seeded(), nan=7)}, update_ratio={"a": 0.9}, **NAN_LOSS)}
    )
    assert [f.cause for f in found.findings] == [
        "nonfinite_batch",
        "learning_rate",
        "no_warm_up",
        "nonfinite_gradients",
    ]
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines] == ["Event", "data", "rate", "step", "model"]
    assert "holds 7 NaN and 0 Inf; samples r0s3200, r0s3201" in lines[1] and lines[1].endswith(", ...")
    assert "changes the weights by 0.9 of their norm" in lines[2] and "parameters a" in lines[2]
    assert "first step already used learning rate 0.1" in lines[3]
    assert "parameters body.weight" in lines[4]


def test_diagnose_puts_growth_before_the_loss_scale_it_collapsed():
    rng, late = seeded(), collapsing()
    steep = [healthy(rng, s, norm=0.4 * 1.3 ** (s - 80), lr=[0.1]) for s in range(80, 100)]
    early = [healthy(rng, s, lr=[0.1]) for s in range(80)]
    for record in late:
        record.step, record.events, record.lr = record.step - 1000, [], [0.1]
    found = diagnose({0: watched([*early, *steep, *late[100:]])})
    assert [f.cause for f in found.findings][:1] == ["no_warm_up"]
    assert "loss_scale" in [f.cause for f in found.findings]


def test_diagnose_ignores_a_bad_batch_of_long_ago():
    records = run(start=1000, last=1100, batch={"0": numbers(seeded(), nan=7)})
    rng = seeded(1)
    later = watched([healthy(rng, s) for s in range(1101, 1150)] + [healthy(rng, 1150, **NAN_LOSS)])
    found = diagnose({0: [*records, *later]}, later[-1].events[-1])
    assert found.cause == "nonfinite_gradients"
    assert found.warnings[0].step == 1100 and "Warned     50 steps before" in str(found)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_diagnose_names_the_rank_and_the_samples_of_a_bad_batch(bad):
    counts = [0.0, 0.0, 0.0]
    counts[bad] = 7.0
    ranks = {"loss": [NAN] * 3, "batch_nonfinite": counts, "seconds": [0.1] * 3}
    logs = {}
    for rank in range(3):
        batch = {"0": numbers(seeded(), nan=7 if rank == bad else 0)}
        logs[rank] = run(rank=rank, start=1000, last=1100, batch=batch, ranks=ranks, **NAN_LOSS)
    found = diagnose(logs)
    first = found.findings[0]
    assert (first.cause, first.rank, first.step) == ("nonfinite_batch", bad, 1100)
    assert first.sample_ids[0] == f"r{bad}s35200" and all(
        str(i).startswith(f"r{bad}s") for i in first.sample_ids
    )
    assert [f.cause for f in found.findings].count("nonfinite_batch") == 1
    for record in logs[bad]:  # what the ranks exchange is enough to find the samples
        record.events = [e for e in record.events if e.kind != "bad_batch"]
    assert diagnose(logs).findings[0].sample_ids == first.sample_ids[:64]
    # One log alone names the rank; samples only if they are its own.
    for rank in range(3):
        (first, *_) = diagnose({rank: logs[rank]}).findings
        assert first.rank == bad and bool(first.sample_ids) == (rank == bad)


def test_diagnose_accepts_sparse_records():
    assert str(diagnose({})) == str(diagnose({0: []})) == "No event: nothing to explain."
    assert diagnose({0: [Record(3)]}).cause == "unknown"
    info = Record(3, events=[Event("nonfinite", 3, "info", "m")])
    assert diagnose({0: [info]}).event is None
    for kind in (
        "loss_spike",
        "update_ratio",
        "loss_scale",
        "activations",
        "rank",
        "bad_batch",
        "x",
        "exception",
    ):
        record = Record(3, events=[Event(kind, 3, "error", "m")], worst=[{"name": "w"}], total_norm=1.0)
        assert str(diagnose({0: [record]}))
        assert str(diagnose({0: []}, record.events[0]))


# A max_norm.


def limited(norms, max_norm=1.0, lr=lambda s: 1e-3, events=()):
    records = [clipped(s, n, max_norm, lr=[lr(s)]) for s, n in enumerate(norms)]
    for step in events:
        records[step].events.append(Event("norm_spike", step, "warning", "m"))
    return records


def scattered(count, middle=0.3, sigma=0.2):
    rng = seeded()
    return [lognormal(rng, sigma, middle) for _ in range(count)]


def test_warm_up_steps_ends_with_the_rising_rate_and_the_high_norms():
    rising_rate = limited(scattered(1000), lr=lambda s: 1e-3 * min(1.0, (s + 1) / 300))
    assert 290 <= warm_up_steps(rising_rate) < 300
    high_norms = limited([5.0] * 400 + scattered(1000))
    assert 300 <= warm_up_steps(high_norms) <= 400
    found = recommend(high_norms)
    assert found.warm_up >= 300 and found.max_norm == pytest.approx(0.3 * 2.718 ** (0.2 * 1.645), rel=0.1)
    assert warm_up_steps([]) == 0 and warm_up_steps(limited([NAN], lr=lambda s: NAN)) == 0


def test_recommend_counts_the_clipped_shares():
    norms = scattered(3000)
    found = recommend(limited(norms))
    assert found.steps == 2000 and found.max_norm in found.clipped and 1.0 in found.clipped
    for limit, share in found.clipped.items():
        assert share == sum(n > limit for n in norms[1000:]) / 2000
    assert found.quantiles[0.95] == pytest.approx(sorted(norms[1000:])[1900], rel=0.01)
    assert "(proposed)" in str(found) and "(current)" in str(found)


def test_recommend_takes_the_next_lower_value_when_events_persist():
    norms = scattered(1000, middle=2.0)
    assert recommend(limited(norms, 1.0)).max_norm > 2.0
    assert recommend(limited(norms, 1.0, events=[500])).max_norm > 2.0  # one event does not persist
    found = recommend(limited(norms, 1.0, events=[500, 700]))
    assert found.max_norm == 0.5 and "persist at max_norm 1: the next lower" in found.reading[-1]
    of_the_data = limited(norms, 1.0, events=[500, 700])
    for step in (500, 700):
        of_the_data[step].events.append(Event("bad_batch", step, "error", "NaN in the batch"))
    assert recommend(of_the_data).max_norm > 2.0
    assert recommend(limited(scattered(1000), 1.0, events=[500, 700])).max_norm < 0.5  # p95 is lower still
    assert [next_lower(x) for x in (1.0, 0.5, 0.2, 0.1, 3.0, 1000.0, 0.001)] == [
        0.5,
        0.2,
        0.1,
        0.05,
        2,
        500,
        5e-4,
    ]
    changed = limited(norms, 2.0, events=[100, 200])[:500] + limited(norms, 1.0)[500:]
    assert recommend(changed).max_norm > 2.0  # they came at another limit


def test_recommend_explains_its_numbers():
    assert "mostly below 0.5" in recommend(limited(scattered(500))).reading[0]
    found = recommend(limited(scattered(500, middle=40.0, sigma=0.5)))
    assert "often reach tens or hundreds" in found.reading[0] and "100% of the steps" in found.reading[1]
    few = recommend(limited([1.0] * 20))
    assert few.max_norm is None and "20 steps" in few.reading[0] and str(few)
    assert recommend([]).max_norm is None and recommend([Record(s) for s in range(99)]).max_norm is None
    assert "norms are 0" in recommend(limited([0.0] * 200)).reading[0]
    assert recommend(limited([NAN, INF, *scattered(200)], max_norm=None)).present is None


# The overview.


def test_run_overview_shows_the_last_step_and_the_events():
    records = run(**NAN_LOSS)
    text = run_overview(records, [e for r in records for e in r.events])
    for part in (
        "step 100   rank 0",
        "loss        nan",
        "norm        nan",
        "nonfinite 1",
        "loss scale  1024",
    ):
        assert part in text, text
    assert max(map(len, text.splitlines())) <= 100 and len(text.splitlines()) <= 20
    tiny = run_overview([Record(1, loss=1.23456e-05, update_ratio={"a": 0.1})], [])
    assert "1.2346e-05" in tiny and "a step changes them by 0.1" in tiny
    assert run_overview([Record(1, loss=2.0), Record(2, worst=[{}], batch={"0": {}})], []).startswith(
        "step 2"
    )
    assert run_overview([], []) == "No step has been recorded yet."
