# SPDX-License-Identifier: BSD-3-Clause
"""Times of two calls taken in turns, and the memory bandwidth beside them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .workloads import SMOKE

MIN_PAIRS = 2 if SMOKE else 15
_MAX_PAIRS = 2 if SMOKE else 400
_ENOUGH_SECONDS = 0.5

# A turn of calls whose gradients stay in the caches.
CALLS_IN_CACHE = 2 if SMOKE else 10

_CACHE_IF_UNKNOWN = 32 << 20


@dataclass(frozen=True)
class Times:
    """Seconds of each call, in the order they were taken."""

    seconds: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3

    def summary(self) -> dict[str, object]:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return {
            "median_ms": self.median_ms,
            "min_ms": min(self.seconds) * 1e3,
            "quartiles_ms": [low * 1e3, high * 1e3],
            "calls": len(self.seconds),
        }


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def alternate(
    first: Callable[[], object], second: Callable[[], object], prepare: Callable[[], object], turn: int = 1
) -> tuple[Times, Times]:
    """Time the two calls in turns, so that what drifts on the machine falls on both alike.

    A turn is one call, or several whose first is not counted: it finds in the caches what the other call
    left there. `prepare` runs before every call and is not timed. At least MIN_PAIRS pairs; more for short
    calls.
    """
    times: tuple[list[float], list[float]] = ([], [])
    collecting = gc.isenabled()
    gc.disable()  # as timeit does: a collection would fall on one of the two
    try:
        while len(times[0]) < MIN_PAIRS or (
            len(times[0]) < _MAX_PAIRS and sum(times[0]) + sum(times[1]) < _ENOUGH_SECONDS
        ):
            for call, seconds in zip((first, second), times, strict=True):
                taken = []
                for _ in range(turn):
                    prepare()
                    taken.append(_seconds(call))
                seconds.extend(taken[1:] or taken)
    finally:
        if collecting:
            gc.enable()
    return Times(times[0]), Times(times[1])


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core, or a guess where the system does not tell."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kilobytes = [int(path.read_text().strip().removesuffix("K")) for path in sizes]
    return max(kilobytes) * 1024 if kilobytes else _CACHE_IF_UNKNOWN


@dataclass
class Bandwidth:
    """Bandwidth of the memory as torch reaches it, sampled between the calls of one row.

    Reading: torch.sum of a tensor that no cache holds. Updating: torch's mul_ by a number, counted as one
    read and one write. The best sample counts. A sample also evicts what the call before it left in the
    caches, so that both calls of a pair start alike.
    """

    read_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        nbytes = (1 << 20) if SMOKE else max(256 << 20, 4 * last_level_cache())
        self._buffer = torch.ones(nbytes // 4)

    def clear(self) -> None:
        self.read_seconds.clear()
        self.update_seconds.clear()

    def sample(self, update: bool) -> None:
        self.read_seconds.append(_seconds(self._buffer.sum))
        if update:
            self.update_seconds.append(_seconds(lambda: self._buffer.mul_(1.0)))

    @property
    def read(self) -> float:
        """Bytes a second."""
        return self._buffer.nbytes / min(self.read_seconds)

    @property
    def update(self) -> float:
        """Bytes a second, read and written together."""
        return 2 * self._buffer.nbytes / min(self.update_seconds)
