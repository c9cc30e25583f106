# SPDX-License-Identifier: BSD-3-Clause
"""The events and incidents of a report."""

from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.monitor import Event, IncidentSaved, Monitor, Record, diagnose
from fastclip.monitor.incidents.incident import IncidentSummary
from fastclip.report import events as report_events
from fastclip.report import report_html
from helpers.records import NAN, healthy, seeded, watched
from helpers.report_pages import Reader, data_of, failing


def test_collect_events_merges_the_events_of_several_ranks():
    runs = {r: [Record(s, rank=r) for s in range(10)] for r in range(4)}
    for rank, its in runs.items():
        its[5].events = [Event("nonfinite", 5, "error", "the loss is nan", rank=rank)]
    runs[3][5].events.append(Event("rank", 5, "warning", "slow", rank=3))
    events = report_events.collect_events(runs)
    assert [(t.event.kind, t.ranks, t.messages) for t in events] == [
        ("nonfinite", [0, 1, 2, 3], ["the loss is nan"]),
        ("rank", [3], ["slow"]),
    ]
    assert (
        report_events.format_ranks([0, 1, 2, 3, 5, 7, 8]) == "ranks 0 to 3, 5, 7, 8"
        and report_events.format_ranks([3]) == "rank 3"
    )


def test_collect_events_diagnoses_as_with_all_records():
    runs = {0: watched([*failing()[:-1], *failing()[-1:], *(healthy(seeded(5), s) for s in range(101, 700))])}
    for event in (events := report_events.collect_events(runs)):
        assert str(event.diagnosis) == str(diagnose(runs, event.event))
    assert events


def test_event_list_has_the_most_important_of_thousands():
    records = [Record(s) for s in range(10_000)]
    for record in records:
        record.events = [Event("batch_shift", record.step, "warning", "other")]
    records[9000].events.append(Event("loss_spike", 9000, "info", "rare"))
    records[9500].events.append(Event("nonfinite", 9500, "error", "worst"))
    page = report_html({0: records})
    assert page.count('<details class="event') == report_events.MOST_LISTED
    assert page.count("Where to look first") == report_events.MOST_DIAGNOSED
    assert "rare" in page and "worst" in page and "9,702 more events are only marks" in page
    rows = data_of(page)["events"]["rows"]
    assert len(rows) == 10_002 and sum(row[3] >= 0 for row in rows) == report_events.MOST_LISTED
    assert len(page) < 2e6


def test_event_list_shows_an_incident_with_its_replay_command(tmp_path, capsys):
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


def test_collect_events_assigns_incidents_by_step_then_by_kind():
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
    events = report_events.collect_events({0: records}, saved)
    found = {(t.event.step, t.event.kind): [s.path.name for s in t.incidents] for t in events}
    assert found == {
        (10, "norm_spike"): ["00000010-nonfinite"],
        (10, "loss_spike"): ["00000010-loss_spike"],
        (30, "norm_spike"): ["00000021-norm_spike"],
        (90, "nonfinite"): [],
    }
