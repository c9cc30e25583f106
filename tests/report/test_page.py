# SPDX-License-Identifier: BSD-3-Clause
"""The page of a report: safety, size, texts and the head."""

import base64
import hashlib

import numpy as np
import pytest

from fastclip.logs import Run
from fastclip.monitor import Event, Record
from fastclip.report import charts, encoding, page, report_html, write_report
from fastclip.report import series as step_series
from helpers.records import INF, NAN, bad_gradients, clipped, healthy, seeded, watched
from helpers.report_pages import (
    Reader,
    data_of,
    failing,
    make_series,
    records_of,
    values_of,
)

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


def test_page_escapes_everything_from_the_log():
    page, plain = evil_page(), report_html({0: failing()}, log="/nowhere/plain")
    tags, plain_tags = ([tag for tag, _ in Reader(text).elements] for text in (page, plain))
    for tag in ("script", "style", "img", "link", "meta"):
        assert tags.count(tag) == plain_tags.count(tag), tag
    assert not [a for _, attributes in Reader(page).elements for a in attributes if a.startswith("on")]
    assert EVIL in "".join(Reader(page).text), "the text itself is there"
    assert data_of(page)["heats"][0]["rows"] == [EVIL]
    data = next(text for _, attributes, text in Reader(page).raw if attributes.get("id") == "data")
    assert not set("<>&") & set(data)


def test_page_policy_allows_its_own_scripts_only_and_no_loading():
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


def test_page_has_the_licence_of_uplot():
    page = report_html({0: failing()})
    assert "Copyright (c) 2022 Leon Sorokin" in page and "https://github.com/leeoniya/uPlot (v1.6.32)" in page


def test_page_data_is_strict_json_with_nan_and_inf():
    rng = seeded()
    records = [healthy(rng, s, ranks={}) for s in range(60)]
    for record in records[::3]:
        record.loss, record.total_norm, record.max_norm, record.lr = NAN, INF, -INF, [NAN]
        record.update_ratio, record.memory = {"a": INF}, {"resident": 1}
    data = data_of(report_html({0: records}))
    assert np.isnan(values_of(data["charts"][0]["series"][0]["values"])).any()


@pytest.mark.slow  # makes and reads a long log
def test_page_with_100_000_steps_stays_below_10_megabytes(tmp_path):
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


def test_page_data_shares_the_budget_among_many_ranks(monkeypatch):
    rng = np.random.default_rng(0)
    lines = [make_series(rng.random(4000).tolist()) for _ in range(16)] + [make_series([1.0, 2.0])]
    monkeypatch.setattr(page, "BUDGET", 16_000)
    data = page.page_data(
        step_series.Axis(range(4000)), [charts.Chart("loss", "Loss", "linear", lines)], [], []
    )
    found = [values_of(one["values"]) for one in data["charts"][0]["series"]]
    assert 12_000 < sum(map(len, found)) <= 16_100 and found[-1].tolist() == [1, 2]
    assert len(encoding.script_json(data)) < 9 * 16_000
    for line, values in zip(lines, found, strict=True):
        assert (values.min(), values.max()) == (np.float32(min(line.values)), np.float32(max(line.values)))


def test_page_head_says_what_happened_and_where_to_look():
    reader = " ".join(Reader(report_html({0: failing()})).text)
    assert "The run failed at step 100: the loss is nan; the gradients hold 3 NaN" in reader
    assert "The run ends in NaN or Inf." in reader and "Look first at the model: step 100" in reader
    rose = [Record(s, loss=2.0 + s % 7 / 100 if s < 200 else 50.0 + s) for s in range(300)]
    text = " ".join(Reader(report_html({0: watched(rose)})).text)
    assert "The run failed at step 200: the loss rose from 2.03 to 250 and ended at" in text
    assert "Healthy: no warning in 300 steps." in report_html({0: records_of(300)})


def test_page_head_warns_if_too_many_steps_are_clipped():
    steady = [clipped(s, 5.0, loss=1.0) for s in range(300)]
    page = report_html({0: watched(steady)})
    assert "Too many steps are clipped: 100% of the last 200 steps" in page and "not a steering wheel" in page
    assert 'class="clipping"' not in report_html({0: records_of(300, max_norm=100.0)})


def test_charts_have_descriptions_for_screen_readers():
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


def test_page_head_shows_the_verdict_of_lint():
    rng = seeded()
    bad = healthy(rng, 40, loss=NAN, applied=False, loss_scale=None, **bad_gradients())
    records = watched([*(healthy(rng, s, applied=True) for s in range(40)), bad])
    page = report_html({0: records})
    assert '<section class="verdict error"' in page and "The run failed at step 40" in page
    went_on = report_html({0: [*records, healthy(rng, 41, applied=True)]})
    assert '<section class="verdict warning"' in went_on and "Look at step 40" in went_on
