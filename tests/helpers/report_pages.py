# SPDX-License-Identifier: BSD-3-Clause
"""Runs for reports, and readers of the pages made from them."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np

from fastclip.monitor import MEANINGS
from fastclip.monitor.sinks import JsonlSink
from fastclip.report import series as step_series
from helpers.records import NAN, bad_gradients, clipped, healthy, seeded, watched


def write_log(directory, records, rank=0):
    """Write fastclip's log of one rank."""
    sink = JsonlSink(directory, rank, header={"fields": MEANINGS})
    for record in records:
        sink.write(record.to_dict())
    sink.close()


def make_series(values, at=None, breaks=()):
    """Return a series of values, by default at the places 0, 1, 2 ..."""
    return step_series.Series("x", list(range(len(values)) if at is None else at), list(values), list(breaks))


def data_of(page):
    """Return the numbers in a page; fails on NaN or Infinity, which are not JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text, parse_constant=refuse)


def places_of(coded):
    """Decode places."""
    if "first" in coded:
        kind = "u1" if "u1" in coded else "u4"
        distances = np.frombuffer(base64.b64decode(coded[kind]), "<" + kind).tolist()
        return [coded["first"] + sum(distances[:i]) for i in range(len(distances) + 1)]
    return [first + distance * i for first, distance, count in coded["runs"] for i in range(count)]


def values_of(coded):
    """Decode values."""
    kind = next(iter(coded))
    return np.frombuffer(base64.b64decode(coded[kind]), "<" + kind)


def chart_keys(page):
    """Return the keys of the charts in a page."""
    return [chart["key"] for chart in data_of(page)["charts"]]


class Reader(HTMLParser):
    """The elements of a page, its texts, and the contents of its scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.raw = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag in ("script", "style"):
            self.raw.append((tag, dict(attributes), ""))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] in ("script", "style") and self.cdata_elem:
            tag, attributes, text = self.raw[-1]
            self.raw[-1] = (tag, attributes, text + data)
        else:
            self.text.append(data)


def records_of(count, **fields):
    rng = seeded()
    return [clipped(s, 0.5 + rng.random(), loss=3 - s / count, lr=[1e-3], **fields) for s in range(count)]


def failing():
    rng = seeded()
    records = [healthy(rng, s, ranks={}) for s in range(100)]
    records.append(healthy(rng, 100, ranks={}, loss=NAN, **bad_gradients()))
    return watched(records)
