# SPDX-License-Identifier: BSD-3-Clause
"""write_report and fastclip report."""

import os
import re
from pathlib import Path

import pytest
import torch

from fastclip.cli import main
from fastclip.monitor import Monitor
from fastclip.report import write_report
from helpers.report_pages import chart_keys, failing, write_log


@pytest.fixture
def log(tmp_path):
    write_log(tmp_path / "run 1", failing())
    return tmp_path / "run 1"


def test_report_command_replaces_an_older_page(log, tmp_path, monkeypatch, capsys):
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
def test_report_command_returns_2_if_the_page_cannot_be_written(output, log, tmp_path, monkeypatch, capsys):
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


def test_report_command_keeps_the_old_page_if_writing_fails(log, tmp_path, monkeypatch):
    page = tmp_path / "page.html"
    page.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["report", str(log), "-o", str(page)]) == 2
    assert page.read_text() == "old" and sorted(os.listdir(tmp_path)) == ["page.html", "run 1"]


def test_report_command_returns_2_if_the_log_cannot_be_read(tmp_path, capsys):
    (tmp_path / "rank00000.jsonl").write_bytes(b"\0\1 no log")
    for path in (tmp_path / "rank00000.jsonl", tmp_path / "missing"):
        assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and str(path) in captured.err
    assert not (tmp_path / "page.html").exists()


def test_report_command_accepts_a_log_without_steps(tmp_path):
    write_log(tmp_path / "log", [])
    assert main(["report", str(tmp_path / "log"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "No step has been logged yet." in page and "<figure" not in page


def test_write_report_shows_which_columns_of_a_table_were_read(tmp_path):
    lines = ["step,loss,lr,grad_norm", *(f"{s},{3 - s / 100},0.001,{1 + s % 3}" for s in range(100))]
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    path = write_report(tmp_path / "metrics.csv", tmp_path / "page.html")
    page = path.read_text()
    assert chart_keys(page) == ["loss", "norm", "rate"]
    assert "inferred from the log" in page and "grad_norm" in page and "<h1>metrics.csv</h1>" in page


def test_write_report_accepts_the_records_of_a_running_monitor(tmp_path):
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
