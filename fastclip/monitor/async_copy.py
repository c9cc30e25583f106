# SPDX-License-Identifier: BSD-3-Clause
"""Numbers on their way from a device to the host, without waiting for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Value = Tensor | float
# How many steps the host may run ahead before it waits. torch queues about a thousand kernels in any case.
_AHEAD = 64


class _Flight:
    """The numbers of one step that lie on one device, packed into one copy."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.shapes = {key: tensor.shape for key, tensor in tensors.items()}
        packed = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors.values()])
        # What never arrives, because the device failed before, reads as NaN.
        self.host = torch.full(packed.shape, math.nan, dtype=packed.dtype, pin_memory=True)
        with torch.cuda.device(packed.device):  # whose stream the event is to be on
            self.host.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> dict[str, Any]:
        parts = self.host.split([shape.numel() for shape in self.shapes.values()])
        return {
            key: part.reshape(shape).tolist()
            for (key, shape), part in zip(self.shapes.items(), parts, strict=True)
        }


def _is_away(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


class LateValues:
    """Hands each step's numbers to a function: at once on the CPU, and about one step late from a GPU.

    The order of the steps is kept.

    Args:
        arrived: the function; it gets the label and the numbers.
        on_demand: hand over what comes from a GPU in ``poll(wait=True)`` alone and not whenever it is there,
            which differs from process to process.
    """

    def __init__(self, arrived: Callable[[Any, dict[str, Any]], None], on_demand: bool = False) -> None:
        self._arrived = arrived
        self._on_demand = on_demand
        self._flying: deque[tuple[Any, dict[str, Any], list[_Flight]]] = deque()

    def send(self, label: Any, values: Mapping[str, Value]) -> None:
        """Numbers of any shape by name; those on a GPU are copied as they will be when it comes to them."""
        known: dict[str, Any] = {}
        away: dict[torch.device, dict[str, Tensor]] = {}
        for key, value in values.items():
            if not isinstance(value, Tensor):
                known[key] = value
            elif _is_away(value):
                away.setdefault(value.device, {})[key] = value
            else:
                known[key] = value.tolist()
        self._flying.append((label, known, [_Flight(tensors) for tensors in away.values()]))
        self.poll()

    def poll(self, wait: bool = False) -> None:
        """Hand over what has arrived; with `wait`, everything."""
        while self._flying:
            label, known, flights = self._flying[0]
            if wait or len(self._flying) > _AHEAD:
                for flight in flights:
                    flight.event.synchronize()
            elif flights and (self._on_demand or not all(flight.event.query() for flight in flights)):
                return
            self._flying.popleft()
            for flight in flights:
                known |= flight.values()
            self._arrived(label, known)

    def salvage(self) -> None:
        """Hand over everything after an error on the device, when waiting for it only raises again.

        The copies that were made before the error lie in the host's memory.
        """
        try:
            self.poll(wait=True)
        except RuntimeError:
            while self._flying:
                label, known, flights = self._flying.popleft()
                for flight in flights:
                    known |= flight.values()
                self._arrived(label, known)
