# SPDX-License-Identifier: BSD-3-Clause
"""The log of JSON lines: what goes in comes back, and a kill or a full disk leaves it readable."""

import gc
import json
import math
import os
import resource
import signal
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastclip.monitor.sinks import JsonlSink, LogError, SinkGroup, read_log
from helpers.log_samples import INF, RECORD


def same(a, b):
    """Equal in type too, with NaN equal to NaN."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))


def write(directory, records, **arguments):
    sink = JsonlSink(directory, header={"run": "r", "max_norm": INF}, **arguments)
    for record in records:
        sink.write(record)
    sink.close()
    return directory / "rank00000.jsonl"


def steps_of(log, rank=0):
    return [record["step"] for record in log.records[rank]]


def refuse(constant):
    raise AssertionError(f"{constant} in JSON")


def test_log_round_trip_is_strict_json(tmp_path):
    file = write(tmp_path, [RECORD])
    lines = file.read_bytes().decode("ascii").split("\n")
    assert len(lines) == 3 and lines[2] == ""
    header, _ = (json.loads(line, parse_constant=refuse) for line in lines[:2])
    assert list(header.items())[:2] == [("fastclip_log", 1), ("rank", 0)]
    for path in (file, tmp_path, str(tmp_path)):
        log = read_log(path)
        assert same(log.records, {0: [RECORD]}) and log.warnings == []
        assert log.header == {"fastclip_log": 1, "rank": 0, "run": "r", "max_norm": INF}


KEYS = st.text(max_size=5).filter(lambda k: k not in {"name", "kind", "error", "fastclip_log", "step"})
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
LEAVES = LEAVES.filter(lambda leaf: leaf not in ("NaN", "Infinity", "-Infinity"))
NESTED = st.recursive(LEAVES, lambda x: st.lists(x, max_size=4) | st.dictionaries(KEYS, x, max_size=4))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(KEYS, NESTED, max_size=4), max_size=4))
def test_log_round_trip_of_random_records(tmp_path_factory, records):
    directory = tmp_path_factory.mktemp("log")
    file = write(directory, records)
    for line in file.read_bytes().splitlines():
        json.loads(line, parse_constant=refuse)
    assert same(read_log(directory).records[0], records)


def test_read_log_ignores_a_torn_last_line(tmp_path):
    file = write(tmp_path, [{"step": 0}, {"step": 1}, {"step": 2, "loss": 0.5, "x": "y" * 99}])
    whole = file.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole) + 1):
        file.write_bytes(whole[:cut])
        log = read_log(tmp_path)
        complete, torn = cut == len(whole), last < cut < len(whole)
        assert steps_of(log) == ([0, 1, 2] if complete else [0, 1])
        assert len(log.warnings) == torn and (not torn or f"{file}:4: " in log.warnings[0])
        write(tmp_path, [{"step": 3}])
        log = read_log(tmp_path)
        assert steps_of(log) == ([0, 1, 2, 3] if complete else [0, 1, 3]) and log.warnings == []


def test_jsonl_sink_cuts_off_a_torn_line_longer_than_a_block(tmp_path):
    file = write(tmp_path, [{"step": 0}])
    with open(file, "ab") as opened:
        opened.write(b"\0" * 200_000)
    write(tmp_path, [{"step": 1}])
    assert steps_of(read_log(tmp_path)) == [0, 1]


@pytest.mark.parametrize("content", [b"", b'{"fastclip_l'])
def test_read_log_warns_of_a_file_killed_in_its_first_line(tmp_path, content):
    write(tmp_path, [{"step": 0}])
    (tmp_path / "rank00000.1.jsonl").write_bytes(content)
    log = read_log(tmp_path)
    assert steps_of(log) == [0] and "rank00000.1.jsonl" in log.warnings[0]
    write(tmp_path, [{"step": 1}])
    log = read_log(tmp_path)
    assert steps_of(log) == [0, 1] and log.warnings == []


HEADER = b'{"fastclip_log":1,"rank":0}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": the file is empty"),
        (b"hello", ": not a log of fastclip, or its run ended"),
        (b"hello\n", ":1: not a log of fastclip: not JSON"),
        (b"[1]\n", ":1: not a log of fastclip: expected a JSON object, but got list"),
        (b'{"step":1}\n', r":1: not a log of fastclip: expected a header .* got the keys \['step'\]"),
        (b'{"fastclip_log":2,"rank":0}\n', ":1: the log has version 2 .* reads up to 1"),
        (HEADER + b'{"step":1}\n{"step":\n{"step":3}\n', ":3: not JSON"),
        (HEADER + b'{"step":1,"loss":NaN}\n', ":2: not JSON: NaN"),
        (HEADER + b'"\xff"\n', ":2: not JSON"),
        (HEADER + b"[" * 200_000 + b"\n", ":2: not JSON"),
        (HEADER + b"3\n", ":2: expected a JSON object, but got int"),
        (HEADER + b"\n", ":2: not JSON"),
    ],
)
def test_read_log_raises_with_the_place_of_damage(tmp_path, content, message):
    file = tmp_path / "rank00000.jsonl"
    file.write_bytes(content)
    for path in (file, tmp_path):
        with pytest.raises(LogError, match=f"^{file}{message}"):
            read_log(path)


def test_read_log_raises_without_a_log(tmp_path):
    with pytest.raises(LogError, match=f"{tmp_path}/missing: No such file"):
        read_log(tmp_path / "missing")
    (tmp_path / "rank0.jsonl").write_bytes(HEADER)
    with pytest.raises(LogError, match=f"{tmp_path}: expected a directory with a file such as"):
        read_log(tmp_path)


def test_jsonl_sink_rotates_files_by_rank_and_opening(tmp_path):
    first, second = (JsonlSink(tmp_path, header={}, max_bytes=300) for _ in range(2))
    for step in range(60):
        (first if step % 7 < 4 else second).write({"step": step})
    first.write({"step": 60, "text": "x" * 1000})
    first.write({"step": 61})
    write(tmp_path, [{"step": 0}], rank=3)
    write(tmp_path, [{"step": 0}], rank=123456)
    log = read_log(tmp_path)
    assert {rank: steps_of(log, rank) for rank in log.records} == {0: [*range(62)], 3: [0], 123456: [0]}
    assert log.warnings == []
    sizes = [path.stat().st_size for path in tmp_path.glob("rank00000.*")]
    assert len(sizes) >= 4 and sum(size > 300 for size in sizes) == 1, "only the record of 1000 bytes"
    assert all(path.read_bytes().startswith(b'{"fastclip_log":1,') for path in tmp_path.iterdir())
    assert all(b'"step"' in path.read_bytes() for path in tmp_path.iterdir()), "a file without records"
    assert (tmp_path / "rank00003.jsonl").exists() and (tmp_path / "rank123456.jsonl").exists()


def test_read_log_reads_more_than_ten_files_in_order(tmp_path):
    write(tmp_path, [{"step": 0, "place": place} for place in range(30)], max_bytes=1)
    assert len([*tmp_path.iterdir()]) == 30
    assert read_log(tmp_path).records == {0: [{"step": 0, "place": 29}]}


def test_read_log_keeps_the_later_of_repeated_steps(tmp_path):
    write(tmp_path, [{"step": s, "run": 1} for s in range(1, 5)] + [{"note": 1}])
    write(tmp_path, [{"step": s, "run": 2} for s in (0, 3, 4, 5)])
    log = read_log(tmp_path)
    kept = [(r.get("step"), r.get("run")) for r in log.records[0]]
    assert kept == [(0, 2), (1, 1), (2, 1), (3, 2), (4, 2), (None, None), (5, 2)]
    assert log.warnings == [f"rank 0: 2 records repeat a step, {log.warnings[0].split(', ', 1)[1]}"]


def test_jsonl_sink_raises_on_invalid_arguments(tmp_path):
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nothing/here"):
        with pytest.raises(OSError, match="expected a directory for the log that can be written") as caught:
            JsonlSink(directory, header={})
        assert caught.value.filename == str(directory) and caught.value.errno
    with pytest.raises(ValueError, match="rank"):
        JsonlSink(tmp_path, -1, header={})
    with pytest.raises(ValueError, match="max_bytes"):
        JsonlSink(tmp_path, header={}, max_bytes=0)
    with pytest.raises(TypeError, match="not JSON serializable"):
        JsonlSink(tmp_path / "new", header={"x": object()})
    sink = JsonlSink(tmp_path, header={"rank": 7, "fastclip_log": 9})
    sink.flush()
    sink.close()
    sink.close()
    sink.flush()
    with pytest.raises(ValueError, match="closed"):
        sink.write({})
    assert read_log(tmp_path).header == {"fastclip_log": 1, "rank": 0}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_jsonl_sink_raises_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError, match="expected a directory for the log that can be written"):
        JsonlSink(tmp_path, header={})


def in_child(function):
    """Run it in a fork, which ends without cleaning up; its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that a parent with threads forks
        pid = os.fork()
    if pid:
        return pid
    try:
        function()
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_jsonl_sink_leaves_a_readable_log(tmp_path):
    """With rotation, so that some kills meet the start of a file."""

    def forever():
        sink = JsonlSink(directory, header={}, max_bytes=1 << 18)
        step = 0
        while True:
            sink.write({"step": step, "x": "y" * (step * 7919 % 60_000)})
            step += 1

    gc.collect()
    for trial in range(20):
        directory = tmp_path / str(trial)
        pid = in_child(forever)
        first = directory / "rank00000.jsonl"
        while not (first.exists() and first.stat().st_size):
            time.sleep(0.0005)
        time.sleep(trial * 0.0005)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        records = read_log(directory).records[0]
        assert [len(r["x"]) for r in records] == [s * 7919 % 60_000 for s in range(len(records))]
        write(directory, [{"step": 10**9}])
        log = read_log(directory)
        assert log.warnings == [] and steps_of(log)[-1] == 10**9
        assert len(log.records[0]) == len(records) + 1


def test_full_disk_loses_only_the_records_it_met(tmp_path):
    def fill():
        sink = SinkGroup([JsonlSink(tmp_path, header={}, max_bytes=4000)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, resource.RLIM_INFINITY))
        for step in range(60):
            if step == 40:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            sink.write({"step": step, "x": "y" * 83})
        os._exit(sink.failures)

    failures = os.WEXITSTATUS(os.waitpid(in_child(fill), 0)[1])
    log = read_log(tmp_path)
    lost = sorted({*range(60)} - {*steps_of(log)})
    assert log.warnings == [] and lost == [*range(lost[0], 40)] and lost[0] > 10
    assert failures == len(lost), "each loss was counted"
