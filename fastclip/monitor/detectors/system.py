# SPDX-License-Identifier: BSD-3-Clause
"""Memory that keeps growing, and a process that differs from the others."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from ..record import Event, Record
from .base import Detector


class MemoryGrowth(Detector):
    """Memory grows steadily.

    The minimum of each block of `block` samples has to grow over `blocks` blocks in a row, by more than
    `share` in all, and in the later blocks as fast as in the earlier ones. The minimum is taken because
    caches and the allocator move memory up and down within a block; the speed is compared because a cache
    that fills slows down and a leak does not.
    """

    kind = "memory_growth"
    SUBJECT = ("memory",)
    STATE = ("blocks", "least", "count")
    COOLDOWN = 1000

    def __init__(self, share: float = 0.1, blocks: int = 6, block: int = 10) -> None:
        super().__init__()
        self.share, self.number, self.block = share, blocks, block
        self.blocks: dict[str, list[int]] = {}
        self.least: dict[str, int] = {}
        self.count = 0

    def check(self, record: Record) -> Event | None:
        if not record.memory:
            return None
        for key, size in record.memory.items():
            self.least[key] = min(size, self.least.get(key, size))
        self.count += 1
        if self.count < self.block:
            return None
        self.count = 0
        found = None
        for key, least in self.least.items():
            blocks = [*self.blocks.get(key, []), least][-self.number :]
            self.blocks[key] = blocks
            if len(blocks) == self.number and found is None and self._leaks(blocks):
                found = self._growth_event(record, key, blocks)
                self.blocks[key] = blocks[-1:]  # reported again only if it keeps growing
        self.least = {}
        return found

    def _leaks(self, blocks: list[int]) -> bool:
        half = self.number // 2
        earlier, later = blocks[half] - blocks[0], blocks[-1] - blocks[-1 - half]
        grows = all(b > a for a, b in pairwise(blocks)) and blocks[-1] > (1 + self.share) * blocks[0]
        return grows and later >= 0.75 * earlier

    def _growth_event(self, record: Record, key: str, blocks: list[int]) -> Event:
        return self.event(
            record,
            "warning",
            f"memory keeps growing: {key} from {blocks[0] / 2**20:.0f} MiB to {blocks[-1] / 2**20:.0f} MiB. "
            "The usual cause is a graph or a list of losses that were not detached",
            memory=key,
            before=blocks[0],
            now=blocks[-1],
        )


class RankDiffers(Detector):
    """One process differs from the others.

    It has a loss or a batch that is not finite; or its loss is more than `factor` times that of the others,
    or its step time `slow` times theirs, in `steps` steps more than it is not. Once or five times is not
    enough: losses of different batches differ by a factor of 2 by chance. With two processes and losses that
    scatter by a factor of e, one is twice the other in 31 % of the steps, and 20 more steps with than without
    happen by chance once in (0.69 / 0.31)^20, or 10 million. Losses that are not positive are not compared.
    """

    kind = "rank"
    STATE = ("streaks",)
    SUBJECT = ("problem", "differing_rank")

    def __init__(self, factor: float = 2.0, slow: float = 1.5, steps: int = 20) -> None:
        super().__init__()
        self.factor, self.slow, self.steps = factor, slow, steps
        self.streaks: dict[str, dict[str, int]] = {}  # by what is compared, by rank

    def check(self, record: Record) -> Event | None:
        if not record.ranks:
            return None
        found = self._nonfinite(record)
        for key, factor, words in (
            ("loss", self.factor, "the loss"),
            ("seconds", self.slow, "the step time"),
        ):
            values = record.ranks.get(key, [])
            if len(values) > 1:
                event = self._compare(record, key, values, factor, words)
                found = found or event
        return found

    def _compare(
        self, record: Record, key: str, values: list[float], factor: float, words: str
    ) -> Event | None:
        """Compare the highest value with the median of the others."""
        if not self.streaks.get(key) and 0.0 < max(values) <= factor * min(values):
            return None  # none differs, as in nearly all steps
        known = sorted([(value, rank) for rank, value in enumerate(values) if math.isfinite(value)])
        if len(known) < 2:
            return None
        value, highest = known.pop()
        half = len(known) // 2
        others = known[half][0] if len(known) % 2 else (known[half - 1][0] + known[half][0]) / 2
        differs = others > 0 and value > factor * others
        streaks = self.streaks.setdefault(key, {})
        for rank in list(streaks):
            if not (differs and rank == str(highest)):
                streaks[rank] -= 1
                if not streaks[rank]:
                    del streaks[rank]
        if not differs:
            return None
        streaks[str(highest)] = min(streaks.get(str(highest), 0) + 1, self.steps)
        if streaks[str(highest)] < self.steps:
            return None
        message = f"{words} of rank {highest} is {value:.3g}; the median of the other ranks is {others:.3g}"
        return self._rank_event(record, "warning", highest, message, problem=key, value=value, others=others)

    def _nonfinite(self, record: Record) -> Event | None:
        losses, batches = record.ranks.get("loss", []), record.ranks.get("batch_nonfinite", [])
        if not any(batches) and all(map(math.isfinite, losses)):
            return None
        bad = [rank for rank, count in enumerate(batches) if count and math.isfinite(count)]
        if bad and len(bad) < len(batches):
            message = f"the batch of rank {bad[0]} holds {batches[bad[0]]:.0f} NaN or Inf"
            numbers = {"problem": "batch", "batch_nonfinite": batches, "loss": losses}
            return self._rank_event(record, "error", bad[0], message, **numbers)
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad and len(bad) < len(losses):
            message = f"the loss of rank {bad[0]} is {losses[bad[0]]} while other ranks have a finite loss"
            return self._rank_event(record, "error", bad[0], message, problem="loss_nonfinite", loss=losses)
        return None

    def _rank_event(self, record: Record, severity: str, rank: int, message: str, **values: Any) -> Event:
        event = self.event(record, severity, message, differing_rank=rank, **values)
        event.rank = rank
        return event
