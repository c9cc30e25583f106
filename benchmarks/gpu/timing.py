# SPDX-License-Identifier: BSD-3-Clause
"""Times on a device: by events on its stream, and of the host alone. Two calls are taken in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


class Device:
    """A GPU; or the CPU, where the clock takes the place of events, so that every line can be tried there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name != "cpu"

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Call) -> float:
        """Of the work that a call puts on the device, from an idle device to an idle device."""
        self.synchronize()
        if not self.is_gpu:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        return self._between_events(call)

    def _between_events(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def kernel_seconds(self, call: Call) -> float:
        """The same, but the device is kept busy until the host has put everything on it, so that the
        host's own time does not show."""
        if not self.is_gpu:
            return self.seconds(call)
        self.synchronize()
        torch.cuda._sleep(100_000_000)  # about a twentieth of a second
        return self._between_events(call)

    def host_seconds(self, call: Call) -> float:
        """Until the call returns; what it put on the device may still run."""
        self.synchronize()
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        self.synchronize()
        return taken


def in_turns(
    measure: Callable[[Call], float], calls: Sequence[Call], prepare: Call, repeats: int
) -> list[float]:
    """Median seconds of each call. `prepare` runs before every call and is not timed."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, taken, strict=True):
            prepare()
            seconds.append(measure(call))
    return [statistics.median(seconds) for seconds in taken]


def copy_bandwidth(device: Device, nbytes: int, repeats: int) -> float:
    """Bytes read and written in a second by a copy of this size on the device."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=device.name).normal_()
    target = torch.empty_like(source)
    target.copy_(source)
    (seconds,) = in_turns(device.kernel_seconds, [lambda: target.copy_(source)], lambda: None, repeats)
    return 2 * source.nbytes / seconds
