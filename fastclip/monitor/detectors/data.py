# SPDX-License-Identifier: BSD-3-Clause
"""What is wrong with a batch, and batches that are not like those before."""

from __future__ import annotations

import math
from operator import add, sub
from typing import Any

from ..record import Event, Record
from .base import Detector
from .trailing_window import Window

Problem = tuple[str, str, dict[str, Any]]  # severity, message, numbers


class BadBatch(Detector):
    """A batch that no model should be given: NaN or Inf, token ids or labels out of range, samples that are
    constant (all padding, all zero) where they never were, a tensor without elements.

    Labels are the integer tensors with one dimension. Where a batch has several, those that never had all
    their values within the classes are something else, such as the numbers of the samples.
    """

    kind = "bad_batch"
    STATE = ("constant_seen", "batches", "labels_seen")
    COOLDOWN = 10
    SUBJECT = ("problem", "tensor", "module")

    def __init__(self, num_classes: int | None = None) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.constant_seen: dict[str, int] = {}
        self.labels_seen: dict[str, int] = {}
        self.batches = 0

    def check(self, record: Record) -> Event | None:
        found: list[Problem] = []
        for name, ids in record.token_ids.items():
            if ids.get("outside"):
                size, low, high = (ids.get(key, math.nan) for key in ("size", "min", "max"))
                message = f"{ids['outside']:.0f} of the ids given to {name} are not in 0 to {size - 1:.0f}: "
                message += f"they go from {low:.0f} to {high:.0f}"
                found.append(("error", message, {"problem": "token_ids", "module": name, **ids}))
        for name, tensor in record.batch.items():
            found += self._look(name, tensor)
        if self.num_classes is not None:
            found += self._look_at_labels(record, self.num_classes)
        self.batches += bool(record.batch)
        if not found:
            return None
        severity, message, values = min(found, key=lambda problem: problem[0] != "error")
        return self.event(record, severity, message, **values, sample_ids=record.sample_ids[:64])

    def _look(self, name: str, tensor: dict[str, Any]) -> list[Problem]:
        found: list[Problem] = []
        nan, inf = tensor.get("nan", 0), tensor.get("inf", 0)
        if nan or inf:
            values = {"problem": "nonfinite", "tensor": name, "nan": nan, "inf": inf}
            found.append(("error", f"batch tensor {name} holds {nan} NaN and {inf} Inf", values))
        shape = tensor.get("shape", [])
        if 0 in shape:
            values = {"problem": "no_elements", "tensor": name, "shape": shape}
            found.append(("error", f"batch tensor {name} has no elements: shape {shape}", values))
        constant = tensor.get("empty", 0)
        if constant:
            if not self.constant_seen.get(name) and self.batches >= 16:
                values = {"problem": "constant", "tensor": name, "constant": constant}
                message = f"{constant} samples of {name} are constant (empty, or nothing but padding)"
                found.append(("warning", message, values))
            self.constant_seen[name] = self.constant_seen.get(name, 0) + 1
        return found

    def _look_at_labels(self, record: Record, num_classes: int) -> list[Problem]:
        tops = {
            name: tensor["max"]
            for name, tensor in record.batch.items()
            if "histogram" in tensor and len(tensor.get("shape", [])) == 1 and "max" in tensor
        }
        found: list[Problem] = []
        for name, top in tops.items():
            if top < num_classes:
                self.labels_seen[name] = self.labels_seen.get(name, 0) + 1
            elif len(tops) == 1 or self.labels_seen.get(name):
                values = {"problem": "labels", "tensor": name, "max": top, "num_classes": num_classes}
                message = f"labels {name} go up to {top:.0f}, but there are {num_classes} classes"
                found.append(("error", message, values))
        return found


class BatchShift(Detector):
    """A batch that is not like those before it.

    - Numbers: the mean is `z` robust standard deviations and half a standard deviation of the data from its
      trailing median, both larger for a batch smaller than usual, as the last one of an epoch is, by the
      square root of the sizes; or the largest absolute value is 10 times the largest seen.
    - Integers: the population stability index, sum of (p - q) ln(p / q) over the histogram's buckets, of the
      batch against the last `window` is above `psi` (0.25 is called a major shift since Siddiqi, 2006) and
      what chance gives so few numbers, (buckets - 1)(1/n + 1/m), fourfold; or what it is beyond chance, on
      average over 8 batches, is above `psi`. Either way it is twice what it was in the last `window` batches,
      since the tokens of one document are not independent draws. Or a label is twice the
      largest seen and far outside what the largest ones were, since a batch without the last classes is
      usual.
    - Length: the second dimension is 4 times the trailing median, twice the longest seen, and 5 robust
      standard deviations of its logarithm above: the lengths of texts are lognormal or worse.

    What set off the alarm enters the windows no larger than the alarm itself: one outlier does not hide the
    next one.
    """

    kind = "batch_shift"
    STATE = ("means", "stds", "sizes", "peaks", "lengths", "histograms", "sums", "indices", "levels", "tops")
    COOLDOWN = 50
    SUBJECT = ("problem", "tensor")

    def __init__(self, z: float = 8.0, psi: float = 0.25, window: int = 64, minimum: int = 16) -> None:
        super().__init__()
        self.z, self.psi, self.size, self.minimum = z, psi, window, minimum
        self.means: dict[str, Window] = {}
        self.stds: dict[str, Window] = {}
        self.sizes: dict[str, int] = {}
        self.peaks: dict[str, Window] = {}
        self.lengths: dict[str, Window] = {}
        self.histograms: dict[str, list[list[int]]] = {}
        self.sums: dict[str, list[int]] = {}
        self.indices: dict[str, Window] = {}
        self.levels: dict[str, Window] = {}
        self.tops: dict[str, Window] = {}

    def check(self, record: Record) -> Event | None:
        found: list[tuple[str, dict[str, Any]]] = []
        for name, tensor in record.batch.items():
            shape = tensor.get("shape", [])
            if len(shape) > 1 and shape[1]:
                found += self._look_at_length(name, shape[1])
            if "histogram" in tensor:
                found += self._look_at_histogram(name, tensor["histogram"])
                if len(shape) == 1 and "max" in tensor:
                    found += self._look_at_labels(name, tensor["max"])
            elif "std" in tensor:
                found += self._look_at_mean(name, tensor, shape[0] if shape else 1)
                found += self._look_at_peak(name, tensor)
        if not found:
            return None
        message = "; ".join(message for message, _ in found)
        return self.event(record, "warning", message, **found[0][1], sample_ids=record.sample_ids[:64])

    def _window(self, windows: dict[str, Window], name: str) -> Window:
        if name not in windows:
            windows[name] = Window(self.size)
        return windows[name]

    def _look_at_length(self, name: str, length: int) -> list[tuple[str, dict[str, Any]]]:
        window = self._window(self.lengths, name)
        if window.is_full and length == window.smallest() == window.largest():
            return []  # always the same: nothing to remember
        found = []
        if len(window) >= self.minimum and length > 4 * window.median():
            middle, longest = window.median(), window.largest()
            sigma = math.log(window.quantile(0.75) / window.quantile(0.25)) / 1.349
            if length > 2 * longest and math.log(length / middle) > 5 * sigma:
                message = f"{name} is {length} long, its median {middle:.0f}, at most {longest:.0f}"
                found = [(message, {"problem": "length", "tensor": name, "length": length})]
                length = int(2 * longest)
        window.add(length)
        return found

    def _look_at_mean(self, name: str, tensor: dict[str, Any], n: int) -> list[tuple[str, dict[str, Any]]]:
        mean, std = tensor.get("mean", math.nan), tensor["std"]
        means, stds = self._window(self.means, name), self._window(self.stds, name)
        usual = self.sizes[name] = max(n, self.sizes.get(name, 1))
        found: list[tuple[str, dict[str, Any]]] = []
        if len(means) >= self.minimum and math.isfinite(mean):
            middle = means.median()
            away = abs(mean - middle) * math.sqrt(n / usual)
            # Data that were constant so far, such as a mask, have no standard deviation of their own.
            spread = stds.median() or max(std if math.isfinite(std) else 0.0, abs(middle))
            if away > 0.5 * spread and away > self.z * means.sigma():
                message = f"the mean of {name} is {mean:.3g}, its median {middle:.3g}"
                found.append((message, {"problem": "mean", "tensor": name, "mean": mean}))
        means.add(mean)
        stds.add(std)
        return found

    def _look_at_peak(self, name: str, tensor: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        peak = max(abs(tensor.get("min", math.nan)), abs(tensor.get("max", math.nan)))
        peaks = self._window(self.peaks, name)
        found: list[tuple[str, dict[str, Any]]] = []
        if len(peaks) >= self.minimum and math.inf > peak > 10 * peaks.largest() > 0:
            message = f"{name} reaches {peak:.3g}, before at most {peaks.largest():.3g}"
            found.append((message, {"problem": "peak", "tensor": name, "peak": peak}))
            peak = 10 * peaks.largest()
        peaks.add(peak)
        return found

    def _look_at_labels(self, name: str, top: float) -> list[tuple[str, dict[str, Any]]]:
        tops = self._window(self.tops, name)
        found: list[tuple[str, dict[str, Any]]] = []
        if len(tops) >= self.minimum and top > tops.largest():
            highest = tops.largest()
            limit = max(2 * highest, highest + 4 * (highest - tops.smallest()))
            if highest > 0 and top > limit:
                message = f"{name} goes up to {top:.0f}, before at most {highest:.0f}"
                found.append((message, {"problem": "labels", "tensor": name, "max": top}))
                top = limit
        tops.add(top)
        return found

    def _look_at_histogram(self, name: str, histogram: list[int]) -> list[tuple[str, dict[str, Any]]]:
        past, indices = self.histograms.setdefault(name, []), self._window(self.indices, name)
        levels, sums = self._window(self.levels, name), self.sums.get(name, [])
        width = max(len(sums), len(histogram))
        sums, histogram = _padded(sums, width), _padded(histogram, width)
        found: list[tuple[str, dict[str, Any]]] = []
        if len(past) >= self.minimum:
            psi, by_chance = stability_index(sums, histogram)
            beyond = psi - by_chance
            level = (7 * levels.newest() + beyond) / 8 if len(levels) else 0.0
            if len(levels) >= self.minimum and max(beyond, level) > self.psi:
                single = max(self.psi + 3 * by_chance, 2 * indices.largest())
                lasting = max(self.psi, 2 * levels.largest())
                if beyond > single or level > lasting:
                    message = f"the distribution of {name} has shifted: population stability index {psi:.2f}"
                    found.append((message, {"problem": "distribution", "tensor": name, "psi": psi}))
                    beyond, level = min(beyond, single), min(level, lasting)
            indices.add(beyond)
            levels.add(level)
        past.append(histogram)
        sums = list(map(add, sums, histogram))
        if len(past) > self.size:
            sums = list(map(sub, sums, _padded(past.pop(0), width)))
        self.sums[name] = sums
        return found


def _padded(histogram: list[int], width: int) -> list[int]:
    return histogram if len(histogram) == width else histogram + [0] * (width - len(histogram))


def stability_index(reference: list[int], batch: list[int]) -> tuple[float, float]:
    """The population stability index of two histograms, and what chance alone would give on average.

    Half a count is added to each bucket that either has, as an empty one would make the index infinite.
    """
    buckets = len(reference) - list(map(add, reference, batch)).count(0)
    n, m = sum(reference), sum(batch)
    if not n or not m:
        return 0.0, 0.0
    p, q, log = 1 / (n + 0.5 * buckets), 1 / (m + 0.5 * buckets), math.log
    # ln(p / q) without its factor n / m, which cancels out in the sum.
    terms = [
        ((b + 0.5) * q - (a + 0.5) * p) * log((b + 0.5) / (a + 0.5))
        for a, b in zip(reference, batch, strict=True)
        if a or b
    ]
    return sum(terms), (buckets - 1) * (p + q)
