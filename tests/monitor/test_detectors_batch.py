# SPDX-License-Identifier: BSD-3-Clause
"""Detectors of batches, activations, weights, memory and other processes: reports and silence."""

import math

import pytest

from fastclip.monitor import Record, detectors
from fastclip.monitor.detectors.data import stability_index
from helpers.records import INF, NAN, detect, histogram, labels, lognormal, numbers, seeded


def batch_events(make, count=400, seeds=3, detector=detectors.BatchShift):
    """Return the events of a detector over batches with one tensor, made from (rng, step)."""
    events = []
    for seed in range(seeds):
        rng = seeded(seed)
        run = [Record(s, batch={"x": make(rng, s)}, sample_ids=[f"id{s}"]) for s in range(count)]
        events += detect(detector(), run)
    return events


def test_stability_index_matches_its_definition():
    p, q = [60.5 / 101, 40.5 / 101], [10.5 / 41, 30.5 / 41]
    expected = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert stability_index([60, 40, 0], [10, 30, 0]) == pytest.approx((expected, 1 / 101 + 1 / 41))
    assert stability_index([0, 0], [1, 2]) == stability_index([1, 2], [0, 0]) == (0.0, 0.0)


def test_stability_index_returns_its_mean_by_chance():
    rng = seeded()
    reference = histogram(rng, 100000, 10)
    pairs = [stability_index(reference, histogram(rng, 500, 10)) for _ in range(300)]
    assert sum(psi for psi, _ in pairs) / 300 == pytest.approx(pairs[0][1], rel=0.1)


def documents(rng, step):
    """Return the statistics of eight documents with a vocabulary each: far from independent tokens."""
    counts = [0] * 64
    for _ in range(8):
        words = [rng.randrange(64) for _ in range(12)]
        for word in rng.choices(words, [1 / (i + 1) for i in range(12)], k=128):
            counts[word] += 1
    return {"shape": [8, 128], "min": 0, "max": 50000, "histogram": counts}


def epoch_end(step):
    """Return the number of samples: the last batch of each epoch of 50 steps has 1 instead of 32."""
    return 1 if step % 50 == 49 else 32


HEALTHY = {
    "10 classes": lambda rng, s: labels(rng, epoch_end(s)),
    "10 classes, batches of 8": lambda rng, s: labels(rng, 8),
    "1000 classes": lambda rng, s: labels(rng, epoch_end(s), 1000),
    "rare classes": lambda rng, s: labels(rng, 16, 20, [2.0**-i for i in range(20)]),
    "documents": documents,
    "one document": lambda rng, s: (
        labels(rng, 400, 64, [rng.random() ** 6 for _ in range(64)]) | {"shape": [1, 400]}
    ),
    "images": lambda rng, s: numbers(rng, n := epoch_end(s), rng.gauss(0, 0.5 / math.sqrt(n))),
    "a mask": lambda rng, s: numbers(rng, mean=1.0, std=0.0) if s < 100 else numbers(rng, mean=0.9, std=0.3),
    "long tails": lambda rng, s: numbers(
        rng, mean=lognormal(rng, 0.3), std=2.0, max=lognormal(rng, 0.6, 30.0)
    ),
    "lengths of texts": lambda rng, s: numbers(rng) | {"shape": [1, int(lognormal(rng, 0.8, 300.0)) + 1]},
    "numbers of samples": lambda rng, s: labels(rng) | {"max": 32 * s + 31},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_batch_shift_is_silent_on_healthy_batches(name):
    assert batch_events(HEALTHY[name]) == []


SHIFTS = {
    "distribution": lambda rng, s: labels(
        rng, 32, 10, [20, 20, 1, 1, 1, 1, 1, 1, 1, 1] if s >= 200 else None
    ),
    "mean": lambda rng, s: numbers(rng, mean=2.0 if s >= 200 else 0.0),
    "peak": lambda rng, s: numbers(rng, max=200.0 if s >= 200 else 4.0),
    "length": lambda rng, s: numbers(rng) | {"shape": [8, 8192 if s >= 200 else rng.randrange(200, 600)]},
    "labels": lambda rng, s: labels(rng) | {"max": 200 if s >= 200 else rng.choice([8, 9])},
}


@pytest.mark.parametrize("problem", SHIFTS)
def test_batch_shift_reports_a_shift_at_once(problem):
    events = batch_events(SHIFTS[problem], seeds=1)
    assert events[0].step in range(200, 203) and events[0].values["problem"] == problem
    assert events[0].values["sample_ids"] == [f"id{events[0].step}"]
    assert len(events) <= 5


def test_batch_shift_reports_documents_in_another_language():
    def languages(rng, step):
        batch = documents(rng, step)
        return batch if step < 200 else batch | {"histogram": histogram(rng, 1024, 8)}

    assert batch_events(languages, seeds=1)[0].step == 200


def test_batch_shift_reports_an_outlier_after_an_outlier():
    peaks = batch_events(lambda rng, s: numbers(rng, max=1e6 if s in (200, 230) else 4.0), seeds=1)
    assert [e.step for e in peaks] == [200, 230]


# Batches that are bad without comparison.


def bad(tensors, before=0, num_classes=10, **fields):
    run = [Record(s, batch={"x": numbers(seeded())}) for s in range(before)]
    return detect(detectors.BadBatch(num_classes), [*run, Record(before, batch=tensors, **fields)])


@pytest.mark.parametrize(
    "tensors, problem, words",
    [
        ({"x": {"shape": [4, 2], "nan": 2, "inf": 1}}, "nonfinite", "x holds 2 NaN and 1 Inf"),
        ({"x": {"shape": [0, 2]}}, "no_elements", "no elements"),
        ({"y": {"shape": [2], "max": 10, "histogram": [1, 0, 1]}}, "labels", "reach 10, but there are 10"),
    ],
)
def test_bad_batch_reports_the_problem_and_the_samples(tensors, problem, words):
    (event,) = bad(tensors, sample_ids=["a", "b"])
    assert event.severity == "error" and event.values["problem"] == problem and words in event.message
    assert event.values["sample_ids"] == ["a", "b"]


def test_bad_batch_reports_token_ids_out_of_range():
    (event,) = bad(
        {}, token_ids={"wte": {"outside": 1, "size": 50, "min": -1, "max": 49}, "wpe": {"outside": 0}}
    )
    assert "outside 0 to 49: they range from -1 to 49" in event.message and event.values["module"] == "wte"


def test_bad_batch_reports_constant_samples_where_there_were_none():
    assert bad({"x": numbers(seeded(), empty=1)}, before=20)[0].values["problem"] == "constant"
    assert bad({"x": numbers(seeded(), empty=1)}, before=5) == []


def test_bad_batch_does_not_take_sample_indices_for_labels():
    detector, rng = detectors.BadBatch(10), seeded()
    run = [Record(s, batch={"i": labels(rng) | {"max": 99 + s}, "y": labels(rng)}) for s in range(20)]
    assert detect(detector, run) == []
    (event,) = detect(detector, [Record(20, batch={"i": labels(rng, max=99), "y": labels(rng, max=12)})])
    assert event.values["tensor"] == "y"


# Activations: every tenth step.


def active(values, **fields):
    run = []
    for i, value in enumerate(values):
        sample = {"rms": value, "max": 4 * value, "nonfinite": 0} if not isinstance(value, dict) else value
        run.append(Record(10 * i, activations={"m": sample}, **fields))
    return detect(detectors.Activations(), run)


def test_activations_reports_explosion_and_death():
    rng = seeded()
    calm = [lognormal(rng, 0.2) for _ in range(30)]
    (event,) = active([*calm, 20.0])
    assert event.step == 300 and "times its usual" in event.message
    assert active([*calm, *(1.5**i for i in range(12))])[0].step <= 370  # 4 % a step
    assert active([*calm, 0.0, 0.0, 0.0, 0.0])[0].step == 320
    assert active([*calm, 0.0, 0.0, 1.0]) == []
    infinite = {"rms": 1.0, "max": 4.0, "nonfinite": 3}
    assert active([*calm, infinite])[0].severity == "error"
    assert active([1.0, 1.0, 20.0, 400.0, 8000.0])[0].step == 30  # within the first samples


def test_activations_is_silent_on_healthy_ones():
    sampled = [0, 1, 2, 4, 8, 10, 16, 20, 30, 32, *range(40, 600, 10)]
    assert active([1e-6 * step**2 for step in sampled]) == []  # zero-initialised, in a warm-up
    assert active([1.0 + 3.0 * min(1.0, step / 200) for step in sampled]) == []
    assert active([0.0] * 30) == []  # a branch that is off
    assert active([{"rms": 0.0, "max": 0.0, "nonfinite": 64}] * 10, loss=1.0) == []  # of a mask
    assert active([{"rms": 0.0, "max": 0.0, "nonfinite": 64}], loss=NAN)[0].severity == "error"
    assert active([{}, {"rms": NAN}, {"max": INF}, {"nonfinite": NAN}] * 5) == []


# Update ratios: steps 0, 1, 2, 4, ... and every 50.

SAMPLED = [0, 1, 2, 4, 8, 16, 32, *range(50, 500, 50)]


def moving(ratios, lr=1e-3, **fields):
    run = [Record(s, update_ratio=ratios(s), lr=[lr], **fields) for s in SAMPLED]
    return detect(detectors.UpdateRatio(), run)


def test_update_ratio_reports_too_large_and_too_small_ones():
    (event, *_) = moving(lambda s: {"a": 0.5 if s >= 100 else 0.01, "b": 0.3, "c": 0.01 if s < 100 else 0.9})
    assert (
        event.step == 100 and event.values["parameter"] == "c" and "at learning rate 0.001" in event.message
    )
    assert moving(lambda s: {"a": 50.0, "b": 50.0})[0].step == 0
    assert moving(lambda s: {"a": 0.0, "b": 1e-10})[0].step == 2


def test_update_ratio_is_silent_on_healthy_ones():
    def lora(step):
        return {"a": 0.01, "b": INF if step == 0 else 1 / step}

    assert moving(lora) == []
    assert moving(lambda s: {"b": lora(s)["b"]}) == []
    assert moving(lambda s: {"head": 0.002, "frozen.1": 0.0, "frozen.2": 0.0}) == []
    assert moving(lambda s: {"head": 0.5, "frozen.1": 0.0, "frozen.2": 0.0})[0].step == 0
    assert moving(lambda s: {"a": 0.0}, lr=0.0) == moving(lambda s: {"a": 1e-11}, lr=1e-9) == []
    assert moving(lambda s: {"a": 0.0}, applied=False) == moving(lambda s: {"a": NAN}) == []
    assert moving(lambda s: {"a": 0.03 / (1 + s / 10)}) == []


# Memory: every tenth step.


def growing(sizes):
    run = [Record(10 * i, memory={"allocated": 2**30, "resident": int(m)}) for i, m in enumerate(sizes)]
    return detect(detectors.MemoryGrowth(), run)


def test_memory_growth_reports_a_leak_and_no_cache():
    rng = seeded()
    leak = [1e9 * (1 + i / 200) + rng.random() * 1e7 for i in range(200)]
    events = growing(leak)
    assert [e.step for e in events] == [590, 1090, 1590] and events[0].values["memory"] == "resident"
    assert growing(1e9 * (1 + 0.5 * (1 - 0.9985 ** (10 * i))) for i in range(200)) == []  # a cache that fills
    assert growing(1e9 + rng.random() * 5e8 for _ in range(300)) == []
    assert growing(1e9 * (1 + 0.3 * (i > 100)) for i in range(300)) == []


# Other processes.


def ranked(make, count=400, seed=0):
    rng = seeded(seed)
    return detect(detectors.RankDiffers(), [Record(s, ranks=make(rng, s)) for s in range(count)])


def test_rank_differs_reports_a_high_loss_and_a_slow_rank():
    def noisy(rng, step, worse=2.5):
        losses = [lognormal(rng, 0.3) for _ in range(4)]
        losses[2] *= worse if step >= 100 else 1.0
        return {"loss": losses}

    (event, *_) = ranked(noisy)
    assert 115 < event.step < 160 and event.rank == event.values["differing_rank"] == 2
    slow = ranked(lambda rng, s: {"seconds": [0.1, 0.1, 0.1, 0.1 + 0.1 * (s >= 100)]})
    assert slow[0].step == 119 and slow[0].rank == 3 and "step time" in slow[0].message


def test_rank_differs_is_silent_on_chance_differences():
    assert ranked(lambda rng, s: {"loss": [lognormal(rng, 1.0) for _ in range(2)]}, 5000) == []
    assert ranked(lambda rng, s: {"loss": [lognormal(rng, 1.0) for _ in range(8)]}, 5000) == []
    assert ranked(lambda rng, s: {"loss": [rng.gauss(0, 1) for _ in range(4)]}, 2000) == []
    assert ranked(lambda rng, s: {"seconds": [0.1 if s % 10 else 0.5, 0.1]}) == []
    assert ranked(lambda rng, s: {"loss": [NAN, NAN], "batch_nonfinite": [2.0, 1.0]}) == []
    assert ranked(lambda rng, s: {"loss": [1.0], "seconds": []}) == []


@pytest.mark.parametrize("ranks", [{"loss": [1.0, 1.0, NAN]}, {"batch_nonfinite": [0.0, 0.0, 4.0]}])
def test_rank_differs_reports_a_rank_with_nan(ranks):
    (event,) = ranked(lambda rng, s: ranks, count=1)
    assert event.severity == "error" and event.rank == 2
