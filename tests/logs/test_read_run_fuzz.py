# SPDX-License-Identifier: BSD-3-Clause
"""read_run with damaged logs of every format: they are read, or refused in one line."""

import gzip
import json
import random
import warnings

import pytest

from fastclip.logs import read_run, verdict_of
from fastclip.monitor import recommend
from fastclip.monitor.sinks import LogError
from helpers.log_samples import LOG, TABLES, event_file, trainer_state_json

ROUNDS = 30  # of each format


def contents(tmp_path):
    entries = [{"loss": 1.0, "grad_norm": 0.5, "learning_rate": 0.1, "step": 10 * i} for i in range(20)]
    own = {"loss": [(s, 1.0) for s in range(9)], "gradient/nan_count": [(s, 0) for s in range(9)]}
    own |= {"lr/0": [(3, 0.1)], "batch/0/mean": [(3, 1.0)], "activation_rms/a/b": [(3, 1.0)]}
    texts = [(3, "- warning loss_spike: high")]
    found = {name: text.encode() for name, (text, _) in TABLES.items()}
    found["gzip"] = gzip.compress(gzip.decompress(LOG.read_bytes())[:3000])
    found["trainer state"] = trainer_state_json(*entries).encode()
    found["trainer state in a line"] = json.dumps({"log_history": entries}).encode()
    found["fastclip"] = (
        b'{"fastclip_log":1,"rank":0}\n' + b'{"step":0,"loss":1.0,"lr":[0.1],"events":[]}\n' * 3
    )
    found["event file"] = event_file(
        tmp_path / "a", {"train/loss": [(s, 1.0) for s in range(9)]}
    ).read_bytes()
    found["event file of fastclip"] = event_file(tmp_path / "b", own, texts).read_bytes()
    return found


def damaged(rng, content):
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5])):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            del data[place:]
        elif kind == 1:
            del data[place : place + rng.randrange(1, 20)]
        elif kind == 2:
            data[place:place] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 6)))
        elif kind == 3:
            data[place : place + 1] = rng.choice(
                [b"0", b"-", b'"', b"{", b"[", b"e", b"\n", b",", b"1e999", b"nan"]
            )
        elif kind == 4:
            data[place:place] = data[: rng.randrange(1, 200)]
        elif data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_read_run_reads_or_refuses_damaged_bytes(tmp_path, directory):
    rng = random.Random(7)
    refused = read = 0
    for name, content in contents(tmp_path / "good").items():
        folder = tmp_path / ("d" + str(len(name)) + name[:2])
        folder.mkdir(exist_ok=True)
        names = {"trainer state": "trainer_state.json", "fastclip": "rank00000.jsonl", "gzip": "a.csv.gz"}
        names |= {"event file": "events.out.tfevents.1", "event file of fastclip": "events.out.tfevents.1"}
        file = folder / names.get(name, "a.jsonl")
        for _ in range(ROUNDS):
            file.write_bytes(damaged(rng, content))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    run = read_run(folder if directory else file)
            except LogError as error:
                assert "\n" not in str(error) and str(error).startswith(str(folder)), (name, error)
                refused += 1
                continue
            read += 1
            json.dumps(verdict_of(run).to_dict(), allow_nan=False)
            for records in run.records.values():
                assert [r.step for r in records] == sorted({r.step for r in records})
                recommend(records)
                json.dumps([r.to_dict() for r in records])
    assert refused > 100 and read > 100
