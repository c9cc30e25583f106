# SPDX-License-Identifier: BSD-3-Clause
"""The samples of a step that make it fail: halved until a smallest failing subset is left."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from . import samples
from .build import ReplayError
from .failure import Failure
from .run_step import StepRunner
from .step_parts import BatchPart, MicroBatch, RunMode, has_batch_norm

MOST_LOSSES = 1024  # samples whose losses are taken one by one
_MOST_SUBSETS = 8  # smallest failing ones, each apart from the others
_MOST_RUNS = 300

Item = TypeVar("Item", bound=Hashable)


class DeltaDebugging:
    """Delta debugging (Zeller and Hildebrandt, 2002) on a predicate that is asked once for each subset.

    One guilty item of n is found with at most 2 log2(n) questions. After `most` questions the answers to all
    further ones are no: what is found then fails, but may not be the smallest.
    """

    def __init__(self, fails: Callable[[tuple[Any, ...]], bool], most: int = _MOST_RUNS) -> None:
        self._fails, self._most = fails, most
        self._known: dict[frozenset[Any], bool] = {}

    @property
    def asked(self) -> int:
        return len(self._known)

    def fails(self, items: Sequence[Any]) -> bool:
        key = frozenset(items)
        if key not in self._known:
            if len(self._known) >= self._most:
                return False
            self._known[key] = bool(items) and self._fails(tuple(items))
        return self._known[key]

    def smallest(self, items: Sequence[Item]) -> list[Item]:
        """A subset that fails, none of whose parts does when one item is left out. `items` must fail."""
        left, pieces = list(items), 2
        while len(left) > 1:
            chunks = _split(left, pieces)
            failing = next((chunk for chunk in chunks if self.fails(chunk)), None)
            if failing is not None:
                left, pieces = failing, 2
                continue
            rests = [[i for i in left if i not in set(chunk)] for chunk in chunks] if pieces > 2 else []
            failing = next((rest for rest in rests if self.fails(rest)), None)
            if failing is not None:
                left, pieces = failing, max(pieces - 1, 2)
            elif pieces >= len(left):
                break
            else:
                pieces = min(2 * pieces, len(left))
        return left

    def all_smallest(self, items: Sequence[Item], most: int = _MOST_SUBSETS) -> tuple[list[list[Item]], bool]:
        """Smallest failing subsets that share nothing, and whether what is left without them fails still."""
        found: list[list[Item]] = []
        left = list(items)
        while len(found) < most and self.fails(left):
            subset = self.smallest(left)
            found.append(subset)
            left = [item for item in left if item not in set(subset)]
        return found, self.fails(left)


def _split(items: list[Item], pieces: int) -> list[list[Item]]:
    edges = [len(items) * i // pieces for i in range(pieces + 1)]
    return [items[a:b] for a, b in pairwise(edges) if a < b]


@dataclass
class SampleReport:
    """What is known of the samples of a step.

    Attributes:
        count: how many there are.
        losses: of each sample alone, the worst first: id, micro_batch, index, loss, and rank.
        guilty: smallest subsets that fail, each as such entries without a loss; empty if none was looked for.
        rest_fails: whether the step fails without them too; then the samples are not its cause.
        runs: how many subsets were run.
        notes: how it was done where that matters.
    """

    count: int
    losses: list[dict[str, Any]] = field(default_factory=list)
    guilty: list[list[dict[str, Any]]] = field(default_factory=list)
    rest_fails: bool = False
    runs: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_cause(self) -> bool:
        """Whether few of the samples make the step fail, and all others do not."""
        found = sum(map(len, self.guilty))
        return bool(found) and not self.rest_fails and (found == 1 or 4 * found <= self.count)

    @property
    def has_bad_data(self) -> bool:
        """Whether a guilty sample itself holds NaN or Inf."""
        return any(sample["nonfinite"] for subset in self.guilty for sample in subset)


class SampleSearch:
    """Asks a runner about the samples of the micro-batches of one step."""

    def __init__(
        self,
        runner: StepRunner,
        micros: Sequence[MicroBatch],
        mode: RunMode,
        failure: Failure | None,
        tick: Any,
    ) -> None:
        self._runner, self._micros, self._mode, self._failure = runner, list(micros), mode, failure
        self._tick = tick
        self._items = [(m, i) for m, micro in enumerate(micros) for i in range(micro.size)]
        self._adds_up = False  # whether the loss is a sum over the samples, not a mean
        self._refused = 0
        self.report = SampleReport(len(self._items))

    def search(self) -> SampleReport:
        report = self.report
        if len(self._items) < 2:
            report.notes.append("there are not two samples to tell apart")
            return report
        self._take_losses()
        if self._failure is not None:
            self._adds_up = self._is_a_sum()
            self._find_guilty(self._failure)
        if self._refused:
            report.notes.append(
                f"{self._refused} subsets could not be run: {self._reason}; they count as good"
            )
        return report

    def _named(self, item: tuple[int, int]) -> dict[str, Any]:
        micro = self._micros[item[0]]
        name = micro.name_of(item[1])
        return {"id": name, "micro_batch": micro.micro, "index": item[1], "rank": micro.rank}

    def _parts(self, items: Sequence[tuple[int, int]]) -> list[BatchPart]:
        by_micro: dict[int, list[int]] = {}
        for m, i in items:
            by_micro.setdefault(m, []).append(i)
        found = []
        for m, indices in by_micro.items():
            micro = self._micros[m]
            whole = sorted(indices) == list(range(micro.size))
            # The gradient of each sample stays what it is in the whole batch.
            weight = 1.0 if self._adds_up else len(indices) / micro.size
            found.append(BatchPart(micro, None if whole else tuple(indices), weight))
        return found

    def _run(self, parts: list[BatchPart], mode: RunMode) -> Any:
        """The outcome, or None where the loss function takes no such subset."""
        self._tick()
        try:
            return self._runner.run(parts, mode)
        except ReplayError as error:
            self._refused += 1
            self._reason = str(error)
            return None

    # Losses.

    def _take_losses(self) -> None:
        """Without dropout, and with the running statistics of batch normalization: comparable numbers."""
        if len(self._items) > MOST_LOSSES:
            self.report.notes.append(f"losses of the first {MOST_LOSSES} of {len(self._items)} samples only")
        mode = RunMode(eval_kinds=("batch_norm", "dropout"), backward=False)
        for item in self._items[:MOST_LOSSES]:
            outcome = self._run([BatchPart(self._micros[item[0]], (item[1],))], mode)
            if outcome is not None:
                self.report.losses.append(self._named(item) | {"loss": outcome.loss})
        finite = math.isfinite
        self.report.losses.sort(key=lambda s: -s["loss"] if finite(s["loss"]) else -math.inf)
        if has_batch_norm(self._runner.built.model):
            self.report.notes.append(
                "losses of single samples are taken with batch normalization in eval mode: in training all "
                "samples of a batch share its statistics"
            )

    def _is_a_sum(self) -> bool:
        """Whether a sample that is given twice has twice the loss."""
        mode = RunMode(eval_kinds=("batch_norm", "dropout"), backward=False)
        for sample in self.report.losses[::-1]:
            if not math.isfinite(sample["loss"]) or not sample["loss"]:
                continue
            micro = next(
                m for m in self._micros if (m.micro, m.rank) == (sample["micro_batch"], sample["rank"])
            )
            twice = self._run([BatchPart(micro, (sample["index"], sample["index"]))], mode)
            if twice is not None:
                return math.isclose(twice.loss, 2 * sample["loss"], rel_tol=1e-2)
        return False

    # Guilt.

    def _find_guilty(self, failure: Failure) -> None:
        mode = self._mode
        if has_batch_norm(self._runner.built.model):
            still = RunMode(divisor=mode.divisor, eval_kinds=("batch_norm",))
            if self._is_failing(failure, self._items, still):
                mode = still
                self.report.notes.append("subsets are run with batch normalization in eval mode")
            else:
                self.report.notes.append("subsets are run with batch normalization over themselves")
        search = DeltaDebugging(lambda items: self._is_failing(failure, items, mode))
        if search.fails(self._items):
            found, self.report.rest_fails = search.all_smallest(self._items)
            self.report.guilty = [[self._described(item) for item in subset] for subset in found]
        self.report.runs = search.asked

    def _described(self, item: tuple[int, int]) -> dict[str, Any]:
        micro = self._micros[item[0]]
        bad = samples.nonfinite_in(samples.chosen(micro.batch, micro.size, [item[1]]))
        # What all samples share says nothing of this one.
        shared = samples.nonfinite_in(samples.chosen(micro.batch, micro.size, []))
        return self._named(item) | {"nonfinite": {k: n for k, n in bad.items() if k not in shared}}

    def _is_failing(self, failure: Failure, items: Sequence[tuple[int, int]], mode: RunMode) -> bool:
        parts = self._parts(items)
        outcome = self._run(parts, mode)
        if outcome is None:
            return False
        weighted = sum(loss * part.weight for loss, part in zip(outcome.losses, parts, strict=True))
        return failure.holds(outcome, weighted / len(self._micros))
