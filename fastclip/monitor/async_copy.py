# SPDX-License-Identifier: BSD-3-Clause
"""Copying numbers from a device to the host without waiting for them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Value = Tensor | float
# How many steps the host may run ahead before it waits. torch queues about a thousand kernels in any case.
_AHEAD = 64


class _PendingCopy:
    """The numbers of one step that lie on one device, packed into one copy."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.shapes = {key: tensor.shape for key, tensor in tensors.items()}
        packed = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors.values()])
        # What is never copied, because the device failed before, reads as NaN.
        self.host = torch.full(packed.shape, math.nan, dtype=packed.dtype, pin_memory=True)
        with torch.cuda.device(packed.device):  # whose stream the event is to be on
            self.host.copy_(packed, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()

    def values(self) -> dict[str, Any]:
        pieces = self.host.split([shape.numel() for shape in self.shapes.values()])
        return {
            key: piece.reshape(shape).tolist()
            for (key, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


class AsyncCopy:
    """Copies the numbers of each step to the host: at once from the CPU, about one step late from a GPU.

    The order of the steps is kept.

    Args:
        on_demand: give out copies from a GPU in ``finished(wait=True)`` alone, and not whenever they are
            there, which differs from process to process.
    """

    def __init__(self, on_demand: bool = False) -> None:
        self._on_demand = on_demand
        self._pending: deque[tuple[Any, dict[str, Any], list[_PendingCopy]]] = deque()

    def start(self, label: Any, values: Mapping[str, Value]) -> None:
        """Copy numbers of any shape; those on a GPU as they will be when it has come this far.

        Args:
            label: what :meth:`finished` gives back with the numbers.
            values: the numbers by name.
        """
        known: dict[str, Any] = {}
        on_gpu: dict[torch.device, dict[str, Tensor]] = {}
        for key, value in values.items():
            if not isinstance(value, Tensor):
                known[key] = value
            elif _is_on_gpu(value):
                on_gpu.setdefault(value.device, {})[key] = value
            else:
                known[key] = value.tolist()
        self._pending.append((label, known, [_PendingCopy(tensors) for tensors in on_gpu.values()]))

    def finished(self, wait: bool = False) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield labels and numbers of the copies that are complete; with `wait`, of all."""
        while self._pending:
            copies = self._pending[0][2]
            if wait or len(self._pending) > _AHEAD:
                for copy in copies:
                    copy.event.synchronize()
            elif copies and (self._on_demand or not all(copy.event.query() for copy in copies)):
                return
            yield self._take_first()

    def salvaged(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield everything after an error on the device, when waiting for it only raises again.

        The copies that were made before the error lie in the host's memory.
        """
        try:
            yield from self.finished(wait=True)
        except RuntimeError:
            while self._pending:
                yield self._take_first()

    def _take_first(self) -> tuple[Any, dict[str, Any]]:
        label, known, copies = self._pending.popleft()
        for copy in copies:
            known |= copy.values()
        return label, known
