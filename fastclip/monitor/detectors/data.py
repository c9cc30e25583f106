# SPDX-License-Identifier: BSD-3-Clause
"""Defects of a batch, and batches that are unlike those before."""

from __future__ import annotations

import math
from operator import add, sub
from typing import Any

from ..record import Event, Record
from .base import Detector
from .trailing_window import TrailingWindow

Problem = tuple[str, str, dict[str, Any]]  # severity, message, numbers


class BadBatch(Detector):
    """A batch that no model should be given.

    It has NaN or Inf, token ids or labels out of range, samples that are constant (all padding, all zero)
    where there were none before, or a tensor without elements. Labels are the integer tensors with one
    dimension. Where a batch has several, those that never had all their values within the classes are
    something else, such as sample indices.
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
                message = f"{ids['outside']:.0f} token ids of {name} are outside 0 to {size - 1:.0f}: "
                message += f"they range from {low:.0f} to {high:.0f}"
                found.append(("error", message, {"problem": "token_ids", "module": name, **ids}))
        for name, tensor in record.batch.items():
            found += self._check_tensor(name, tensor)
        if self.num_classes is not None:
            found += self._check_labels(record, self.num_classes)
        self.batches += bool(record.batch)
        if not found:
            return None
        severity, message, values = min(found, key=lambda problem: problem[0] != "error")
        return self.event(record, severity, message, **values, sample_ids=record.sample_ids[:64])

    def _check_tensor(self, name: str, tensor: dict[str, Any]) -> list[Problem]:
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
                message = f"{constant} samples of {name} are constant (all zero or all padding)"
                found.append(("warning", message, values))
            self.constant_seen[name] = self.constant_seen.get(name, 0) + 1
        return found

    def _check_labels(self, record: Record, num_classes: int) -> list[Problem]:
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
                message = f"labels {name} reach {top:.0f}, but there are {num_classes} classes"
                found.append(("error", message, values))
        return found


class BatchShift(Detector):
    """A batch that is unlike those before it.

    - Numbers: the mean is `z` robust standard deviations and half a standard deviation of the data away from
      its trailing median. For a batch smaller than usual, such as the last one of an epoch, both grow with
      the square root of the sizes' ratio. Or the largest absolute value is 10 times the largest seen.
    - Integers: the population stability index, sum of (p - q) ln(p / q) over the histogram's buckets, of the
      batch against the last `window` exceeds `psi` (0.25 is called a major shift since Siddiqi, 2006) and 4
      times what chance gives so few numbers, (buckets - 1)(1/n + 1/m). Or its excess over chance, averaged
      over 8 batches, exceeds `psi`. Either way it is twice what it was in the last `window` batches, since
      the tokens of one document are not independent draws.
    - Labels: one is twice the largest seen and far outside the range of the largest ones, since a batch
      without the last classes is usual.
    - Length: the second dimension is 4 times the trailing median, twice the longest seen, and 5 robust
      standard deviations of its logarithm above: the lengths of texts are lognormal or worse.

    What raised an alarm enters the windows no larger than the alarm threshold, so that one outlier does not
    hide the next.
    """

    kind = "batch_shift"
    STATE = ("means", "stds", "sizes", "peaks", "lengths", "histograms", "sums", "indices", "levels", "tops")
    COOLDOWN = 50
    SUBJECT = ("problem", "tensor")

    def __init__(self, z: float = 8.0, psi: float = 0.25, window: int = 64, minimum: int = 16) -> None:
        super().__init__()
        self.z, self.psi, self.size, self.minimum = z, psi, window, minimum
        self.means: dict[str, TrailingWindow] = {}
        self.stds: dict[str, TrailingWindow] = {}
        self.sizes: dict[str, int] = {}
        self.peaks: dict[str, TrailingWindow] = {}
        self.lengths: dict[str, TrailingWindow] = {}
        self.histograms: dict[str, list[list[int]]] = {}
        self.sums: dict[str, list[int]] = {}
        self.indices: dict[str, TrailingWindow] = {}
        self.levels: dict[str, TrailingWindow] = {}
        self.tops: dict[str, TrailingWindow] = {}

    def check(self, record: Record) -> Event | None:
        found: list[tuple[str, dict[str, Any]]] = []
        for name, tensor in record.batch.items():
            shape = tensor.get("shape", [])
            if len(shape) > 1 and shape[1]:
                found += self._check_length(name, shape[1])
            if "histogram" in tensor:
                found += self._check_histogram(name, tensor["histogram"])
                if len(shape) == 1 and "max" in tensor:
                    found += self._check_labels(name, tensor["max"])
            elif "std" in tensor:
                found += self._check_mean(name, tensor, shape[0] if shape else 1)
                found += self._check_peak(name, tensor)
        if not found:
            return None
        message = "; ".join(message for message, _ in found)
        return self.event(record, "warning", message, **found[0][1], sample_ids=record.sample_ids[:64])

    def _window(self, windows: dict[str, TrailingWindow], name: str) -> TrailingWindow:
        if name not in windows:
            windows[name] = TrailingWindow(self.size)
        return windows[name]

    def _check_length(self, name: str, length: int) -> list[tuple[str, dict[str, Any]]]:
        window = self._window(self.lengths, name)
        if window.is_full and length == window.smallest() == window.largest():
            return []  # always the same length: nothing to remember
        found = []
        if len(window) >= self.minimum and length > 4 * window.median():
            middle, longest = window.median(), window.largest()
            sigma = math.log(window.quantile(0.75) / window.quantile(0.25)) / 1.349
            if length > 2 * longest and math.log(length / middle) > 5 * sigma:
                message = f"{name} has length {length}: median {middle:.0f}, previous maximum {longest:.0f}"
                found = [(message, {"problem": "length", "tensor": name, "length": length})]
                length = int(2 * longest)
        window.add(length)
        return found

    def _check_mean(self, name: str, tensor: dict[str, Any], n: int) -> list[tuple[str, dict[str, Any]]]:
        mean, std = tensor.get("mean", math.nan), tensor["std"]
        means, stds = self._window(self.means, name), self._window(self.stds, name)
        usual = self.sizes[name] = max(n, self.sizes.get(name, 1))
        found: list[tuple[str, dict[str, Any]]] = []
        if len(means) >= self.minimum and math.isfinite(mean):
            middle = means.median()
            away = abs(mean - middle) * math.sqrt(n / usual)
            # Data that were constant so far, such as a mask, have a standard deviation of 0.
            spread = stds.median() or max(std if math.isfinite(std) else 0.0, abs(middle))
            if away > 0.5 * spread and away > self.z * means.sigma():
                message = f"the mean of {name} is {mean:.3g}; its trailing median is {middle:.3g}"
                found.append((message, {"problem": "mean", "tensor": name, "mean": mean}))
        means.add(mean)
        stds.add(std)
        return found

    def _check_peak(self, name: str, tensor: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        peak = max(abs(tensor.get("min", math.nan)), abs(tensor.get("max", math.nan)))
        peaks = self._window(self.peaks, name)
        found: list[tuple[str, dict[str, Any]]] = []
        if len(peaks) >= self.minimum and math.inf > peak > 10 * peaks.largest() > 0:
            message = f"{name} reaches {peak:.3g}; the previous maximum is {peaks.largest():.3g}"
            found.append((message, {"problem": "peak", "tensor": name, "peak": peak}))
            peak = 10 * peaks.largest()
        peaks.add(peak)
        return found

    def _check_labels(self, name: str, top: float) -> list[tuple[str, dict[str, Any]]]:
        tops = self._window(self.tops, name)
        found: list[tuple[str, dict[str, Any]]] = []
        if len(tops) >= self.minimum and top > tops.largest():
            highest = tops.largest()
            limit = max(2 * highest, highest + 4 * (highest - tops.smallest()))
            if highest > 0 and top > limit:
                message = f"{name} reaches {top:.0f}; the previous maximum is {highest:.0f}"
                found.append((message, {"problem": "labels", "tensor": name, "max": top}))
                top = limit
        tops.add(top)
        return found

    def _check_histogram(self, name: str, histogram: list[int]) -> list[tuple[str, dict[str, Any]]]:
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
    """Return the population stability index of two histograms, and its mean by chance alone.

    Half a count is added to each bucket that either histogram has, as an empty one would make the index
    infinite.
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
