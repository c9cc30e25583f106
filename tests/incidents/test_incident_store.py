# SPDX-License-Identifier: BSD-3-Clause
"""IncidentStore saves atomically under kills, full disks and races, and stays bounded."""

import errno
import json
import os
import random
import resource
import signal
import time

import pytest
import torch

from fastclip.monitor.incidents import files as files_module
from fastclip.monitor.incidents.files import StoreError, host_name
from fastclip.monitor.incidents.incident import IncidentError, list_incidents, read_incident
from fastclip.monitor.incidents.store import IncidentStore

NAN = float("nan")
EVENT = {"kind": "nonfinite", "severity": "error", "message": "NaN in 3 gradients", "values": {"norm": NAN}}
MANIFEST = {"event": EVENT, "record": {"step": 40, "loss": NAN, "lr": [0.1]}, "parameters": []}
STATE = {"state.pt": {"w": torch.arange(1000.0)}, "batches.pt": [torch.ones(3), ("tuple", [1])]}
MEGABYTES = [{"batches.pt": torch.ones(9), "state.pt": {"w": torch.rand(size << 18)}} for size in (1, 3)]


def save(store, step=40, kind="nonfinite", rank=0, world=1, manifest=None, files=None):
    return store.save(step, kind, rank, world, manifest or MANIFEST, files or STATE)


def names(directory):
    return sorted(os.listdir(directory))


def in_a_child(function):
    """Return the exit status of a forked process: 0 if the function returned."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_read_incident_returns_what_was_saved(tmp_path):
    path = save(IncidentStore(tmp_path / "made" / "here"))
    assert path == tmp_path / "made/here/00000040-nonfinite/rank00000"
    assert names(path) == ["batches.pt", "manifest.json", "state.pt"]
    for where in (path, path.parent):
        incident = read_incident(where)
        assert (incident.step, incident.kind, incident.ranks, incident.missing) == (40, "nonfinite", [0], [])
        assert torch.equal(incident.load(0, "state.pt")["w"], STATE["state.pt"]["w"])
        assert incident.load(0, "batches.pt")[1] == ("tuple", [1]) and incident.incomplete == []
    manifest = incident.manifest
    assert manifest["severity"] == "error" and manifest["message"] == "NaN in 3 gradients"
    assert manifest["record"]["loss"] != manifest["record"]["loss"] and manifest["complete"] is True
    assert manifest["event"]["values"]["norm"] != manifest["event"]["values"]["norm"]
    assert manifest["versions"]["torch"] == torch.__version__ and abs(manifest["time"] - time.time()) < 60
    strict = json.loads((path / "manifest.json").read_bytes(), parse_constant=pytest.fail)
    assert strict["record"]["loss"] == "NaN" and strict["fastclip_incident"] == 1
    with pytest.raises(IncidentError, match=r"rank 0 did not save 'snapshot.pt'"):
        incident.load(0, "snapshot.pt")


def test_save_writes_manifest_values_that_json_lacks(tmp_path):
    strange = {"tensor": torch.tensor(NAN), "set": {1}, "many": torch.ones(2), "path": tmp_path, 3: "\ud800"}
    cycle = {}
    cycle["again"] = cycle
    manifest = {"event": {**EVENT, "values": strange}, "record": cycle, "incomplete": ["no batch"]}
    incident = read_incident(save(IncidentStore(tmp_path), manifest=manifest))
    values = incident.manifest["event"]["values"]
    assert (
        values["tensor"] != values["tensor"] and values["set"] == [1] and "tensor([1., 1.])" in values["many"]
    )
    assert incident.incomplete == ["no batch"] and incident.manifest["complete"] is False


# `make test` kills 50 writers.
@pytest.mark.parametrize("kills", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_save_is_atomic_under_kills(tmp_path, kills):
    def write_until_killed(first, ready):
        store = IncidentStore(tmp_path, max_incidents=3)
        os.write(ready, b"!")
        for step in range(first, first + 1000):
            save(store, step, files=MEGABYTES[step // 3 % 2])

    begin = time.perf_counter()
    for _ in range(4):
        save(IncidentStore(tmp_path / "measured"), files=MEGABYTES[1])
    duration = (time.perf_counter() - begin) / 4
    rng = random.Random(5)
    torn, seen = 0, set()
    for kill in range(kills):
        waiting, ready = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                write_until_killed(1001 * kill, ready)
            finally:
                os._exit(1)
        os.read(waiting, 1)
        time.sleep(rng.uniform(0, 1.3 * duration))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        os.close(waiting), os.close(ready)
        torn += any(".tmp-" in path.name for path in tmp_path.rglob("*"))
        found = list_incidents(tmp_path)
        assert [summary.damage for summary in found if summary.damage] == []
        seen |= {summary.step for summary in found}
    IncidentStore(tmp_path)
    assert not any(".tmp-" in path.name for path in tmp_path.rglob("*"))
    print(f"{torn} kills in the middle of a save, {len(seen)} whole incidents")
    assert torn > kills // 10 and len(seen) > kills // 10, (
        f"{torn} torn, {len(seen)} whole: the kills came at the wrong time"
    )


def test_save_succeeds_while_other_stores_start(tmp_path):
    """A starting store removes empty directories, even one that a rank has just made."""
    waiting, go = os.pipe()

    def rank_saves(rank):
        os.close(go)
        store = IncidentStore(tmp_path, max_incidents=100)
        os.read(waiting, 1)  # ends when the other end is closed
        for step in range(30):
            save(store, step, rank=rank, world=3, files={"state.pt": 1})
        os._exit(0)

    pids = []
    for rank in range(3):
        if (pid := os.fork()) == 0:
            try:
                rank_saves(rank)
            finally:
                os._exit(1)
        pids.append(pid)
    time.sleep(0.3)
    os.close(go)
    while len(names(tmp_path)) < 30:
        IncidentStore(tmp_path)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    os.close(waiting)
    assert [summary.state for summary in list_incidents(tmp_path)] == ["whole"] * 30


def test_store_removes_leftovers_of_dead_processes_only(tmp_path):
    dead = os.fork() or os._exit(0)
    os.waitpid(dead, 0)
    old = time.time() - 2 * 86400
    incident = tmp_path / "00000001-a"
    made = {}
    for name, gone in {
        f".rank00000.tmp-{dead}-{host_name()}": True,
        f".rank00001.tmp-{os.getpid()}-{host_name()}": False,
        f".rank00002.tmp-{dead}-another": False,
        ".rank00003.tmp-1-another": True,
        f".rank00004.tmp-{os.getpid()}-{host_name()}": True,
        ".rank00005.tmp-99999999999999999999-" + host_name(): True,
    }.items():
        (incident / name).mkdir(parents=True)
        (incident / name / "state.pt").write_bytes(b"x")
        made[name] = gone
    for name in (".rank00003.tmp-1-another", f".rank00004.tmp-{os.getpid()}-{host_name()}"):
        os.utime(incident / name, (old, old))
    (tmp_path / f".removed.tmp-{dead}-{host_name()}" / "rank00000").mkdir(parents=True)
    (tmp_path / "00000002-b" / f".rank00000.tmp-{dead}-{host_name()}").mkdir(parents=True)
    (tmp_path / ".mine").mkdir()
    IncidentStore(tmp_path)
    assert names(tmp_path) == [".mine", "00000001-a"]
    assert names(incident) == sorted(name for name, gone in made.items() if not gone)
    assert list_incidents(tmp_path) == []  # nothing is in it yet


def test_save_on_a_full_disk_leaves_nothing(tmp_path):
    save(IncidentStore(tmp_path), 1)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        store = IncidentStore(tmp_path)
        with pytest.raises(StoreError, match="the incident of step 2 was not saved: File too large"):
            save(store, 2, files=MEGABYTES[1])
        save(store, 3)

    assert in_a_child(fill) == 0
    assert names(tmp_path) == ["00000001-nonfinite", "00000003-nonfinite"]
    assert [summary.state for summary in list_incidents(tmp_path)] == ["whole"] * 2


@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
def test_save_that_fails_at_any_system_call_leaves_nothing(tmp_path, monkeypatch, call):
    store = IncidentStore(tmp_path)
    save(store, 1)
    real, calls, failed = getattr(os, call), [], 0

    def failing(*arguments, **named):
        calls.append(1)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(files_module.os, call, failing)
    for at in range(1, 9):
        calls.clear()
        try:
            save(store, 10 + at)
        except StoreError as error:
            failed += 1
            assert "No space left on device" in str(error) and error.errno == errno.ENOSPC
    monkeypatch.undo()
    # An fsync after the rename fails too late to take anything back.
    assert failed == {"mkdir": 2, "fsync": 6, "rename": 1}[call]
    # Only the saves whose two late calls of fsync failed remain beside those that succeeded.
    assert len(list_incidents(tmp_path)) == 1 + 8 - failed + {"mkdir": 0, "fsync": 2, "rename": 0}[call]
    assert {summary.state for summary in list_incidents(tmp_path)} == {"whole"}
    assert not any(".tmp-" in path.name for path in tmp_path.rglob("*"))
    save(store, 99)


def test_save_raises_on_values_that_cannot_be_loaded(tmp_path):
    store = IncidentStore(tmp_path)
    for value, message in [
        (lambda: 0, "state.pt: "),
        (random.Random(0), "weights_only=True: Unsupported global: GLOBAL random.Random"),
        ({"x": frozenset([1])}, "frozenset"),
    ]:
        with pytest.raises(StoreError, match=message):
            save(store, files={"state.pt": value})
    for name in ("../state.pt", "a/b", "manifest.json", ".hidden", ""):
        with pytest.raises(ValueError, match="expected a plain file name"):
            save(store, files={name: 1})
    with pytest.raises(ValueError, match="expected step >= 0 and 0 <= rank < 1"):
        save(store, rank=1)
    assert names(tmp_path) == []


def test_store_raises_on_a_read_only_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to the directory of incidents"):
        IncidentStore(tmp_path / "file")
    (tmp_path / "read-only").mkdir(mode=0o555)
    os.chmod(tmp_path, 0o755)

    def as_nobody():
        if os.getuid() == 0:
            os.setuid(65534)
        with pytest.raises(PermissionError, match="cannot write to the directory of incidents"):
            IncidentStore(tmp_path / "read-only")

    assert in_a_child(as_nobody) == 0
    for wrong in ({"max_incidents": 1}, {"max_bytes": 0}):
        with pytest.raises(ValueError, match="expected max_"):
            IncidentStore(tmp_path, **wrong)


def test_save_numbers_incidents_of_the_same_step(tmp_path):
    first, second = IncidentStore(tmp_path), IncidentStore(tmp_path)
    assert save(first, world=2).parent.name == "00000040-nonfinite"
    assert save(first, world=2).parent.name == "00000040-nonfinite-2"
    assert save(second, rank=1, world=2).parent.name == "00000040-nonfinite"
    assert save(first, kind="my kind/../x").parent.name == "00000040-my_kind_.._x"
    assert not (tmp_path / "x").exists()


def test_failed_saves_do_not_mix_incidents_of_ranks(tmp_path):
    ranks = [IncidentStore(tmp_path), IncidentStore(tmp_path)]
    save(ranks[0], world=2)
    with pytest.raises(StoreError):
        save(ranks[1], rank=1, world=2, files={"state.pt": lambda: 0})
    assert read_incident(tmp_path / "00000040-nonfinite").missing == [1]
    resumed = [IncidentStore(tmp_path), IncidentStore(tmp_path)]
    for number, stores in ((2, ranks), (2, resumed)):
        if stores is resumed:
            files_module.remove_tree(tmp_path / "00000040-nonfinite-2")
        for rank, store in enumerate(stores):
            assert save(store, rank=rank, world=2).parent.name == f"00000040-nonfinite-{number}"
    (left_alone, again) = list_incidents(tmp_path)
    assert left_alone.state == "incomplete" and left_alone.incident.incomplete == ["rank 1 saved nothing"]
    assert again.state == "whole" and again.incident.ranks == [0, 1]


def test_save_retains_the_first_and_the_newest_incident(tmp_path):
    store = IncidentStore(tmp_path, max_incidents=4)
    for step in (50, 3, 4, 5, 6, 7):  # a resumed run has smaller steps; the first incident stays the first
        save(store, step)
    assert [summary.step for summary in list_incidents(tmp_path)] == [5, 6, 7, 50]
    size = list_incidents(tmp_path)[0].bytes
    save(IncidentStore(tmp_path, max_bytes=3 * size + size // 2), 8)
    assert [summary.step for summary in list_incidents(tmp_path)] == [7, 8, 50]
    save(IncidentStore(tmp_path, max_bytes=1), 9)
    assert [summary.step for summary in list_incidents(tmp_path)] == [9, 50]
    other = IncidentStore(tmp_path, max_incidents=2)
    for step in (10, 11):
        save(other, step, rank=1, world=2)  # only rank 0 removes
    assert len(list_incidents(tmp_path)) == 4
    assert not any(".tmp-" in name for name in names(tmp_path))
