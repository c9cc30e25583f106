# SPDX-License-Identifier: BSD-3-Clause
"""Damaged and forged incidents are reported and never run; `fastclip incidents` and `fastclip show`."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch

from fastclip.cli import main
from fastclip.monitor.incidents.incident import IncidentError, list_incidents, read_incident
from fastclip.monitor.incidents.store import IncidentStore

NAN = float("nan")
MANIFEST = {
    "event": {"severity": "error", "message": "NaN in 3 gradients", "values": {"total_norm": NAN}},
    "record": {
        "step": 40,
        "loss": NAN,
        "lr": [0.1],
        "batch": {"0": {"shape": [8, 64], "mean": 0.125, "nan": 7, "histogram": [1] * 64}},
        "sample_ids": list(range(100, 116)),
    },
    "parameters": [
        {"name": f"layer.{i}.weight", "nan_count": 3, "inf_count": 0, "norm": NAN} for i in range(25)
    ],
}
STATE = {"state.pt": {"w": torch.arange(1000.0)}, "batches.pt": [torch.ones(3), ("tuple", [1])]}


def save(store, step=40, kind="nonfinite", rank=0, world=1, **more):
    return store.save(step, kind, rank, world, MANIFEST | more, STATE)


def edit(path, **changes):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def flip(path):
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


ENTRY = {"bytes": 1, "sha256": "0"}
DAMAGES = {
    "state.pt: expected the SHA-256": flip,
    "bytes, but got 100: the file is damaged": lambda path: os.truncate(path / "state.pt", 100),
    "batches.pt: No such file": lambda path: (path / "batches.pt").unlink(),
    "manifest.json: No such file": lambda path: (path / "manifest.json").unlink(),
    "manifest.json: not JSON": lambda path: os.truncate(path / "manifest.json", 100),
    "has format version 2": lambda path: edit(path, fastclip_incident=2),
    "not the manifest of an incident": lambda path: edit(path, fastclip_incident=None),
    "expected step to be": lambda path: edit(path, step="40"),
    "expected time to be of type int or float": lambda path: edit(path, time=True),
    "expected the rank in the directory's name, but got 1": lambda path: edit(path, rank=1),
    "expected step 40 as on rank 0": lambda path: edit(path.parent / "rank00001", step=41),
    "expected 0 <= rank < world_size": lambda path: edit(path, world_size=10**9),
    "expected a file name with its bytes and sha256, but got '../../secret'": lambda path: edit(
        path, files={"../../secret": ENTRY}
    ),
    "expected a file name with its bytes and sha256, but got 'a'": lambda path: edit(
        path, files={"a": ENTRY | {"bytes": "1"}}
    ),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_read_incident_raises_on_damage(tmp_path, message):
    store = IncidentStore(tmp_path)
    path = save(store, world=2)
    save(store, rank=1, world=2)
    save(store, 41)
    DAMAGES[message](path)
    with pytest.raises(IncidentError) as caught:
        read_incident(path.parent)
    assert message in str(caught.value) and str(path.parent) in str(caught.value)
    damaged, whole = list_incidents(store.directory)
    assert damaged.state == "damaged" and damaged.damage == str(caught.value)
    assert whole.state == "whole" and whole.damage is None


def test_read_incident_raises_on_other_directories(tmp_path):
    with pytest.raises(IncidentError, match="not an incident"):
        read_incident(tmp_path)
    for read in (read_incident, list_incidents):
        with pytest.raises(IncidentError, match="nowhere: No such file"):
            read(tmp_path / "nowhere")


def test_read_incident_without_verify_ignores_a_flipped_byte(tmp_path):
    path = save(IncidentStore(tmp_path))
    flip(path)
    assert read_incident(path, verify=False).ranks == [0]


class Code:
    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_load_refuses_forged_code(tmp_path):
    path = save(IncidentStore(tmp_path / "store"))
    forged, code = path / "state.pt", Code()
    code.path = str(tmp_path / "ran")
    with zipfile.ZipFile(forged) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(forged, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, pickle.dumps(code, 2) if name.endswith("data.pkl") else data)
    entry = {"bytes": forged.stat().st_size, "sha256": hashlib.sha256(forged.read_bytes()).hexdigest()}
    edit(path, files={"state.pt": entry})
    incident = read_incident(path)  # its hash is right
    with pytest.raises(IncidentError, match=r"with weights_only=True: unsupported GLOBAL .*mkdir"):
        incident.load(0, "state.pt")
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def fastclip_(capsys):
    """Return a function that runs a command and returns its exit status, output and errors."""

    def run(*arguments):
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_incidents_lists_whole_incomplete_and_damaged(tmp_path, fastclip_):
    store = IncidentStore(tmp_path)
    save(store)
    save(store, 7, "loss_spike", world=2)
    status, out, err = fastclip_("incidents", tmp_path)
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and err == ""
    assert lines[0] == ["step", "kind", "severity", "ranks", "size", "state", "age", "name"]
    assert lines[1][:4] == ["7", "loss_spike", "error", "1/2"] and lines[1][6] == "incomplete"
    assert lines[2][:4] == ["40", "nonfinite", "error", "1/1"] and lines[2][6] == "whole"
    assert lines[2][5] == "KiB" and lines[2][8:] == ["s", "00000040-nonfinite"]
    flip(tmp_path / "00000007-loss_spike" / "rank00000")
    status, out, err = fastclip_("incidents", tmp_path)
    assert status == 1 and "damaged" in out and err.count("\n") == 1
    assert err.startswith("fastclip: ") and "state.pt: expected the SHA-256" in err
    assert fastclip_("incidents", tmp_path, "--quick")[0] == 0


def test_incidents_of_empty_and_missing_directories(tmp_path, fastclip_):
    assert fastclip_("incidents", tmp_path) == (0, "", f"fastclip: no incidents in {tmp_path}\n")
    status, out, err = fastclip_("incidents", tmp_path / "nowhere")
    assert (status, out) == (2, "") and err == f"fastclip: {tmp_path}/nowhere: No such file or directory\n"


def test_show_prints_every_section(tmp_path, fastclip_):
    path = save(IncidentStore(tmp_path))
    status, out, err = fastclip_("show", path.parent)
    assert status == 0 and err == ""
    assert out.startswith("step 40: error: nonfinite: NaN in 3 gradients\nsaved 2")
    for text in [
        "by rank 0 of 1, 7.0 KiB",
        "event\n  total_norm  nan",
        "  loss  nan\n  lr    0.1",
        "layer.0.weight   nan_count 3, inf_count 0, norm nan",
        "and 5 more",
        "0: shape 8, 64, mean 0.125, nan 7",
        "sample ids: 100, 101, 102, 103, 104, 105, 106, 107, ... (16)",
        f"torch     {torch.__version__}",
        "rank 0  state.pt  5.",
    ]:
        assert text in out, text
    assert "histogram" not in out and "not saved" not in out


def test_show_reports_what_was_not_saved(tmp_path, fastclip_):
    path = save(IncidentStore(tmp_path), world=2, incomplete=["the batch: no memory"])
    status, out, _ = fastclip_("show", path.parent)
    assert status == 1 and "not saved\n  rank 1 saved nothing\n  the batch: no memory" in out
    status, out, _ = fastclip_("show", path)
    assert status == 1 and "rank 1 has" not in out
    flip(path)
    status, out, err = fastclip_("show", path)
    assert (status, out) == (2, "") and err.startswith(f"fastclip: {path}/state.pt: expected the SHA-256")


def test_show_bears_a_poor_manifest(tmp_path, fastclip_):
    path = IncidentStore(tmp_path).save(1, "x", 0, 1, {}, {})
    assert fastclip_("show", path)[0] == 0
    edit(
        path, parameters=["a"], versions=None, message=None, severity=5, record={"batch": {"0": 1}, "lr": {}}
    )
    assert fastclip_("show", path)[0] == 0 and fastclip_("incidents", tmp_path)[0] == 0
    for key in ("event", "record", "parameters", "versions", "incomplete"):
        edit(path, **{key: 5})
        status, out, err = fastclip_("show", path)
        assert (status, out) == (2, "") and f"manifest.json: expected {key} to be of type " in err
        edit(path, **{key: None})


def test_incidents_as_a_process(tmp_path):
    save(IncidentStore(tmp_path))
    command = [sys.executable, "-m", "fastclip", "incidents", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "00000040-nonfinite" in result.stdout, result.stderr
