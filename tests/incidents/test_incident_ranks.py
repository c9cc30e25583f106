# SPDX-License-Identifier: BSD-3-Clause
"""Incidents of several processes: every rank saves the same step, and one process can replay it."""

import math

import pytest
import torch

import fastclip
from fastclip.cli import main
from fastclip.monitor.incidents.decode import decode
from fastclip.monitor.incidents.incident import list_incidents, read_incident
from fastclip.monitor.incidents.shards import full_state
from fastclip.replay import ReplayError
from fastclip.replay.load import load_incident
from helpers import rank_jobs_incidents as jobs
from helpers.ranks import Ranks

NAN = math.nan
LAYOUTS = ["ddp", "fsdp2"]


@pytest.fixture(scope="module")
def two():
    processes = Ranks(2)
    yield processes
    processes.stop()


def run(processes, name, *arguments, **options):
    return processes.run(jobs.call, name, arguments, options)


def incident_of(tmp_path, step, kind):
    path = tmp_path / "incidents" / f"{step:08d}-{kind}"
    assert sorted(p.name for p in path.iterdir()) == ["rank00000", "rank00001"]
    return path


def before(tmp_path, rank):
    """Load the whole state that the rank had before the step."""
    return torch.load(tmp_path / f"before-{rank}.pt", weights_only=True)


def tensors_of(value, name=""):
    """Return all nested tensors and numbers by name."""
    if isinstance(value, dict):
        value = list(value.items())
    elif isinstance(value, (list, tuple)):
        value = list(enumerate(value))
    else:
        return {name: value}
    return {n: t for key, item in value for n, t in tensors_of(item, f"{name}/{key}").items()}


def assert_equal(state, expected):
    one, other = tensors_of(state), tensors_of(expected)
    assert set(one) == set(other)
    for name, value in one.items():
        assert type(value) is type(other[name]), name
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, (name, value, other[name])


def assert_only_these_are_skipped(results, skipped, steps):
    """Check that skipped steps change nothing, and that others change the same on all ranks."""
    for result in results:
        assert result["skipped"] == skipped and result["digests"] == results[0]["digests"]
        assert result["applied"] == steps - len(skipped)
        digests = result["digests"]
        pairs = {step: digests[step] == digests[step + 1] for step in digests if step + 1 in digests}
        assert len(pairs) >= 5 * len(skipped)
        assert pairs == {step: step in skipped for step in pairs}
        assert not [text for text in result["warnings"] if "failed with" in text], result["warnings"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_saves_the_state_before_the_step(two, tmp_path, layout, late):
    """With `late`, numbers arrive as from a GPU: during the next step, at other times on each rank."""
    results = run(two, "train", str(tmp_path), layout, {10: NAN}, late=late)
    assert_only_these_are_skipped(results, [10], 14)
    path = incident_of(tmp_path, 10, "nonfinite")
    incident = read_incident(path)
    assert not incident.incomplete and incident.world_size == 2
    for rank, manifest in incident.manifests.items():
        expected = before(tmp_path, rank)
        (entry,) = [e for e in incident.load(rank, "batches.pt")["batches"] if e["step"] == 10]
        x, y = decode(entry["batch"])
        clean = jobs.batch_of(10, rank)
        assert torch.equal(x, clean[0])
        assert y.isnan().flatten().tolist() == [rank == 1 and i == 2 for i in range(6)]
        assert entry["sample_ids"] == jobs.ids_of(10, rank)
        assert torch.equal(decode(entry["rng"])["torch"], expected["rng"])
        assert manifest["record"]["rank"] == rank and manifest["record"]["applied"] is False
    assert not torch.equal(before(tmp_path, 0)["rng"], before(tmp_path, 1)["rng"])
    if layout == "ddp":
        assert all(not manifest["shards"] for manifest in incident.manifests.values())
        states = [incident.load(rank, "state.pt") for rank in (0, 1)]
        states = [state | {"scheduler": decode(state["scheduler"])} for state in states]
    else:
        assert_described(incident)
        states = [load_incident(path, None).state]
    for state in states:
        assert_as_before(state, tmp_path, 10)


def assert_as_before(state, tmp_path, step):
    """Compare with rank 0, whose buffers DistributedDataParallel broadcasts before the forward."""
    expected = before(tmp_path, 0)
    for name in ("model", "optimizer", "scheduler"):
        assert_equal(state[name], expected[name])
    assert len(state["optimizer"]["state"]) == 4
    assert state["optimizer"]["state"][0]["step"] == state["scheduler"]["last_epoch"] == step


def assert_described(incident):
    """Check the shards and their descriptions; rank 1 has fewer rows, or none."""
    for name in ("model/1.weight", "optimizer/state/0/exp_avg"):
        for rank, rows in ((0, 7), (1, 6)):
            its = incident.manifests[rank]["shards"][name]
            assert its["global_shape"] == [13, 6] and its["offsets"] == [7 * rank, 0]
            assert its["placements"] == ["Shard(dim=0)"] and its["mesh"]["coordinate"] == [rank]
            local = tensors_of(incident.load(rank, "state.pt"))["/" + name]
            assert type(local) is torch.Tensor and local.shape == (rows, 6)
    assert incident.manifests[1]["shards"]["model/4.weight"]["offsets"] == [1, 0]
    assert incident.load(1, "state.pt")["model"]["4.weight"].shape == (0, 13)
    with pytest.raises(ValueError, match="elements"):
        full_state([(incident.load(0, "state.pt"), incident.manifests[0]["shards"])])


@pytest.mark.parametrize(("layout", "micros"), [("ddp", 2), ("fsdp2", 1), ("fsdp2", 2)])
def test_replay_of_both_ranks_in_one_process(two, tmp_path, layout, micros):
    """The gradients are the mean of both, and the steps from the snapshot lead to the same state."""
    results = run(two, "train", str(tmp_path), layout, {10: NAN}, micros=micros, snapshot_every=4)
    assert_only_these_are_skipped(results, [10], 14)
    result = fastclip.replay(incident_of(tmp_path, 10, "nonfinite"), jobs.build, steps="all")
    assert result.reproduced, result.differences
    assert result.ranks == [0, 1] and result.tolerance == 1e-5 and result.fails
    compared = {c.name: c for c in result.compared}
    assert compared["nan_count"].recorded == compared["nan_count"].replayed == 105
    assert math.isnan(compared["total_norm"].recorded) and compared["total_norm"].same
    assert [c.name for c in result.compared].count("loss") == 2
    guilty = jobs.ids_of(10 + 1000 * (micros - 1), 1)[2]
    assert [(g["rank"], g["id"]) for (g,) in result.samples.guilty] == [(1, guilty)]
    assert str(guilty) in result.verdict[0] and f"of {12 * micros} samples" in result.verdict[0]
    assert not result.notes, result.notes
    manifest = read_incident(result.path).manifest
    losses = {r["step"]: r["ranks"]["loss"] for r in manifest["records"] if r["step"] >= 4}
    assert result.history["from_step"] == 4 and result.history["fails"]
    expected = {step: pytest.approx(sum(both) / 2, rel=1e-5, nan_ok=True) for step, both in losses.items()}
    assert result.history["losses"] == expected and len(expected) == 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_saves_a_loss_spike_of_one_rank(two, tmp_path, layout):
    """Rank 0, whose own loss has no spike, saves the same step; the norm is compared."""
    results = run(two, "train", str(tmp_path), layout, {70: 300.0}, steps=74, kinds=["loss_spike"])
    assert_only_these_are_skipped(results, [70], 74)
    path = incident_of(tmp_path, 70, "loss_spike")
    incident = read_incident(path)
    losses = [manifest["record"]["loss"] for manifest in incident.manifests.values()]
    assert losses[1] > 100 * losses[0]
    for manifest in incident.manifests.values():
        assert manifest["record"]["ranks"]["loss"] == losses
        assert manifest["event"]["values"]["loss"] > 10 * manifest["event"]["values"]["median"]
    assert_as_before(load_incident(path, None).state, tmp_path, 70)
    result = fastclip.replay(path, jobs.build)
    assert result.reproduced and result.fails, (result.differences, result.failure)
    (norm,) = (c for c in result.compared if c.name == "total_norm")
    assert norm.replayed == pytest.approx(norm.recorded, rel=1e-5) and norm.recorded > 1
    assert [(g["rank"], g["id"]) for (g,) in result.samples.guilty] == [(1, jobs.ids_of(70, 1)[2])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_failed_save_of_one_rank(two, tmp_path, capsys, layout):
    """The other rank saves, the training continues, and the next incident has both ranks again."""
    bad = [10, 112] if layout == "ddp" else [10]
    results = run(two, "train", str(tmp_path), layout, dict.fromkeys(bad, NAN), bad[-1] + 4, full_disk=True)
    assert_only_these_are_skipped(results, bad, bad[-1] + 4)
    assert not [text for text in results[0]["warnings"] if "not saved" in text]
    (warning,) = [text for text in results[1]["warnings"] if "not saved" in text]
    assert "the incident of step 10 was not saved: No space left on device" in warning
    first, *further = list_incidents(tmp_path / "incidents")
    assert (first.step, first.state) == (10, "incomplete")
    assert [(each.step, each.state) for each in further] == [(step, "whole") for step in bad[1:]]
    assert [p.name for p in first.path.iterdir()] == ["rank00000"]
    incident = read_incident(first.path)  # compares all hashes
    assert incident.incomplete == ["rank 1 saved nothing"]
    assert main(["incidents", str(tmp_path / "incidents")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "1/2" in lines[1] and "incomplete" in lines[1] and len(lines) == 1 + len(bad)
    if layout == "ddp":
        result = fastclip.replay(first.path, jobs.build)
        assert result.reproduced and not result.fails
        assert any("rank 1 saved nothing" in note for note in result.notes)
    else:
        with pytest.raises(ReplayError, match=r"of which \[1\] are missing"):
            fastclip.replay(first.path, jobs.build)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_incidents_add_no_collectives(two, tmp_path, layout):
    """Not even with a snapshot in each step."""
    actions = dict.fromkeys(("nonfinite", "norm_spike", "loss_spike"), "skip")
    with_actions = run(two, "collectives", layout, 8, actions=actions)
    saving = fastclip.monitor.Incidents(str(tmp_path), snapshot_every=1)
    assert run(two, "collectives", layout, 8, incidents=saving) == with_actions
    assert min(with_actions[0]) >= 1
