# SPDX-License-Identifier: BSD-3-Clause
"""Records of made-up trainings and of two real ones, for the tests of the detectors."""

import csv
import gzip
import math
import random
from pathlib import Path

from fastclip.monitor import Record, default_detectors

NAN, INF = float("nan"), float("inf")

# A public spike: chronicle of BLOOM-176B by bigscience, 2022-04-12, iterations 31214 to 31219, Apache-2.0.
BLOOM_NORMS = (0.242, 0.947, 2.39, 15.9, 145.0, 960.0)
BLOOM_LOSSES = (2.20, 2.22, 2.60, 2.24, 2.35, 5.10)
BLOOM_FIRST = 31214


def gpt2() -> list[tuple[int, float, float, float]]:
    """Return (step, loss, learning rate, norm) of a healthy training; the file's comments name the source."""
    path = Path(__file__).parents[1] / "data" / "gpt2_124m_train.csv.gz"
    with gzip.open(path, "rt") as file:
        lines = csv.reader(line for line in file if not line.startswith("#"))
        next(lines)
        return [(int(s), float(loss), float(lr), float(norm)) for s, loss, lr, norm in lines]


def clipped(step, norm=None, max_norm=1.0, **fields) -> Record:
    """Return a record whose clip coefficient follows from its norm."""
    coef = None if norm is None or max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return Record(step=step, total_norm=norm, max_norm=max_norm, clip_coef=coef, **fields)


def detect(detectors, records):
    """Return the events that one detector or a list of them reports over records."""
    listed = detectors if isinstance(detectors, list) else [detectors]
    return [event for r in records for d in listed if (event := d.update(r)) is not None]


def watched(records, num_classes=None):
    """Add the events of all default detectors to the records, as a monitor does, and return the records."""
    detectors = default_detectors(num_classes)
    for record in records:
        record.events = detect(detectors, [record])
    return records


def lognormal(rng, sigma, middle=1.0):
    return middle * math.exp(rng.gauss(0.0, sigma))


def histogram(rng, n, classes, weights=None):
    counts = [0] * min(classes, 64)
    for value in rng.choices(range(classes), weights, k=n):
        counts[value % 64] += 1
    while counts and not counts[-1]:
        counts.pop()
    return counts


def numbers(rng, n=32, mean=0.0, std=1.0, **changes):
    """Return the monitor's batch statistics of an input tensor of n samples with 100 numbers each."""
    tensor = {"shape": [n, 100], "dtype": "float32", "mean": mean + rng.gauss(0.0, std / math.sqrt(100 * n))}
    tensor |= {"min": mean - 3.5 * std, "max": mean + 3.5 * std, "std": std, "nan": 0, "inf": 0, "empty": 0}
    return tensor | changes


def labels(rng, n=32, classes=10, weights=None, **changes):
    counts = histogram(rng, n, classes, weights)
    top = len(counts) - 1 if classes <= 64 else classes - 1 - rng.randrange(max(1, 2 * classes // n))
    return {"shape": [n], "dtype": "int64", "min": 0, "max": top, "histogram": counts} | changes


def healthy(rng, step, rank=0, **changes) -> Record:
    """Return a record that has every field and shows nothing wrong."""
    norm = lognormal(rng, 0.2, 0.4)
    fields = {
        "rank": rank,
        "time": 1.7e9 + step,
        "step_time": 0.1,
        "loss": 2.0 + rng.gauss(0.0, 0.05),
        "lr": [1e-3 * min(1.0, (step + 1) / 50)],
        "loss_scale": 1024.0,
        "applied": True,
        "param_norm": 30.0 if step % 50 == 0 else None,
        "worst": [{"name": "head.weight", "norm": norm * 0.8, "nan_count": 0, "inf_count": 0}],
        "update_ratio": {"head.weight": 1e-3, "body.weight": 2e-3} if step % 50 == 0 else {},
        "activations": {} if step % 10 else {"body": {"mean": 0.0, "rms": 1.0, "max": 4.0, "nonfinite": 0}},
        "batch": {"0": numbers(rng), "1": labels(rng)},
        "token_ids": {"embedding": {"outside": 0, "size": 100, "min": 1, "max": 99}},
        "sample_ids": [f"r{rank}s{32 * step + i}" for i in range(32)],
        "memory": {"resident": 10**9 + rng.randrange(10**6)} if step % 10 == 0 else {},
        "ranks": {
            "loss": [2.0 + rng.gauss(0.0, 0.05) for _ in range(4)],
            "batch_nonfinite": [0.0] * 4,
            "seconds": [0.1 + 0.01 * rng.random() for _ in range(4)],
        },
    }
    return clipped(step, **({"norm": norm} | fields | changes))


def bad_gradients(name="body.weight", nan=3, inf=0):
    """Return the fields of a step whose gradients are not finite."""
    worst = [{"name": name, "norm": NAN, "nan_count": nan, "inf_count": inf}]
    return {"norm": NAN, "nan_count": nan, "inf_count": inf, "worst": worst}


def wild(rng, step) -> Record:
    """Return a record of anything: missing fields, spikes, shifts, NaN and Inf; a new run every 400 steps."""
    phase = step % 400
    norm = lognormal(rng, 0.2, 0.4 * math.exp(max(0, phase - 300) / 30)) * rng.choice([1.0] * 40 + [30.0])
    record = healthy(rng, step, norm=norm, loss=2.0 + rng.gauss(0, 0.05) + rng.choice([0.0] * 40 + [5.0]))
    if record.memory:
        record.memory = {"resident": 10**9 + 10**6 * step}
    if record.update_ratio and phase >= 200:
        record.update_ratio = {"head.weight": 0.5, "body.weight": 0.4}
    if rng.random() < 0.02:
        record.batch["0"] |= {"nan": 3, "mean": NAN, "std": NAN}
        record.token_ids["embedding"] |= {"outside": 2, "max": 105}
    if 124 <= phase <= 136:
        record.loss = NAN
    if phase >= 350:
        record.ranks["seconds"][2] *= 3

    def spoilt(value):
        if isinstance(value, bool) or value is None or isinstance(value, str):
            return value
        if isinstance(value, float):
            return (
                rng.choice([NAN, INF, -INF, 0.0, -value, 1e3 * value, 1e30]) if rng.random() < 0.03 else value
            )
        if isinstance(value, dict):
            return {k: spoilt(item) for k, item in value.items() if rng.random() > 0.02}
        return [spoilt(item) for item in value] if isinstance(value, list) else value

    for name, value in vars(record).items():
        if name not in ("step", "events", "sample_ids"):
            setattr(record, name, spoilt(value))
    record.overflows = step // 40 * 6 + min(6, step % 40)
    record.nan_count = rng.choice([0] * 20 + [5])
    record.error = rng.choice([None] * 30 + ["RuntimeError: no"])
    if step // 70 % 2:
        record.batch["1"] = labels(rng, weights=[9, 9, 9, 1, 1, 1, 1, 1, 1, 1])
    if rng.random() < 0.1:
        for name in rng.sample(("loss", "total_norm", "clip_coef", "max_norm", "loss_scale", "applied"), 2):
            setattr(record, name, None)
    if rng.random() < 0.1:
        record.batch, record.ranks, record.lr = {}, {}, []
    return record


def seeded(seed=0) -> random.Random:
    return random.Random(seed)
