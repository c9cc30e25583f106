# SPDX-License-Identifier: BSD-3-Clause
"""Replay in one process of incidents of several ranks, also sharded; steps that ended in an exception."""

import copy
import json
import math
import shutil

import pytest
import torch
from torch import Tensor, nn

import fastclip
from fastclip.monitor import Record
from fastclip.monitor.incidents.determinism import deterministic_settings
from fastclip.monitor.incidents.store import IncidentStore
from fastclip.replay.replay import ReplayError
from helpers.replay_models import (
    Training,
    before_forward,
    convolutional,
    perceptron,
    record_incident,
    state_of,
    training_of,
    vectors,
)

STEP, WORLD = 3, 3


def gradients_of(training: Training, batch) -> tuple[float, list[Tensor]]:
    loss = training.loss_function(training.model, batch)
    return float(loss.detach()), list(torch.autograd.grad(loss, list(training.model.parameters())))


def record_ranks(directory, training, bad_rank=None, shards=False, wrapped=False):
    """Record an incident of several ranks, which train as under DistributedDataParallel."""
    stores = [IncidentStore(directory) for _ in range(WORLD)]
    entries = {rank: [] for rank in range(WORLD)}
    for step in range(STEP + 1):
        state, losses, sums = state_of(training), [], []
        for rank in range(WORLD):
            batch = training.data(10 * step + rank, 0)
            if step == STEP and rank == bad_rank:
                batch[0][5].view(-1)[0] = math.inf
            torch.manual_seed(1000 * step + rank)
            entries[rank].append(before_forward(training, step, 0, batch) | {"loss": None})
            loss, grads = gradients_of(training, batch)
            entries[rank][-1]["loss"] = loss
            losses.append(loss)
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
        for parameter, grad in zip(training.model.parameters(), sums, strict=True):
            parameter.grad = grad / WORLD
        stats = fastclip.grad_stats(training.model.named_parameters())
        training.optimizer.step()
    worst = [t._asdict() for t in stats.worst(3)]
    fields = {"nan_count": int(stats.nan_count), "inf_count": int(stats.inf_count), "worst": worst}
    if wrapped:
        state["model"] = {f"module.{name}": value for name, value in state["model"].items()}
    for rank in range(WORLD):
        record = Record(STEP, rank=rank, loss=losses[rank], total_norm=float(stats.total_norm), **fields)
        described = {}
        own = _sharded(state, "", rank, described) if shards else state
        manifest = {"event": {"values": {}}, "record": record.to_dict(), "records": [], "shards": described}
        manifest["setup"] = {"max_norm": None, "norm_type": 2.0, "nonfinite": "skip", "micro_batches": 1}
        manifest["setup"] |= {"scaled": False, "deterministic": deterministic_settings()}
        files = {"state.pt": own, "batches.pt": {"batches": entries[rank]}}
        path = stores[rank].save(STEP, "nonfinite", rank, WORLD, manifest, files)
    return path.parent


def _sharded(value, name, rank, described):
    """Return the rows of a rank, as a state with DTensors is stored, and describe them."""
    if isinstance(value, dict):
        return {k: _sharded(v, f"{name}/{k}" if name else str(k), rank, described) for k, v in value.items()}
    if not isinstance(value, Tensor) or not value.dim():
        return value
    chunks = value.chunk(WORLD)
    offset = sum(len(chunk) for chunk in chunks[:rank])
    own = chunks[rank] if rank < len(chunks) else value[:0]
    mesh = {"shape": [WORLD], "names": [], "device_type": "cpu", "coordinate": [rank]}
    described[name] = {
        "global_shape": list(value.shape),
        "offsets": [min(offset, len(value))] + [0] * (value.dim() - 1),
        "placements": ["Shard(dim=0)"],
        "mesh": mesh,
    }
    return own.clone()


@pytest.fixture(params=["replicated", "sharded"])
def shards(request):
    return request.param == "sharded"


@pytest.mark.parametrize("model", [perceptron, convolutional])
def test_replay_of_all_ranks_averages_gradients(tmp_path, model, shards):
    path = record_ranks(tmp_path, training_of(model()), shards=shards)
    result = fastclip.replay(path, lambda: training_of(model()), variants=False)
    assert result.reproduced and result.tolerance == 1e-5, result.differences
    assert [c.name for c in result.compared].count("loss") == WORLD and result.ranks == [0, 1, 2]
    (norm,) = (c for c in result.compared if c.name == "total_norm")
    assert norm.recorded == pytest.approx(norm.replayed, rel=1e-6)


def test_replay_finds_the_sample_of_one_rank(tmp_path, shards):
    path = record_ranks(tmp_path, training_of(perceptron()), bad_rank=1, shards=shards)
    result = fastclip.replay(path, lambda: training_of(perceptron()))
    assert result.reproduced, result.differences
    ((guilty,),) = result.samples.guilty
    assert (guilty["rank"], guilty["index"]) == (1, 5) and result.samples.count == WORLD * 16
    assert result.verdict[0].startswith("1 of 48 samples causes it")


def test_replay_of_one_rank_compares_losses_only(tmp_path):
    path = record_ranks(tmp_path, training_of(perceptron()), bad_rank=1)
    build = lambda: training_of(perceptron())  # noqa: E731
    for result in (fastclip.replay(path, build, rank=2), fastclip.replay(path / "rank00002", build)):
        assert result.reproduced and {c.name for c in result.compared} == {"loss"}
        assert any(note.startswith("the gradients of rank 0, 1 are missing") for note in result.notes)
        assert result.tolerance == 0 and not result.fails
    result = fastclip.replay(path, build, rank=1)
    assert result.fails and "1 of 16 samples causes it" in result.verdict[0]


def test_replay_with_a_missing_rank(tmp_path, shards):
    path = record_ranks(tmp_path, training_of(perceptron()), shards=shards)
    shutil.rmtree(path / "rank00001")
    build = lambda: training_of(perceptron())  # noqa: E731
    if shards:
        with pytest.raises(ReplayError, match=r"sharded over 3 ranks, of which \[1\] are missing in"):
            fastclip.replay(path, build)
        return
    result = fastclip.replay(path, build)
    assert result.reproduced and "not saved: rank 1 saved nothing" in result.notes
    assert {c.name for c in result.compared} == {"loss"} and len(result.compared) == 2


def test_replay_strips_the_prefixes_of_a_wrapped_model(tmp_path):
    path = record_ranks(tmp_path, training_of(perceptron()), wrapped=True)
    assert fastclip.replay(path, lambda: training_of(perceptron()), variants=False).reproduced


class Raising(nn.Module):
    def forward(self, inputs):
        if inputs.max() > 1e5:
            raise ArithmeticError("too large\nin two lines")
        return inputs


def test_replay_of_a_step_that_raised(tmp_path):
    make = lambda: training_of(nn.Sequential(Raising(), nn.Linear(64, 10)), data=data)  # noqa: E731

    def data(step, micro):
        return vectors(step, micro)

    path = record_incident(tmp_path / "good", make(), STEP)
    files = {f.name: torch.load(f, weights_only=True) for f in path.glob("rank00000/*.pt")}
    manifest = json.loads((path / "rank00000" / "manifest.json").read_text())
    manifest["record"] = {"step": STEP, "error": "ArithmeticError: too large\nin two lines"}
    store = IncidentStore(tmp_path / "bad")
    good = store.save(STEP, "exception", 0, 1, manifest, copy.deepcopy(files)).parent
    result = fastclip.replay(good, make)
    assert (
        not result.reproduced and "recorded" in result.differences[0] and "none replayed" in result.verdict[0]
    )
    files["batches.pt"]["batches"][-1]["batch"][1][0][4, 0] = 1e6
    bad = store.save(STEP, "exception", 0, 1, manifest, files).parent
    result = fastclip.replay(bad, make)
    assert result.reproduced and result.verdict[0].startswith("the same exception: ArithmeticError")
