# SPDX-License-Identifier: BSD-3-Clause
"""`python -m benchmarks.monitoring`: what the monitor adds to a training step.

The demo's language model is trained several times at once, one step of each training in turn: with torch's
clipping, with an attached optimizer alone, and with the monitor. All trainings start with the same weights
and see the same batches. The overhead of a training is the difference from the same step of its base. Steps
in which the monitor samples something take longer than others: each kind of step has its own median, and a
training's time is their mean, weighted by how often each kind occurs.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch

import fastclip
from fastclip.bench.workloads import SMOKE
from fastclip.demo.character_model import FULL, QUICK, CharacterModel, Corpus
from fastclip.monitor.measure.sampling import EARLY, is_due

from . import provenance

MAX_NORM = 1.5  # as in the demo
STEPS = 4 if SMOKE else 300
ACTIVATIONS_EVERY, WEIGHTS_EVERY = 10, 50
BASE, MONITOR = "fastclip.attach", "monitor, defaults"
ACTIVATIONS, INCIDENTS = "monitor, activations each 10 steps", "monitor, incidents"
BARS = {MONITOR: 0.02, ACTIVATIONS: 0.05, INCIDENTS: 0.01}


class TrainingCost(NamedTuple):
    """The seconds of a step of one training, and the share that it adds to a step of its base."""

    name: str
    seconds: float
    overhead: float
    base: str


class TrainingLoop:
    """A model, its optimizer and its loop; `watch` makes its monitor, if it has one."""

    def __init__(
        self, corpus: Corpus, watch: Callable[..., Any] | None, clips_by_torch: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = CharacterModel(corpus.size, corpus.padding)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=7e-4, fused=True)
        self.clips_by_torch = clips_by_torch
        self.monitor = watch(self.model, self.optimizer) if watch is not None else None
        if self.monitor is None and not clips_by_torch:
            fastclip.attach(self.optimizer, MAX_NORM)
        self.times: list[float] = []

    def step(self, batch: Any) -> None:
        begin = time.perf_counter()
        with self.monitor.batch(*batch) if self.monitor is not None else nullcontext():
            loss = self.model.loss(batch)
            if self.monitor is not None:
                self.monitor.loss(loss)
            loss.backward()
            if self.clips_by_torch:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - begin)


def average(seconds: Sequence[float], first: int) -> float:
    """Return the mean seconds of a step from the medians of each kind, starting at step `first`.

    Many of the steps before it are sampled.
    """
    kinds: dict[tuple[bool, bool], list[float]] = {}
    for step in range(first, len(seconds)):
        kind = is_due(step, ACTIVATIONS_EVERY), is_due(step, WEIGHTS_EVERY)
        kinds.setdefault(kind, []).append(seconds[step])
    count = sum(map(len, kinds.values()))
    return sum(median(times) * len(times) for times in kinds.values()) / count


def trainings(corpus: Corpus, log_dir: str) -> dict[str, TrainingLoop]:
    """Return the trainings to compare by name."""

    def watch(**options: Any) -> Callable[..., Any]:
        return lambda model, optimizer: fastclip.Monitor(
            model, optimizer, max_norm=MAX_NORM, weights_every=WEIGHTS_EVERY, **options
        )

    activations = {"activations": "leaf", "activations_every": ACTIVATIONS_EVERY}
    return {
        "torch.nn.utils.clip_grad_norm_": TrainingLoop(corpus, None, clips_by_torch=True),
        BASE: TrainingLoop(corpus, None),
        MONITOR: TrainingLoop(corpus, watch(log_dir=log_dir)),
        ACTIVATIONS: TrainingLoop(corpus, watch(log_dir=log_dir + "/2", **activations)),
        INCIDENTS: TrainingLoop(corpus, watch(log_dir=log_dir + "/3", incidents=log_dir + "/incidents")),
    }


def measure(steps: int = STEPS) -> list[TrainingCost]:
    """Make one step of each training in turn, starting with another training each time."""
    logging.getLogger("fastclip.monitor").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as log_dir:
        corpus = Corpus(QUICK if SMOKE else FULL, 0)
        runs = trainings(corpus, log_dir)
        for step in range(steps):
            batch = corpus.batch()
            order = list(runs.values())
            for run in order[step % len(order) :] + order[: step % len(order)]:
                run.step(batch)
        first = 0 if SMOKE else max(EARLY) + 1
        rows = []
        for name, run in runs.items():
            base = MONITOR if name == INCIDENTS else BASE
            # Differences of the same step, made right before or after: drift of the machine cancels out.
            added = [mine - its for mine, its in zip(run.times, runs[base].times, strict=True)]
            overhead = average(added, first) / average(runs[base].times, first)
            rows.append(TrainingCost(name, average(run.times, first), overhead, base))
        for run in runs.values():
            if run.monitor is not None:
                run.monitor.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    print("\n".join(f"{key}: {value}" for key, value in provenance.describe().items()))
    print("| training | ms a step | beside | | bar |\n|---|---|---|---|---|")
    for row in measure(options.steps):
        bar = f"{BARS[row.name]:.0%}" if row.name in BARS else ""
        print(f"| {row.name} | {row.seconds * 1e3:.2f} | {row.base} | {row.overhead:+.1%} | {bar} |")


if __name__ == "__main__":
    main()
