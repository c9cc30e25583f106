# SPDX-License-Identifier: BSD-3-Clause
"""Times of two calls taken in turns, and the memory bandwidth beside them."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .workloads import CPU, SMOKE

MIN_PAIRS = 2 if SMOKE else 15
_MAX_PAIRS = 2 if SMOKE else 400
_ENOUGH_SECONDS = 0.5

# A turn of calls whose gradients stay in the caches.
CALLS_IN_CACHE = 2 if SMOKE else 10

_CACHE_IF_UNKNOWN = 32 << 20

Call = Callable[[], object]


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


def _nothing() -> None:
    """What there is to wait for on a CPU, where a call has done its work when it returns."""


def waiting_for(device: torch.device) -> Call:
    """What waits until a device has done all that it was given."""
    return _nothing if device.type == "cpu" else functools.partial(torch.accelerator.synchronize, device)


def _seconds(call: Call, wait: Call = _nothing) -> float:
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def alternate(
    first: Call, second: Call, prepare: Call, turn: int = 1, wait: Call = _nothing
) -> tuple[Times, Times]:
    """Time the two calls in turns, so that what drifts on the machine falls on both alike.

    A turn is one call, or several whose first is not counted: it finds in the caches what the other call
    left there. `prepare` runs before every call and is not timed. `wait` is part of each call, for a device
    that works on when the call has returned. At least MIN_PAIRS pairs; more for short calls.
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
                    wait()
                    taken.append(_seconds(call, wait))
                seconds.extend(taken[1:] or taken)
    finally:
        if collecting:
            gc.enable()
    return Times(times[0]), Times(times[1])


def last_level_cache(device: torch.device = CPU) -> int:
    """Bytes of the largest cache of the first core, or of a GPU; a guess where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    if device.type != "cpu":
        return _CACHE_IF_UNKNOWN
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kilobytes = [int(path.read_text().strip().removesuffix("K")) for path in sizes]
    return max(kilobytes) * 1024 if kilobytes else _CACHE_IF_UNKNOWN


@dataclass
class Bandwidth:
    """Bandwidth of a device's memory as torch reaches it, sampled between the calls of one row.

    Reading: torch.sum of a tensor that no cache holds. Updating: torch's mul_ by a number, counted as one
    read and one write. The best sample counts. A sample also evicts what the call before it left in the
    caches, so that both calls of a pair start alike.
    """

    device: torch.device = CPU
    read_seconds: list[float] = field(default_factory=list)
    update_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._wait = waiting_for(self.device)

    @functools.cached_property
    def _buffer(self) -> Tensor:
        nbytes = (1 << 20) if SMOKE else max(256 << 20, 4 * last_level_cache(self.device))
        return torch.ones(nbytes // 4, device=self.device)

    def clear(self) -> None:
        self.read_seconds.clear()
        self.update_seconds.clear()

    def sample(self, update: bool) -> None:
        buffer = self._buffer
        self._wait()
        self.read_seconds.append(_seconds(buffer.sum, self._wait))
        if update:
            self.update_seconds.append(_seconds(lambda: buffer.mul_(1.0), self._wait))

    @property
    def read(self) -> float:
        """Bytes a second."""
        return self._buffer.nbytes / min(self.read_seconds)

    @property
    def update(self) -> float:
        """Bytes a second, read and written together."""
        return 2 * self._buffer.nbytes / min(self.update_seconds)
