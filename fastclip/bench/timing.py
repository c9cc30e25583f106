# SPDX-License-Identifier: BSD-3-Clause
"""Times of calls that take turns, and the memory bandwidth measured beside them."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .workloads import CPU, SMOKE

MIN_ROUNDS = 2 if SMOKE else 15
MAX_ROUNDS = 2 if SMOKE else 400
_ENOUGH_SECONDS = 0.5

# Calls in one turn when the gradients stay in the caches.
CALLS_IN_CACHE = 2 if SMOKE else 10

_CACHE_IF_UNKNOWN = 32 << 20

Call = Callable[[], object]
Clock = Callable[[Call], float]  # makes a call and returns the seconds it took


@dataclass(frozen=True)
class Times:
    """The seconds of each call, in the order in which they were taken."""

    seconds: list[float]

    @property
    def median(self) -> float:
        """The median in seconds."""
        return statistics.median(self.seconds)

    @property
    def median_ms(self) -> float:
        """The median in milliseconds."""
        return self.median * 1e3

    def summary(self) -> dict[str, object]:
        """Return what the JSON file has of these times."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return {
            "median_ms": self.median_ms,
            "min_ms": min(self.seconds) * 1e3,
            "quartiles_ms": [low * 1e3, high * 1e3],
            "calls": len(self.seconds),
        }


@dataclass(frozen=True)
class PairedTimes:
    """The times of two calls that took turns."""

    first: Times
    second: Times

    @property
    def ratio(self) -> float:
        """The median of the first call over the median of the second."""
        return self.first.median_ms / self.second.median_ms

    @property
    def ratio_quartiles(self) -> tuple[float, float]:
        """The quartiles of the ratios of single pairs: the middle half lies between them."""
        pairs = zip(self.first.seconds, self.second.seconds, strict=True)
        low, _, high = statistics.quantiles([first / second for first, second in pairs], n=4)
        return low, high


def do_nothing() -> None:
    """Take the place of a preparation or a synchronization that is not needed."""


def seconds_of(call: Call, synchronize: Call = do_nothing) -> float:
    """Return the seconds of a call, from an idle device to an idle device.

    Args:
        synchronize: waits until the device has finished; a CPU has when the call returns.
    """
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def clock_of(device: torch.device) -> Clock:
    """Return the clock that times a call on a device."""
    if device.type == "cpu":
        return seconds_of
    synchronize = functools.partial(torch.accelerator.synchronize, device)
    return functools.partial(seconds_of, synchronize=synchronize)


def take_turns(
    calls: Sequence[Call],
    prepare: Call = do_nothing,
    *,
    turn: int = 1,
    clock: Clock = seconds_of,
    rounds: int | None = None,
) -> list[Times]:
    """Time several calls in turns, so that drift of the machine affects all of them alike.

    Args:
        prepare: runs before every call and is not timed.
        turn: calls in one turn. The first of several is not counted: it finds in the caches what another
            call left there.
        rounds: turns of each call; by default at least MIN_ROUNDS, and more for short calls.
    """
    taken: list[list[float]] = [[] for _ in calls]
    collecting = gc.isenabled()
    gc.disable()  # like timeit: a collection would be charged to one of the calls
    try:
        while _is_unfinished(taken, rounds):
            for call, seconds in zip(calls, taken, strict=True):
                own = []
                for _ in range(turn):
                    prepare()
                    own.append(clock(call))
                seconds.extend(own[1:] or own)
    finally:
        if collecting:
            gc.enable()
    return [Times(seconds) for seconds in taken]


def _is_unfinished(taken: list[list[float]], rounds: int | None) -> bool:
    made = len(taken[0])
    if rounds is not None:
        return made < rounds
    return made < MIN_ROUNDS or (made < MAX_ROUNDS and sum(map(sum, taken)) < _ENOUGH_SECONDS)


def last_level_cache(device: torch.device = CPU) -> int:
    """Return the bytes of the first core's largest cache, or of a GPU's L2; a guess if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    if device.type != "cpu":
        return _CACHE_IF_UNKNOWN
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kilobytes = [int(path.read_text().strip().removesuffix("K")) for path in sizes]
    return max(kilobytes) * 1024 if kilobytes else _CACHE_IF_UNKNOWN


@dataclass
class Bandwidth:
    """The memory bandwidth of a device as torch reaches it, sampled between the calls of one row.

    Reading is torch.sum of a tensor larger than any cache. Updating is torch's mul_ by a number, counted as
    one read and one write. The best sample counts. A sample also evicts what the previous call left in the
    caches, so that both calls of a pair start alike.
    """

    device: torch.device = CPU
    read_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)

    @functools.cached_property
    def _buffer(self) -> Tensor:
        nbytes = (1 << 20) if SMOKE else max(256 << 20, 4 * last_level_cache(self.device))
        return torch.ones(nbytes // 4, device=self.device)

    def clear(self) -> None:
        """Forget the samples of the previous row."""
        self.read_seconds.clear()
        self.update_seconds.clear()

    def sample(self, update: bool) -> None:
        """Take one sample of reading and, on request, one of updating."""
        buffer, clock = self._buffer, clock_of(self.device)
        self.read_seconds.append(clock(buffer.sum))
        if update:
            self.update_seconds.append(clock(lambda: buffer.mul_(1.0)))

    @property
    def read(self) -> float:
        """Bytes read per second."""
        return self._buffer.nbytes / min(self.read_seconds)

    @property
    def update(self) -> float:
        """Bytes read and written per second."""
        return 2 * self._buffer.nbytes / min(self.update_seconds)
