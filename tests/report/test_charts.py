# SPDX-License-Identifier: BSD-3-Clause
"""The charts and heat maps of a report."""

import numpy as np
import pytest

from fastclip.monitor import Record
from fastclip.report import heat, report_html
from helpers.records import NAN, bad_gradients, clipped, healthy, seeded
from helpers.report_pages import chart_keys, data_of, places_of, records_of, values_of


def test_charts_without_numbers_are_omitted():
    records = [Record(step=s, loss=2.0, lr=[0.1], total_norm=1.0) for s in range(300)]
    page = report_html({0: records})
    assert chart_keys(page) == ["loss", "norm", "rate"]
    assert "as far as the log shows" in page and "too many" not in page
    for record in records:
        record.lr, record.total_norm = [], None
    assert chart_keys(report_html({0: records})) == ["loss"]


def test_charts_show_every_measured_field():
    rng = seeded()
    records = [healthy(rng, s, losses={"aux": 1.0}, group_norms={"a": 1.0}) for s in range(300)]
    records[200].nan_count = 7
    keys = chart_keys(page := report_html({0: records}))
    assert keys == [
        *("loss", "losses", "norm", "groups", "clipping", "rate", "scale", "counts", "updates", "weights"),
        *("time", "seconds", "memory"),
    ]
    assert [found["key"] for found in data_of(page)["heats"]] == ["gradients", "ratios", "activations"]


def test_loss_chart_has_the_values_of_the_log():
    records = records_of(500)
    records[100].loss = NAN
    records[200].loss = None
    loss = data_of(report_html({0: records}))["charts"][0]["series"][0]
    at, values = places_of(loss["at"]), values_of(loss["values"])
    assert at == [s for s in range(500) if s != 200] and np.isnan(values[100])
    np.testing.assert_allclose(values, [r.loss for r in records if r.loss is not None], rtol=1e-6)


@pytest.mark.parametrize("last, scale", [(2.0, "linear"), (5000.0, "log"), (NAN, "linear"), (-1e4, "linear")])
def test_loss_chart_is_logarithmic_if_the_loss_explodes(last, scale):
    records = records_of(300)
    records[-1].loss = last
    assert data_of(report_html({0: records}))["charts"][0]["scale"] == scale


def test_loss_chart_breaks_at_missing_values():
    records = records_of(500)
    for record in records[200:220]:
        record.loss = None
    loss = data_of(report_html({0: records}))["charts"][0]["series"][0]
    assert places_of(loss["breaks"]) == [220]


def test_charts_show_up_to_eight_ranks_and_three_lines_of_more():
    for world, labels in (
        (8, [f"rank {r}" for r in range(8)]),
        (9, ["highest rank", "median rank", "lowest rank"]),
    ):
        runs = {
            r: [Record(s, rank=r, loss=r + s / 100, step_time=0.1) for s in range(50)] for r in range(world)
        }
        runs[2][7].loss = NAN
        found = {c["key"]: c["series"] for c in data_of(report_html(runs))["charts"]}
        assert [s["label"] for s in found["loss"]] == [s["label"] for s in found["time"]] == labels
    highest, middle, lowest = (values_of(s["values"]) for s in found["loss"])
    assert np.isnan(highest[7]) and highest[8] == pytest.approx(8.08)
    assert middle[8] == pytest.approx(4.08) and lowest[8] == pytest.approx(0.08)


def test_loss_chart_shows_all_ranks_from_one_log():
    records = [Record(s, loss=1.0, ranks={"loss": [1.0, 2.0, NAN]}) for s in range(30)]
    loss = data_of(report_html({0: records}))["charts"][0]["series"]
    assert [s["label"] for s in loss] == ["rank 0", "rank 1", "rank 2"] and values_of(loss[1]["values"])[
        0
    ] == 2


def test_gradient_heat_map_has_all_gradients_and_marks_nan():
    records = [clipped(s, 1.0, worst=[{"name": "b", "norm": 2.0}]) for s in range(200)]
    for step in (0, 100):
        records[step].tensor_norms, records[step].tensor_names = [1.0, 2.0, 0.0], ["a", "b", "NaN"]
    records[150].worst = bad_gradients("b")["worst"]
    page = report_html({0: records})
    found = data_of(page)["heats"][0]
    assert found["rows"] == ["a", "b", "NaN"] and places_of(found["at"]) == list(range(200))
    table = values_of(found["values"]).reshape(3, 200)
    assert table[0, 0] == 1 and table[0, 1] == -1 and table[1, 1] == 2 and np.isnan(table[1, 150])
    assert "NaN or Inf in b." in page


def test_heat_map_keeps_the_rows_with_the_largest_numbers():
    rng = seeded()
    records = [Record(s, tensor_norms=[rng.random() for _ in range(125)]) for s in range(0, 11_000, 10)]
    records[7].tensor_norms[121] = 1e9
    found = data_of(report_html({0: records}))["heats"][0]
    assert len(found["rows"]) == heat.MOST_ROWS and "gradient 121" in found["rows"]
    assert len(places_of(found["at"])) == 550 <= heat.MOST_COLUMNS
    assert values_of(found["values"]).max() == np.float32(1e9)
