# SPDX-License-Identifier: BSD-3-Clause
"""The search for the samples that make a step fail, by delta debugging."""

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

MOST_LOSSES = 1024  # samples whose losses are computed one by one
_MOST_SUBSETS = 8  # disjoint minimal failing subsets
_MOST_RUNS = 300

Item = TypeVar("Item", bound=Hashable)


class DeltaDebugging:
    """Delta debugging (Zeller and Hildebrandt, 2002) with a predicate that is evaluated once for each subset.

    One guilty item of n is found with at most 2 log2(n) evaluations. After `most` evaluations all further
    subsets count as good: what is found then still fails, but may not be minimal.
    """

    def __init__(self, fails: Callable[[tuple[Any, ...]], bool], most: int = _MOST_RUNS) -> None:
        self._fails, self._most = fails, most
        self._known: dict[frozenset[Any], bool] = {}

    @property
    def asked(self) -> int:
        """The number of subsets evaluated."""
        return len(self._known)

    def fails(self, items: Sequence[Any]) -> bool:
        """Return whether the subset fails; the empty one never does."""
        key = frozenset(items)
        if key not in self._known:
            if len(self._known) >= self._most:
                return False
            self._known[key] = bool(items) and self._fails(tuple(items))
        return self._known[key]

    def smallest(self, items: Sequence[Item]) -> list[Item]:
        """Return a failing subset of the failing `items` that passes once any one item is removed."""
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
        """Return disjoint minimal failing subsets, and whether the rest still fails."""
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
    """What a search found about the samples of a step.

    Attributes:
        count: the number of samples.
        losses: the loss of each sample alone, the worst first: id, micro_batch, index, loss and rank.
        guilty: minimal failing subsets, as such entries without a loss; empty if there was no failure to
            search for.
        rest_fails: whether the step fails without them too; then the samples are not its cause.
        runs: the number of subsets run.
        notes: remarks on how the search was done.
    """

    count: int
    losses: list[dict[str, Any]] = field(default_factory=list)
    guilty: list[list[dict[str, Any]]] = field(default_factory=list)
    rest_fails: bool = False
    runs: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_cause(self) -> bool:
        """Whether a few samples make the step fail, and the others do not."""
        found = sum(map(len, self.guilty))
        return bool(found) and not self.rest_fails and (found == 1 or 4 * found <= self.count)

    @property
    def has_bad_data(self) -> bool:
        """Whether a guilty sample itself holds NaN or Inf."""
        return any(sample["nonfinite"] for subset in self.guilty for sample in subset)


class SampleSearch:
    """Search among the samples of all micro-batches of one step."""

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
        self._adds_up = False  # whether the loss is a sum over samples rather than a mean
        self._refused, self._reason = 0, ""
        self.report = SampleReport(len(self._items))

    def search(self) -> SampleReport:
        """Compute the losses of single samples and, given a failure, find the guilty ones."""
        report = self.report
        if len(self._items) < 2:
            report.notes.append("fewer than two samples: nothing to search")
            return report
        self._take_losses()
        if self._failure is not None:
            self._adds_up = self._is_a_sum()
            self._find_guilty(self._failure)
        if self._refused:
            report.notes.append(f"{self._refused} subsets could not be run and count as good: {self._reason}")
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
            # Each sample contributes the same gradient as in the whole batch.
            weight = 1.0 if self._adds_up else len(indices) / micro.size
            found.append(BatchPart(micro, None if whole else tuple(indices), weight))
        return found

    def _run(self, parts: list[BatchPart], mode: RunMode) -> Any:
        """Return the outcome, or None if the loss function rejects the subset."""
        self._tick()
        try:
            return self._runner.run(parts, mode)
        except ReplayError as error:
            self._refused += 1
            self._reason = str(error)
            return None

    # Losses.

    def _take_losses(self) -> None:
        """Compute comparable losses: without dropout, and with batch normalization in eval mode."""
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
                "losses of single samples use batch normalization in eval mode: in training mode the samples "
                "of a batch share its statistics"
            )

    def _is_a_sum(self) -> bool:
        """Return whether a batch with one sample twice has twice its loss."""
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

    # Guilty samples.

    def _find_guilty(self, failure: Failure) -> None:
        mode = self._mode
        if has_batch_norm(self._runner.built.model):
            still = RunMode(divisor=mode.divisor, eval_kinds=("batch_norm",))
            if self._is_failing(failure, self._items, still):
                mode = still
                self.report.notes.append("subsets are run with batch normalization in eval mode")
            else:
                self.report.notes.append("subsets are run with batch normalization in training mode")
        search = DeltaDebugging(lambda items: self._is_failing(failure, items, mode))
        if search.fails(self._items):
            found, self.report.rest_fails = search.all_smallest(self._items)
            self.report.guilty = [[self._described(item) for item in subset] for subset in found]
        self.report.runs = search.asked

    def _described(self, item: tuple[int, int]) -> dict[str, Any]:
        micro = self._micros[item[0]]
        bad = samples.nonfinite_in(samples.chosen(micro.batch, micro.size, [item[1]]))
        # Tensors shared by all samples say nothing about this one.
        shared = samples.nonfinite_in(samples.chosen(micro.batch, micro.size, []))
        return self._named(item) | {"nonfinite": {k: n for k, n in bad.items() if k not in shared}}

    def _is_failing(self, failure: Failure, items: Sequence[tuple[int, int]], mode: RunMode) -> bool:
        parts = self._parts(items)
        outcome = self._run(parts, mode)
        if outcome is None:
            return False
        weighted = sum(loss * part.weight for loss, part in zip(outcome.losses, parts, strict=True))
        return failure.holds(outcome, weighted / len(self._micros))
