# SPDX-License-Identifier: BSD-3-Clause
"""Clocks of a GPU: by events on its stream, and of the host alone."""

from __future__ import annotations

import functools
import time

import torch

from fastclip.bench.timing import Call, seconds_of, take_turns


class DeviceClocks:
    """The clocks of a GPU. On the CPU, the host's clock replaces events, so that all code can run there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, call: Call) -> float:
        """Return the seconds from an idle device to an idle device."""
        if not self.is_gpu:
            return seconds_of(call)
        self.synchronize()
        return self._between_events(call)

    def _between_events(self, call: Call) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def kernel_seconds(self, call: Call) -> float:
        """Return the seconds of the device's own work.

        The device is kept busy until the host has launched everything, which hides the host's time.
        """
        if not self.is_gpu:
            return self.seconds(call)
        self.synchronize()
        torch.cuda._sleep(100_000_000)  # about a twentieth of a second
        return self._between_events(call)

    def host_seconds(self, call: Call) -> float:
        """Return the seconds until the call returns; its work may still run on the device."""
        self.synchronize()
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        self.synchronize()
        return taken


def copy_bandwidth(clocks: DeviceClocks, nbytes: int, repeats: int) -> float:
    """Return the bytes per second, read and written, of a copy of this size on the device."""
    source = torch.empty(nbytes // 4, dtype=torch.float32, device=clocks.name).normal_()
    target = torch.empty_like(source)
    target.copy_(source)
    copy = functools.partial(target.copy_, source)
    (times,) = take_turns([copy], clock=clocks.kernel_seconds, rounds=repeats)
    return 2 * source.nbytes / times.median
