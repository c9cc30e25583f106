# SPDX-License-Identifier: BSD-3-Clause
"""What the report makes of a run: series, events, texts and the page, without a browser."""

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from fastclip.cli import main
from fastclip.logs import Run
from fastclip.monitor import MEANINGS, Event, IncidentSaved, Monitor, Record, diagnose
from fastclip.monitor.incidents.incident import IncidentSummary
from fastclip.monitor.sinks import JsonlSink
from fastclip.report import charts, encoding, heat, page, report_html, write_report
from fastclip.report import events as told
from fastclip.report import series as numbers
from helpers.records import INF, NAN, bad_gradients, clipped, healthy, seeded, watched


def write(directory, records, rank=0):
    sink = JsonlSink(directory, rank, header={"fields": MEANINGS})
    for record in records:
        sink.write(record.to_dict())
    sink.close()


def series(values, at=None, breaks=()):
    return numbers.Series("x", list(range(len(values)) if at is None else at), list(values), list(breaks))


def data_of(page):
    """The numbers in a page; a NaN or Infinity among them would be no JSON."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text, parse_constant=refuse)


def places_of(coded):
    if "first" in coded:
        kind = "u1" if "u1" in coded else "u4"
        distances = np.frombuffer(base64.b64decode(coded[kind]), "<" + kind).tolist()
        return [coded["first"] + sum(distances[:i]) for i in range(len(distances) + 1)]
    return [first + distance * i for first, distance, count in coded["runs"] for i in range(count)]


def values_of(coded):
    kind = next(iter(coded))
    return np.frombuffer(base64.b64decode(coded[kind]), "<" + kind)


def chart_keys(page):
    return [chart["key"] for chart in data_of(page)["charts"]]


class Reader(HTMLParser):
    """The elements of a page, its texts, and what its scripts and styles hold."""

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


# Numbers.


def test_fewer_values_keep_every_extreme_and_all_that_is_not_finite():
    rng = np.random.default_rng(0)
    values = rng.normal(size=10_001)
    values[[5, 4321, 10_000]] = [50.0, -60.0, 7.0]
    values[[77, 78, 79, 5000]] = [NAN, INF, -INF, NAN]
    less = numbers.thinned(series(values.tolist()), 900)
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


def test_few_values_stay_as_they_are():
    one = series([1.0, NAN, 2.0])
    assert numbers.thinned(one, 3) is one


def test_trailing_percentiles_are_those_of_numpy():
    rng = np.random.default_rng(1)
    values = rng.lognormal(size=700)
    values[[3, 100, 101, 500]] = [NAN, INF, NAN, -INF]
    p50, p95 = numbers.trailing_quantiles(series(values.tolist()), {"p50": 0.5, "p95": 0.95})
    finite = [v for v in values if math.isfinite(v)]
    count = 0
    expected = {}
    for place, value in enumerate(values):
        count += math.isfinite(value)
        if count >= numbers.MINIMUM:
            expected[place] = np.percentile(finite[max(0, count - numbers.WINDOW) : count], [50, 95])
    assert p50.at == p95.at == list(expected)
    np.testing.assert_allclose(np.stack([p50.values, p95.values], 1), np.stack(list(expected.values())))


def test_the_trailing_share_is_the_mean_of_the_last_steps():
    flags = (np.random.default_rng(2).random(600) < 0.3).astype(float)
    share = numbers.trailing_share(series(flags.tolist()), "share", 50, 10)
    expected = [flags[max(0, i - 49) : i + 1].mean() for i in range(9, 600)]
    assert share.at == list(range(9, 600))
    np.testing.assert_allclose(share.values, expected)


def test_repeats_are_left_out_and_the_line_stays_the_same():
    values = [1.0] * 50 + [2.0] + [1.0] * 30 + [5.0] * 40
    less = numbers.without_repeats(series(values, breaks=[100]))
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
def test_gaps_are_where_steps_are_further_apart_than_they_usually_are(steps, gaps):
    axis = numbers.Axis(range(2000))
    one = axis.series("x", ((step, 1.0) for step in steps))
    assert [axis.steps[place] for place in one.breaks] == gaps


def test_a_gap_that_all_ranks_have_gets_a_place_on_the_axis():
    axis = numbers.Axis([*range(10), *range(50, 60)])
    assert axis.steps == [*range(11), *range(50, 60)] and axis.place(50) == 11
    one = axis.series("x", [(9, 1.0), (50, 2.0), (51, None)])
    assert one.at == [9, 11]


@pytest.mark.parametrize("values", [[1.5, NAN, INF, -INF, 0.0, -1e-30], [1e300, 1e-300, NAN], []])
def test_values_come_back_from_base64(values):
    coded = encoding.encoded(values)
    assert list(coded) == (["f8"] if 1e300 in values else ["f4"])
    np.testing.assert_allclose(values_of(coded), values, rtol=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_places_come_back_as_runs_or_one_by_one(seed):
    rng = seeded(seed)
    places = sorted(rng.sample(range(10_000), [0, 1, 2, 700, 700][seed]))
    places += range(11_000 + 9000 * (seed == 4), 20_000 + 7 * rng.choice([0, 90]) + 20_000, 7)
    assert places_of(encoding.encoded_places(places)) == places
    assert encoding.encoded_places(range(0, 100_000)) == {"runs": [[0, 1, 100_000]]}


# Charts.


def records_of(count, **fields):
    rng = seeded()
    return [clipped(s, 0.5 + rng.random(), loss=3 - s / count, lr=[1e-3], **fields) for s in range(count)]


def test_a_log_of_loss_rate_and_norm_has_their_charts_and_no_others():
    records = [Record(step=s, loss=2.0, lr=[0.1], total_norm=1.0) for s in range(300)]
    page = report_html({0: records})
    assert chart_keys(page) == ["loss", "norm", "rate"]
    assert "as far as is known" in page and "too much work" not in page
    for record in records:
        record.lr, record.total_norm = [], None
    assert chart_keys(report_html({0: records})) == ["loss"]


def test_a_full_log_has_a_chart_for_all_that_was_measured():
    rng = seeded()
    records = [healthy(rng, s, losses={"aux": 1.0}, group_norms={"a": 1.0}) for s in range(300)]
    records[200].nan_count = 7
    keys = chart_keys(page := report_html({0: records}))
    assert keys == [
        *("loss", "losses", "norm", "groups", "clipping", "rate", "scale", "counts", "updates", "weights"),
        *("time", "seconds", "memory"),
    ]
    assert [found["key"] for found in data_of(page)["heats"]] == ["gradients", "ratios", "activations"]


def test_the_numbers_of_the_page_are_those_of_the_log():
    records = records_of(500)
    records[100].loss = NAN
    records[200].loss = None
    loss = data_of(report_html({0: records}))["charts"][0]["series"][0]
    at, values = places_of(loss["at"]), values_of(loss["values"])
    assert at == [s for s in range(500) if s != 200] and np.isnan(values[100])
    np.testing.assert_allclose(values, [r.loss for r in records if r.loss is not None], rtol=1e-6)


@pytest.mark.parametrize("last, scale", [(2.0, "linear"), (5000.0, "log"), (NAN, "linear"), (-1e4, "linear")])
def test_a_loss_that_explodes_has_a_logarithmic_axis(last, scale):
    records = records_of(300)
    records[-1].loss = last
    assert data_of(report_html({0: records}))["charts"][0]["scale"] == scale


def test_a_value_that_is_missing_for_long_is_a_gap():
    records = records_of(500)
    for record in records[200:220]:
        record.loss = None
    loss = data_of(report_html({0: records}))["charts"][0]["series"][0]
    assert places_of(loss["breaks"]) == [220]


def test_each_of_eight_ranks_has_a_line_and_more_have_three():
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


def test_one_log_tells_the_losses_of_all_ranks():
    records = [Record(s, loss=1.0, ranks={"loss": [1.0, 2.0, NAN]}) for s in range(30)]
    loss = data_of(report_html({0: records}))["charts"][0]["series"]
    assert [s["label"] for s in loss] == ["rank 0", "rank 1", "rank 2"] and values_of(loss[1]["values"])[
        0
    ] == 2


def test_the_heat_map_has_all_gradients_and_marks_what_is_not_finite():
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


def test_a_large_model_has_the_rows_with_the_largest_numbers():
    rng = seeded()
    records = [Record(s, tensor_norms=[rng.random() for _ in range(125)]) for s in range(0, 11_000, 10)]
    records[7].tensor_norms[121] = 1e9
    found = data_of(report_html({0: records}))["heats"][0]
    assert len(found["rows"]) == heat.MOST_ROWS and "gradient 121" in found["rows"]
    assert len(places_of(found["at"])) == 550 <= heat.MOST_COLUMNS
    assert values_of(found["values"]).max() == np.float32(1e9)


def test_the_banner_is_the_verdict_of_lint():
    rng = seeded()
    bad = healthy(rng, 40, loss=NAN, applied=False, loss_scale=None, **bad_gradients())
    records = watched([*(healthy(rng, s, applied=True) for s in range(40)), bad])
    page = report_html({0: records})
    assert '<section class="verdict error"' in page and "It went wrong at step 40" in page
    went_on = report_html({0: [*records, healthy(rng, 41, applied=True)]})
    assert '<section class="verdict warning"' in went_on and "Look at step 40" in went_on


# Events.


def failing():
    rng = seeded()
    records = [healthy(rng, s, ranks={}) for s in range(100)]
    records.append(healthy(rng, 100, ranks={}, loss=NAN, **bad_gradients()))
    return watched(records)


def test_events_of_several_ranks_are_told_once():
    runs = {r: [Record(s, rank=r) for s in range(10)] for r in range(4)}
    for rank, its in runs.items():
        its[5].events = [Event("nonfinite", 5, "error", "the loss is nan", rank=rank)]
    runs[3][5].events.append(Event("rank", 5, "warning", "slow", rank=3))
    events = told.told_events(runs)
    assert [(t.event.kind, t.ranks, t.messages) for t in events] == [
        ("nonfinite", [0, 1, 2, 3], ["the loss is nan"]),
        ("rank", [3], ["slow"]),
    ]
    assert (
        told.ranks_told([0, 1, 2, 3, 5, 7, 8]) == "ranks 0 to 3, 5, 7, 8" and told.ranks_told([3]) == "rank 3"
    )


def test_the_diagnoses_are_those_of_all_records():
    runs = {0: watched([*failing()[:-1], *failing()[-1:], *(healthy(seeded(5), s) for s in range(101, 700))])}
    for told_ in (events := told.told_events(runs)):
        assert str(told_.diagnosis) == str(diagnose(runs, told_.event))
    assert events


def test_of_thousands_of_events_the_most_telling_are_listed():
    records = [Record(s) for s in range(10_000)]
    for record in records:
        record.events = [Event("batch_shift", record.step, "warning", "other")]
    records[9000].events.append(Event("loss_spike", 9000, "info", "rare"))
    records[9500].events.append(Event("nonfinite", 9500, "error", "worst"))
    page = report_html({0: records})
    assert page.count('<details class="event') == told.MOST_LISTED
    assert page.count("Where to look first") == told.MOST_DIAGNOSED
    assert "rare" in page and "worst" in page and "9,702 more are marks" in page
    rows = data_of(page)["events"]["rows"]
    assert len(rows) == 10_002 and sum(row[3] >= 0 for row in rows) == told.MOST_LISTED
    assert len(page) < 2e6


def test_an_incident_is_shown_with_the_command_that_replays_it(tmp_path, capsys):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = tmp_path / "a log"
    monitor = Monitor(model, optimizer, max_norm=1.0, log_dir=str(log), incidents=str(log / "incidents"))
    with pytest.warns(IncidentSaved):
        for step in range(6):
            inputs = torch.full((2, 4), NAN if step == 4 else 1.0)
            monitor.batch(inputs, sample_ids=[2 * step, 2 * step + 1])
            loss = model(inputs).square().mean()
            monitor.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    for arguments in ([], ["--incidents", str(log / "incidents")]):
        assert main(["report", str(log), "-o", str(tmp_path / "page.html"), *arguments]) == 0
        text = " ".join(Reader((tmp_path / "page.html").read_text()).text)
        assert f"fastclip replay '{log}/incidents/00000004-nonfinite' module:build" in text
        assert "samples 8, 9" in text and "whole" in text
    assert main(["report", str(log), "-o", str(tmp_path / "page.html"), "--incidents", "nowhere"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("fastclip: nowhere: ")


def test_an_incident_belongs_to_the_event_of_its_step_or_the_next_of_its_kind():
    def summary(step, kind):
        return IncidentSummary(Path(f"{step:08}-{kind}"), step, kind, None, None, 0)

    records = [Record(s) for s in range(100)]
    for step, kind in ((10, "norm_spike"), (10, "loss_spike"), (30, "norm_spike"), (90, "nonfinite")):
        records[step].events.append(Event(kind, step, "warning", "x"))
    saved = [
        summary(10, "loss_spike"),
        summary(10, "nonfinite"),
        summary(21, "norm_spike"),
        summary(60, "nonfinite"),
    ]
    events = told.told_events({0: records}, saved)
    found = {(t.event.step, t.event.kind): [s.path.name for s in t.incidents] for t in events}
    assert found == {
        (10, "norm_spike"): ["00000010-nonfinite"],
        (10, "loss_spike"): ["00000010-loss_spike"],
        (30, "norm_spike"): ["00000021-norm_spike"],
        (90, "nonfinite"): [],
    }


# The page.

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def evil_page():
    records = failing()
    for record in records:
        record.worst = [{"name": EVIL, "norm": 1.0}]
        record.update_ratio = {EVIL: 0.1}
        record.losses = {EVIL: 1.0}
        record.activations = {EVIL: {"rms": 1.0}}
    records[50].events = [Event(EVIL, 50, "warning", EVIL, {"sample_ids": [EVIL]})]
    run = Run({0: records}, EVIL, {0: {"torch": EVIL, "columns": {EVIL: EVIL}}}, [EVIL])
    return report_html(run, log=f"/nowhere/{EVIL.replace('/', '')}")


def test_nothing_from_the_log_becomes_an_element():
    page, plain = evil_page(), report_html({0: failing()}, log="/nowhere/plain")
    tags, plain_tags = ([tag for tag, _ in Reader(text).elements] for text in (page, plain))
    for tag in ("script", "style", "img", "link", "meta"):
        assert tags.count(tag) == plain_tags.count(tag), tag
    assert not [a for _, attributes in Reader(page).elements for a in attributes if a.startswith("on")]
    assert EVIL in "".join(Reader(page).text), "the text itself is there"
    assert data_of(page)["heats"][0]["rows"] == [EVIL]
    data = next(text for _, attributes, text in Reader(page).raw if attributes.get("id") == "data")
    assert not set("<>&") & set(data)


def test_only_what_is_in_the_page_may_run_and_nothing_be_loaded():
    reader = Reader(report_html({0: failing()}))
    policy = next(
        a["content"] for tag, a in reader.elements if "content-security" in a.get("http-equiv", "").lower()
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for kind, rule in (("script", "script-src"), ("style", "style-src")):
        texts = [text for tag, a, text in reader.raw if tag == kind and a.get("type") != "application/json"]
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[rule].split() == [f"'sha256-{one}'" for one in hashes] and hashes
    links = [a[name] for _, a in reader.elements for name in ("src", "href", "action", "data") if name in a]
    assert sorted(links) == ["#events", "data:,"]
    assert not any("url(" in text or "@import" in text for tag, _, text in reader.raw if tag == "style")


def test_the_licence_of_what_is_inlined_is_in_the_page():
    page = report_html({0: failing()})
    assert "Copyright (c) 2022 Leon Sorokin" in page and "https://github.com/leeoniya/uPlot (v1.6.32)" in page


def test_numbers_that_are_not_finite_are_no_json_literals():
    rng = seeded()
    records = [healthy(rng, s, ranks={}) for s in range(60)]
    for record in records[::3]:
        record.loss, record.total_norm, record.max_norm, record.lr = NAN, INF, -INF, [NAN]
        record.update_ratio, record.memory = {"a": INF}, {"resident": 1}
    data = data_of(report_html({0: records}))
    assert np.isnan(values_of(data["charts"][0]["series"][0]["values"])).any()


def test_100_000_steps_fit_a_page(tmp_path):
    rng = seeded()
    records = [
        Record(s, total_norm=rng.random(), loss=rng.random(), lr=[1 / (1 + s)]) for s in range(100_000)
    ]
    records[70_001].loss, records[70_002].total_norm = 99.0, NAN
    path = write_report({0: records}, tmp_path / "long.html")
    assert path.stat().st_size < 10e6
    data = {chart["key"]: chart["series"] for chart in data_of(path.read_text())["charts"]}
    assert values_of(data["loss"][0]["values"]).max() == 99
    assert np.isnan(values_of(data["norm"][0]["values"])).sum() == 1


def test_the_numbers_of_many_ranks_share_the_room_of_a_page(monkeypatch):
    rng = np.random.default_rng(0)
    lines = [series(rng.random(4000).tolist()) for _ in range(16)] + [series([1.0, 2.0])]
    monkeypatch.setattr(page, "BUDGET", 16_000)
    data = page._data(numbers.Axis(range(4000)), [charts.Chart("loss", "Loss", "linear", lines)], [], [])
    found = [values_of(one["values"]) for one in data["charts"][0]["series"]]
    assert 12_000 < sum(map(len, found)) <= 16_100 and found[-1].tolist() == [1, 2]
    assert len(encoding.script_json(data)) < 9 * 16_000
    for line, values in zip(lines, found, strict=True):
        assert (values.min(), values.max()) == (np.float32(min(line.values)), np.float32(max(line.values)))


def test_the_verdict_says_what_happened_and_where_to_look():
    reader = " ".join(Reader(report_html({0: failing()})).text)
    assert "It went wrong at step 100: the loss is nan; the gradients hold 3 NaN" in reader
    assert "The run ends in NaN or Inf." in reader and "Look first at the model: step 100" in reader
    rose = [Record(s, loss=2.0 + s % 7 / 100 if s < 200 else 50.0 + s) for s in range(300)]
    text = " ".join(Reader(report_html({0: watched(rose)})).text)
    assert "It went wrong at step 200: the loss rose from 2.03 to 250 and ended at" in text
    assert "Healthy: no warning in 300 steps." in report_html({0: records_of(300)})


def test_the_belt_that_does_too_much_work_is_told():
    steady = [clipped(s, 5.0, loss=1.0) for s in range(300)]
    page = report_html({0: watched(steady)})
    assert (
        "The belt does too much work: 100% of the last 200 steps" in page and "not a steering wheel" in page
    )
    assert 'class="belt"' not in report_html({0: records_of(300, max_norm=100.0)})


def test_charts_are_told_in_words():
    records = records_of(100)
    records[3].loss = NAN
    labels = [
        a["aria-label"] for _, a in Reader(report_html({0: records})).elements if a.get("class") == "plot"
    ]
    assert labels[0] == (
        "Loss. loss: 100 values from step 0 to 99, first 3, last 2.01, lowest 2.01, highest 3; "
        "1 of them NaN or Inf."
    )
    assert all(a for a in labels) and len(labels) >= 4


# The command.


@pytest.fixture
def log(tmp_path):
    write(tmp_path / "run 1", failing())
    return tmp_path / "run 1"


def test_the_command_writes_the_page_in_place_of_an_older_one(log, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("old")
    assert main(["report", str(log)]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"report\.html: \d\.\d MiB\n", captured.out) and captured.err == ""
    page = Path("report.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "<h1>run 1</h1>" in page
    assert Path("report.html").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sorted(os.listdir()) == ["report.html", "run 1"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("output", ["missing/report.html", "."])
def test_what_cannot_be_written_is_one_line_and_status_2(output, log, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir())
    assert main(["report", str(log), "-o", output]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.count("\n") == 1
        and captured.err.startswith(f"fastclip: {output}: ")
    )
    assert sorted(os.listdir()) == before


def test_a_page_that_fails_half_way_leaves_the_old_one(log, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["report", str(log), "-o", str(page)]) == 2
    assert page.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["page.html", "run 1"]


def test_a_log_that_cannot_be_read_is_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "rank00000.jsonl").write_bytes(b"\0\1 no log")
    for path in (tmp_path / "rank00000.jsonl", tmp_path / "missing"):
        assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and str(path) in captured.err
    assert not (tmp_path / "page.html").exists()


def test_a_log_without_a_step_has_a_page_that_says_so(tmp_path):
    write(tmp_path / "log", [])
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "No step has been logged yet." in page and "<figure" not in page


def test_a_table_of_another_program_is_shown_with_what_was_assumed(tmp_path):
    lines = ["step,loss,lr,grad_norm", *(f"{s},{3 - s / 100},0.001,{1 + s % 3}" for s in range(100))]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    path = write_report(tmp_path / "metrics.csv", tmp_path / "page.html")
    page = path.read_text()
    assert chart_keys(page) == ["loss", "norm", "rate"]
    assert "found in the log afterwards" in page and "grad_norm" in page and "<h1>metrics.csv</h1>" in page


def test_the_records_of_a_running_monitor_make_a_page(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = Monitor(model, optimizer, max_norm=1.0)
    for _ in range(5):
        loss = model(torch.ones(2, 4)).square().mean()
        monitor.loss(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    page = write_report({0: monitor.records}, tmp_path / "page.html").read_text()
    assert "<h1>Training</h1>" in page and "loss" in chart_keys(page)
    monitor.close()
