# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of the batches of a step."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..async_copy import Value

BUCKETS = 64  # of the histogram of integers: value modulo 64, so exact for up to 64 classes
_FEW = 1024  # numbers that are measured in Python
_DEPTH = 6  # levels of a batch that are searched
_MEASURED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
_MAX_TENSORS = 16  # of a batch; a tree of thousands of tensors is not searched in each step


class Shape(NamedTuple):
    """What the host knows of a tensor without reading it."""

    shape: list[int]
    dtype: str


def tensors_in(batch: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree of mappings, lists and tuples, named by their path, such as "inputs.0".

    Of objects with attributes, such as a dataclass, the attributes are searched. A tensor that is the whole
    batch is called "batch". The search ends _DEPTH levels down, since an object may refer to itself.
    """
    if isinstance(batch, Tensor):
        yield prefix or "batch", batch
        return
    if depth == _DEPTH:
        return
    if isinstance(batch, Mapping):
        items: Iterator[tuple[Any, Any]] = iter(batch.items())
    elif isinstance(batch, (list, tuple)):
        names = getattr(batch, "_fields", range(len(batch)))
        items = iter(zip(names, batch, strict=True))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = iter((f.name, getattr(batch, f.name, None)) for f in dataclasses.fields(batch))
    elif hasattr(batch, "__dict__") and not isinstance(batch, type) and not callable(batch):
        items = iter(vars(batch).items())
    else:
        return
    for key, value in items:
        yield from tensors_in(value, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor can be measured: no subclass, no meta, nested or vmapped tensor."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.dtype in _MEASURED
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.numel() > 0
    )


class BatchStatistics:
    """The statistics of the micro-batches of one step."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.shapes: dict[str, Shape] = {}
        self.sample_ids: list[Any] = []
        self.samples = 0
        self.tokens = 0
        self.count = 0

    @torch.no_grad()
    def add(self, batch: Any, sample_ids: Any = None) -> None:
        """Add one micro-batch. Nothing waits for a device; a tensor on the CPU is read there."""
        self.count += 1
        self._add_ids(sample_ids)
        first, first_integer = True, True
        for name, tensor in islice(tensors_in(batch), _MAX_TENSORS):
            if tensor.is_nested:
                self.shapes[name] = Shape([tensor.size(0)], "nested")
                continue
            if first and tensor.dim():
                self.samples += tensor.shape[0]
                first = False
            is_integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
            if first_integer and is_integer and tensor.dim() > 1:
                self.tokens += tensor.numel()
                first_integer = False
            self.shapes[name] = Shape(list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if is_plain(tensor):
                self._measure(name, tensor, is_integer)

    def _add_ids(self, sample_ids: Any) -> None:
        ids = plain_ids(sample_ids)
        if isinstance(ids, Tensor):
            self.values[f"sample_ids/{self.count}"] = ids
        else:
            self.sample_ids += ids

    def _measure(self, name: str, tensor: Tensor, is_integer: bool) -> None:
        key = f"batch/{name}/"
        if tensor.dtype is torch.bool:
            self.values[key + "mean"] = tensor.sum() / tensor.numel()
            return
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
        if (
            tensor.device.type == "cpu"
            and tensor.numel() <= _FEW
            and self._measure_few(key, rows, is_integer)
        ):
            return
        lows, highs = rows.aminmax(dim=1)
        if tensor.dim() > 1:
            low, high = lows.min(), highs.max()
            if rows.shape[1] > 1:
                self._sum(key + "empty", (lows == highs).sum())
        else:
            low, high = lows, highs
        self.values[key + "min"], self.values[key + "max"] = low.reshape(()), high.reshape(())
        if is_integer:
            self._count_integers(key, rows, low)
        else:
            self._measure_numbers(key, rows, low + high)

    def _measure_few(self, key: str, rows: Tensor, is_integer: bool) -> bool:
        """Measure in Python, faster than a dozen calls of torch; return False if not all is finite."""
        numbers = rows.tolist()
        flat = [number for row in numbers for number in row]
        if is_integer:
            counts = Counter(flat)
            histogram = [0] * BUCKETS
            for number, count in counts.items():
                if number >= 0:
                    histogram[number % BUCKETS] += count
            self._sum(key + "histogram", torch.tensor(histogram))
            self.values[key + "min"], self.values[key + "max"] = min(counts), max(counts)
        else:
            if not all(map(math.isfinite, flat)):
                return False
            mean = math.fsum(flat) / len(flat)
            self.values[key + "mean"] = mean
            self.values[key + "variance"] = math.fsum([(x - mean) ** 2 for x in flat]) / len(flat)
            self.values[key + "min"], self.values[key + "max"] = min(flat), max(flat)
        if len(numbers) > 1 and len(numbers[0]) > 1:
            self._sum(key + "empty", sum([row.count(row[0]) == len(row) for row in numbers]))
        return True

    def _count_integers(self, key: str, rows: Tensor, low: Tensor) -> None:
        flat = rows.reshape(-1)
        if flat.device.type == "cpu":
            known = flat if low >= 0 else flat[flat >= 0]
            histogram = known.remainder(BUCKETS).bincount(minlength=BUCKETS)
        else:  # bincount would wait for the device, and so would a mask
            buckets = torch.where(flat < 0, BUCKETS, flat.remainder(BUCKETS)).to(torch.int64)
            counts = torch.zeros(BUCKETS + 1, dtype=torch.float32, device=flat.device)
            histogram = counts.index_add_(0, buckets, counts.new_ones(()).expand(len(flat)))[:BUCKETS]
        self._sum(key + "histogram", histogram)

    def _measure_numbers(self, key: str, rows: Tensor, extremes: Tensor) -> None:
        numbers = rows if rows.dtype.itemsize >= 4 else rows.float()
        variance, mean = torch.var_mean(numbers, correction=0)
        self.values[key + "mean"], self.values[key + "variance"] = mean, variance
        if rows.device.type == "cpu" and math.isfinite(extremes):
            return  # then all of them are finite
        self._sum(key + "nan", rows.isnan().sum())
        self._sum(key + "inf", rows.isinf().sum())

    def _sum(self, key: str, value: Value) -> None:
        before = self.values.get(key)
        self.values[key] = value if before is None else before + value


def plain_ids(sample_ids: Any) -> Tensor | list[Any]:
    """Return ids as a log can hold them, numbers and strings, or as a tensor [N] if they are on a device."""
    if sample_ids is None:
        return []
    if isinstance(sample_ids, Tensor) and sample_ids.device.type != "cpu":
        return sample_ids.reshape(-1)
    if hasattr(sample_ids, "tolist"):  # a tensor, or an array of NumPy
        sample_ids = sample_ids.reshape(-1).tolist()
    listed = [sample_ids] if isinstance(sample_ids, (str, int)) else list(sample_ids)
    numbers = [one.item() if hasattr(one, "item") else one for one in listed]
    return [one if isinstance(one, (int, float, str)) else str(one) for one in numbers]


def batch_of(values: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, dict[str, Any]]:
    """Return the record's batch statistics by tensor, from numbers on the host."""
    batch: dict[str, dict[str, Any]] = {name: s._asdict() for name, s in shapes.items()}
    for key, value in values.items():
        if not key.startswith("batch/"):
            continue
        name, _, what = key.removeprefix("batch/").rpartition("/")
        if what == "variance":
            batch[name]["std"] = math.sqrt(value)
        elif what in ("nan", "inf", "empty"):
            batch[name][what] = int(value) if math.isfinite(value) else value
        elif what == "histogram":
            last = max((i for i, n in enumerate(value) if n), default=-1)
            batch[name][what] = [int(n) for n in value[: last + 1]]
        else:
            batch[name][what] = value
    return batch
