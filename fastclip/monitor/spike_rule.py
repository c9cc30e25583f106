# SPDX-License-Identifier: BSD-3-Clause
"""The rule of SpikeSkip for one number a step: written once, for Python numbers and for tensors."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..backends.reference import accumulation_dtype
from ..policies.ring_buffer import mean_and_std, push


class SpikeRule:
    """Whether a number lies above mean + sigma * std of the last ones, as in SpikeSkip.

    Where the host decides it takes floats and bools, on a device tensors, []. The expressions are the same;
    only the window differs.

    Args:
        sigma: how many standard deviations are too many.
        size: how many numbers the window keeps.
        minimum: the first number, from 1, that can be a spike.
    """

    def __init__(self, sigma: float = 6.0, size: int = 128, minimum: int = 64) -> None:
        self.sigma, self.size, self.minimum = sigma, size, minimum
        self._window: _HostWindow | _DeviceWindow = _HostWindow(size, [])

    def is_spike(self, value: Any, is_open: Any) -> Any:
        """Return whether `value` is a spike, a bool or [], bool; then remember it.

        A value that is not finite, or that comes while the latch is closed, is neither a spike nor
        remembered.
        """
        counts = is_open & (abs(value) < math.inf)
        mean, std = self._window.mean_and_std()
        is_late_enough = self._window.count >= self.minimum - 1
        found = counts & is_late_enough & (value > mean + self.sigma * std)
        self._window.push(value, counts)
        return found

    def move_to(self, device: torch.device | None) -> None:
        """Take tensors on `device` from now on, or floats for None."""
        values, size = self.values(), self.size
        self._window = _HostWindow(size, values) if device is None else _DeviceWindow(size, values, device)

    def values(self) -> list[float]:
        """Return the numbers in the window, the oldest first."""
        return self._window.values()

    def state_dict(self) -> dict[str, list[float]]:
        return {"window": self.values()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a window of either device. The rule takes floats until it is moved."""
        self._window = _HostWindow(self.size, state["window"] or _window_of_0_1(state))


class _HostWindow:
    """The last numbers, in Python."""

    def __init__(self, size: int, values: list[float]) -> None:
        self._values: deque[float] = deque(values, maxlen=size)

    @property
    def count(self) -> int:
        return len(self._values)

    def mean_and_std(self) -> tuple[float, float]:
        """Mean and sample standard deviation; NaN of fewer than two numbers."""
        values, count = self._values, len(self._values)
        if count < 2:
            return math.nan, math.nan
        mean = math.fsum(values) / count
        return mean, math.sqrt(math.fsum([(x - mean) * (x - mean) for x in values]) / (count - 1))

    def push(self, value: float, counts: bool) -> None:
        if counts:
            self._values.append(value)

    def values(self) -> list[float]:
        return list(self._values)


class _DeviceWindow:
    """The last numbers in a ring on a device, where nothing waits for them."""

    def __init__(self, size: int, values: list[float], device: torch.device) -> None:
        dtype = accumulation_dtype(device)
        self._ring = torch.zeros(1, size, dtype=dtype, device=device)
        self._ring[0, : len(values)] = torch.tensor(values, dtype=dtype)
        self._count = torch.full((1,), len(values), dtype=dtype, device=device)

    @property
    def count(self) -> Tensor:
        return self._count.squeeze(0)

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        """Mean and sample standard deviation, [] each; NaN of fewer than two numbers."""
        mean, std = mean_and_std(self._ring, self._count)
        return mean.squeeze(0), std.squeeze(0)

    def push(self, value: Tensor, counts: Tensor) -> None:
        push(self._ring, self._count, value.to(self._ring.dtype).reshape(1), counts.reshape(1))

    def values(self) -> list[float]:
        return in_order(self._ring, self._count)


def in_order(ring: Tensor, count: Tensor) -> list[float]:
    """Return the numbers of a ring of one series, the oldest first. Waits for the device.

    Args:
        ring: [1, W]. count: [1], how many numbers were ever put in.
    """
    (values,), pushed, size = ring.tolist(), int(count), ring.shape[1]
    start = pushed % size if pushed > size else 0
    return values[start:] + values[:start] if pushed > size else values[:pushed]


def _window_of_0_1(state: dict[str, Any]) -> list[float]:
    """Version 0.1 kept a window on a GPU in the state of a SpikeSkip beside the window of the CPU."""
    tensors = state.get("rule", {}).get("state", {})
    return in_order(tensors["norms"], tensors["norm_count"]) if tensors else []
