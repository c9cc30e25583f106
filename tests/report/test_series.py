# SPDX-License-Identifier: BSD-3-Clause
"""Series over the steps and their encoding."""

import math

import numpy as np
import pytest

from fastclip.report import encoding
from fastclip.report import series as step_series
from helpers.records import INF, NAN, seeded
from helpers.report_pages import make_series, places_of, values_of


def test_thinned_keeps_every_extreme_and_every_nonfinite_value():
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_001)
    values[[5, 4321, 10_000]] = [50.0, -60.0, 7.0]
    values[[77, 78, 79, 5000]] = [NAN, INF, -INF, NAN]
    less = step_series.thinned(make_series(values.tolist()), 900)
    assert len(less.values) <= 1000 and {5, 4321, 77, 78, 79, 5000, 0, 10_000} <= set(less.at)
    assert all(v == values[i] or math.isnan(v) for i, v in zip(less.at, less.values, strict=True))
    size = math.ceil(4 * len(values) / 900)
    for start in range(0, len(values), size):
        column = values[start : start + size]
        column = column[np.isfinite(column)]
        kept = [v for i, v in zip(less.at, less.values, strict=True) if start <= i < start + size]
        kept = [v for v in kept if math.isfinite(v)]
        assert (min(kept), max(kept)) == (column.min(), column.max())
        assert {start, min(start + size, len(values)) - 1} <= set(less.at)


def test_thinned_returns_a_short_series_unchanged():
    one = make_series([1.0, NAN, 2.0])
    assert step_series.thinned(one, 3) is one


def test_trailing_quantiles_match_numpy():
    rng = np.random.default_rng(1)
    values = rng.lognormal(size=700)
    values[[3, 100, 101, 500]] = [NAN, INF, NAN, -INF]
    p50, p95 = step_series.trailing_quantiles(make_series(values.tolist()), {"p50": 0.5, "p95": 0.95})
    finite = [v for v in values if math.isfinite(v)]
    count = 0
    expected = {}
    for place, value in enumerate(values):
        count += math.isfinite(value)
        if count >= step_series.MINIMUM:
            expected[place] = np.percentile(finite[max(0, count - step_series.WINDOW) : count], [50, 95])
    assert p50.at == p95.at == list(expected)
    np.testing.assert_allclose(np.stack([p50.values, p95.values], 1), np.stack(list(expected.values())))


def test_trailing_share_is_the_mean_of_the_last_steps():
    flags = (np.random.default_rng(2).random(600) < 0.3).astype(float)
    share = step_series.trailing_share(make_series(flags.tolist()), "share", 50, 10)
    expected = [flags[max(0, i - 49) : i + 1].mean() for i in range(9, 600)]
    assert share.at == list(range(9, 600))
    np.testing.assert_allclose(share.values, expected)


def test_without_repeats_keeps_the_line():
    values = [1.0] * 50 + [2.0] + [1.0] * 30 + [5.0] * 40
    less = step_series.without_repeats(make_series(values, breaks=[100]))
    assert len(less.values) < 12 and {99, 100} <= set(less.at), "a gap keeps the values beside it"
    np.testing.assert_array_equal(np.interp(range(len(values)), less.at, less.values), values)


@pytest.mark.parametrize(
    "steps, gaps",
    [
        (range(100), []),
        ([*range(40), *range(60, 100)], [60]),
        ([0, 1, 2, 4, 8, 16, 32, *range(50, 350, 50)], []),
        ([*range(0, 500, 50), *range(700, 1200, 50)], [700]),
        ([5], []),
    ],
)
def test_axis_series_breaks_where_steps_are_unusually_far_apart(steps, gaps):
    axis = step_series.Axis(range(2000))
    one = axis.series("x", ((step, 1.0) for step in steps))
    assert [axis.steps[place] for place in one.breaks] == gaps


def test_axis_has_a_place_for_a_gap_of_all_ranks():
    axis = step_series.Axis([*range(10), *range(50, 60)])
    assert axis.steps == [*range(11), *range(50, 60)] and axis.place(50) == 11
    one = axis.series("x", [(9, 1.0), (50, 2.0), (51, None)])
    assert one.at == [9, 11]


@pytest.mark.parametrize("values", [[1.5, NAN, INF, -INF, 0.0, -1e-30], [1e300, 1e-300, NAN], []])
def test_encode_values_round_trips(values):
    coded = encoding.encode_values(values)
    assert list(coded) == (["f8"] if 1e300 in values else ["f4"])
    np.testing.assert_allclose(values_of(coded), values, rtol=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_encode_places_round_trips(seed):
    rng = seeded(seed)
    places = sorted(rng.sample(range(10_000), [0, 1, 2, 700, 700][seed]))
    places += range(11_000 + 9000 * (seed == 4), 20_000 + 7 * rng.choice([0, 90]) + 20_000, 7)
    assert places_of(encoding.encode_places(places)) == places
    assert encoding.encode_places(range(0, 100_000)) == {"runs": [[0, 1, 100_000]]}
