# SPDX-License-Identifier: BSD-3-Clause
"""States of several ranks: shards of tensors, and random number generators.

A fake process group lets one process be each rank in turn, without communication.
"""

import copy
import io
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastclip.monitor.incidents.decode import decode
from fastclip.monitor.incidents.encode import encode
from fastclip.monitor.incidents.rng import rng_state, set_rng_state
from fastclip.monitor.incidents.shards import full_state, local_state


def round_trip(value):
    """Encode, save, load and decode a value; return it and the problems."""
    file = io.BytesIO()
    tree, problems = encode(value)
    torch.save(tree, file)
    file.seek(0)
    return decode(torch.load(file, weights_only=True)), problems


FULL = torch.arange(11 * 5, dtype=torch.float32).reshape(11, 5)


def as_each_rank(world, mesh_shape, function):
    """Return what the function gives for the mesh of each rank."""
    found = []
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            names = ("replicas", "shards")[-len(mesh_shape) :]
            found.append(function(init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)))
        finally:
            dist.destroy_process_group()
    return found


def sharded(tensor, mesh, placements):
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((8,), [Shard(1)]),  # more ranks than columns: some have nothing
    ((3,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 3), [Shard(1), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),  # tensor parallelism below FSDP2
    ((2, 2), [Shard(0), _StridedShard(0, split_factor=2)]),  # two pieces
]


@pytest.mark.parametrize(("shape", "placements"), PLACEMENTS, ids=lambda p: str(p).replace(" ", ""))
def test_full_state_assembles_the_shards_of_all_ranks(shape, placements):
    def state(mesh):
        weight = sharded(FULL, mesh, placements)
        moments = {0: {"exp_avg": sharded(FULL * 2, mesh, placements), "step": torch.tensor(3.0)}}
        optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, weight)}]}
        local, shards = local_state({"model": {"layer.weight": weight}, "optimizer": optimizer})
        assert set(shards) == {
            "model/layer.weight",
            "optimizer/state/0/exp_avg",
            "optimizer/param_groups/0/betas/1",
        }
        assert shards["model/layer.weight"]["global_shape"] == [11, 5]
        assert shards["model/layer.weight"]["placements"] == [repr(p) for p in placements]
        local, problems = round_trip(local)
        assert not problems and type(local["model"]["layer.weight"]) is torch.Tensor
        return local, copy.deepcopy(shards)

    parts = as_each_rank(torch.Size(shape).numel(), shape, state)
    whole = full_state(parts)
    assert torch.equal(whole["model"]["layer.weight"], FULL)
    assert torch.equal(whole["optimizer"]["state"][0]["exp_avg"], FULL * 2)
    assert torch.equal(whole["optimizer"]["param_groups"][0]["betas"][1], FULL)
    assert whole["optimizer"]["state"][0]["step"] == 3 and whole["optimizer"]["param_groups"][0]["lr"] == 0.1
    if Replicate() not in placements:
        missing = [i for i, (local, _) in enumerate(parts) if local["model"]["layer.weight"].numel()][-1]
        with pytest.raises(ValueError, match="model/layer.weight: expected all 55 elements"):
            full_state(parts[:missing])


def test_full_state_keeps_scalars_and_dtypes():
    def state(mesh):
        values = {"b": sharded(torch.ones(5, dtype=torch.bfloat16), mesh, [Shard(0)])}
        return local_state({**values, "n": sharded(torch.tensor(2), mesh, [Replicate()])})

    whole = full_state(as_each_rank(2, (2,), state))
    assert whole["b"].dtype == torch.bfloat16 and whole["b"].tolist() == [1.0] * 5
    assert whole["n"].shape == () and whole["n"] == 2


def test_full_state_raises_on_shards_that_do_not_match():
    def state(mesh):
        return local_state({"w": sharded(FULL, mesh, [Shard(0)])})

    parts = as_each_rank(2, (2,), state)
    for change, message in [
        (lambda local, shards: local.update(w=local["w"][:1]), "expected all 55 elements"),
        (lambda local, shards: local.pop("w"), "w: expected state 1 to have a shard of shape"),
        (lambda local, shards: shards.clear(), "w: expected state 1 to have a shard of shape"),
        (lambda local, shards: shards["w"].update(offsets=[9, 0]), "expected a shard within 11 elements"),
        (lambda local, shards: shards["w"].update(runs={"0": [[0, 2]]}), "does not match"),
    ]:
        wrong = copy.deepcopy(parts)
        change(*wrong[1])
        with pytest.raises(ValueError, match=message):
            full_state(wrong)
    with pytest.raises(ValueError, match="at least one rank"):
        full_state([])


def test_full_state_raises_on_partial_sums():
    def state(mesh):
        return local_state({"g": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)})

    with pytest.raises(ValueError, match=r"g: cannot assemble unreduced partial sums: .*Partial\(sum\)"):
        full_state(as_each_rank(2, (2,), state))


def test_encode_stores_a_dtensor_as_its_shard():
    def tree(mesh):
        return encode([sharded(FULL, mesh, [Shard(0)])])

    (tree, problems), _ = as_each_rank(2, (2,), tree)
    (again,) = decode(tree)
    assert not problems and torch.equal(again.local, FULL[:6])
    assert again.description["global_shape"] == [11, 5] and again.description["offsets"] == [0, 0]


def test_local_state_without_dtensors_copies_nothing():
    model = torch.nn.Linear(2, 2)
    local, shards = local_state(model.state_dict())
    assert shards == {} and local["weight"].data_ptr() == model.weight.data_ptr()
    assert full_state([(local, shards)])["weight"] is local["weight"]


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.randn(),
        torch.rand(5).tolist(),
    )


def test_set_rng_state_restores_all_generators():
    random.gauss(0, 1), numpy.random.randn(), torch.rand(3)  # both keep a second normal number
    before = round_trip(rng_state())[0]
    first = draw()
    assert draw() != first
    assert set_rng_state(before) == []
    assert draw() == first
    assert set_rng_state({**before, "cuda": {99: before["torch"]}}) == [
        "the generator state of cuda:99 was not restored: there is no such device"
    ]
