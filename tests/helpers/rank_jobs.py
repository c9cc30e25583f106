# SPDX-License-Identifier: BSD-3-Clause
"""What the ranks of tests/helpers/ranks.py execute. Every job returns plain numbers that a test compares."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import fastclip

INF, NAN = math.inf, math.nan


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def whole_gradients(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same on every rank: uneven for two and four ranks, with fewer rows than ranks, and empty."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(7, 6), (1, 5), (8, 3), (4, 4), (33,), (9, 2)]
    return [torch.randn(s, generator=generator).to(device(), dtype) for s in shapes]


def parameter_of(value: Tensor, mesh, placements) -> nn.Parameter:
    """A DTensor parameter whose gradient is `value`; Partial: the ranks of a mesh dimension share it out."""
    plain = [Replicate() if isinstance(p, Partial) else p for p in placements]
    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, plain))
    grad = distribute_tensor(value.clone(), mesh, plain)
    if any(isinstance(p, Partial) for p in placements):
        local = grad.to_local()
        for dim, placement in enumerate(placements):
            if isinstance(placement, Partial):
                local = local * (0.75 if mesh.get_local_rank(dim) == 0 else 0.25 / (mesh.size(dim) - 1))
        grad = DTensor.from_local(local, mesh, placements, shape=value.shape, stride=value.stride())
    parameter.grad = grad
    return parameter


def whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


LAYOUTS_1D = {
    "shard": [[Shard(0)]] * 6,
    "shard_1": [[Shard(1)], [Shard(1)], [Shard(0)], [Shard(1)], [Shard(0)], [Shard(1)]],
    "replicate": [[Replicate()]] * 6,
    "partial": [[Partial()], [Shard(0)], [Partial()], [Replicate()], [Partial()], [Shard(1)]],
    "mixed": [[Shard(0)], None, [Replicate()], [Shard(1)], None, [Shard(0)]],
}
LAYOUTS_2D = {
    "fsdp_tp": [
        [Shard(0), Shard(1)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(1)],
        [Shard(0), Replicate()],
        None,
    ],
    "hsdp": [[Replicate(), Shard(0)]] * 6,
    "partial": [
        [Partial(), Shard(0)],
        [Shard(0), Partial()],
        [Partial(), Partial()],
        [Replicate(), Partial()],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ],
}


def make(layouts, mesh, values) -> list[nn.Parameter]:
    made = []
    for value, placements in zip(values, layouts, strict=True):
        if placements is None:
            parameter = nn.Parameter(torch.zeros_like(value))
            parameter.grad = value.clone()
        else:
            parameter = parameter_of(value, mesh, placements)
        made.append(parameter)
    return made


def mesh_of(shape: tuple[int, ...]):
    return init_device_mesh(device(), shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def clip_layouts(shape: tuple[int, ...], norm_types: list[float]) -> list[tuple]:
    """Norm before, gradients after, of every layout and order, against those of the whole gradients."""
    mesh = mesh_of(shape)
    results = []
    for name, layouts in (LAYOUTS_1D if len(shape) == 1 else LAYOUTS_2D).items():
        for norm_type in norm_types:
            values = whole_gradients()
            gold = [nn.Parameter(torch.zeros_like(v)) for v in values]
            for p, v in zip(gold, values, strict=True):
                p.grad = v.clone()
            parameters = make(layouts, mesh, values)
            versions = [p.grad._version for p in parameters]
            expected = torch.nn.utils.clip_grad_norm_(gold, 0.1, norm_type)
            total_norm = fastclip.clip_grad_norm_(parameters, 0.1, norm_type)
            assert type(total_norm) is Tensor, type(total_norm)
            torch.testing.assert_close(total_norm, expected, rtol=1e-6, atol=0)
            for p, q in zip(parameters, gold, strict=True):
                torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-5, atol=1e-9)
            if expected > 0.1:
                assert all(p.grad._version > v for p, v in zip(parameters, versions, strict=True)), name
            results.append((name, norm_type, total_norm.item()))
    return results


# Training. The gold is one process with the whole model and the whole batch, which every rank computes too.

STEPS = 20
MAX_NORM = 0.3
WIDTH = 13  # shards are uneven


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3)
    )
    return model.to(device())


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 6, generator=generator)
    x = x.to(device())
    return x, torch.stack([x.sum(1), x[:, 0], x[:, 1] * 3], 1)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def make_optimizer(kind: str, parameters) -> torch.optim.Optimizer:
    if kind == "adamw_fused":
        return torch.optim.AdamW(parameters, lr=0.02, fused=True)
    if kind == "adamw_foreach":
        return torch.optim.AdamW(parameters, lr=0.02, foreach=True)
    return torch.optim.SGD(parameters, lr=0.5)


def train_alone(kind: str = "sgd", poisoned: int | None = None) -> tuple[dict[str, Tensor], list[float]]:
    """torch's clip and step; a poisoned step is skipped."""
    model = make_model()
    optimizer = make_optimizer(kind, model.parameters())
    norms = []
    for step in range(STEPS):
        x, y = batch_of(step)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        if step != poisoned:
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


def assert_like_alone(
    weights: dict[str, Tensor], norms: list[float], kind: str, poisoned=None
) -> list[float]:
    gold, gold_norms = train_alone(kind, poisoned)
    for step, (norm, expected) in enumerate(zip(norms, gold_norms, strict=True)):
        if step != poisoned:
            assert abs(norm / expected - 1) < 2e-4, (step, norm, expected)
    for name, value in gold.items():
        torch.testing.assert_close(
            weights[name], value, rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    return norms


def part_of_batch(step: int, parts: int, number: int) -> tuple[Tensor, Tensor]:
    x, y = batch_of(step)
    return x.chunk(parts)[number], y.chunk(parts)[number]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): whole(p.detach()) for n, p in model.named_parameters()}


def train(model: nn.Module, kind: str, way: str, parts: int, number: int, poison_rank: int | None = None):
    """Steps on this rank's part of each batch. A poisoned step gets NaN on one rank only."""
    optimizer = make_optimizer(kind, model.parameters())
    handle = None
    if way == "attach":
        handle = fastclip.attach(optimizer, MAX_NORM, names=model.named_parameters())
    norms = []
    for step in range(STEPS):
        x, y = part_of_batch(step, parts, number)
        if step == 7 and poison_rank == dist.get_rank():
            x = torch.full_like(x, NAN)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if handle is None:
            stats = fastclip.clip_(model.named_parameters(), MAX_NORM)
            norms.append(float(stats.total_norm))
            optimizer.step()
            continue
        optimizer.step()
        norms.append(float(handle.stats.total_norm))
        assert handle.last_step_applied is (poison_rank is None or step != 7)
        if step == 7 and poison_rank is not None:
            assert handle.stats.nonfinite_ranks and handle.stats.nan_count > 0
            assert handle.stats.worst(1)[0].name in dict(model.named_parameters())
    return norms


def fsdp2(shape: tuple[int, ...], kind: str, way: str, poison_rank: int | None = None) -> list[float]:
    """fully_shard, alone or over tensor parallelism: the second mesh dimension."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(shape)
    model = make_model()
    if len(shape) == 2:
        parallelize_module(model, mesh["tp"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["dp"] if len(shape) == 2 else mesh)
    fully_shard(model, mesh=mesh["dp"] if len(shape) == 2 else mesh)
    norms = train(model, kind, way, shape[0], mesh.get_local_rank(0), poison_rank)
    poisoned = 7 if poison_rank is not None else None
    return assert_like_alone(weights_of(model), norms, kind, poisoned)


def hsdp(kind: str) -> list[float]:
    """Shards over one dimension, replicas over the other."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, 2))
    model = make_model()
    fully_shard(model, mesh=mesh)
    norms = train(model, kind, "clip", 4, dist.get_rank())
    return assert_like_alone(weights_of(model), norms, kind)


def overflow_on_one_rank(attached: bool) -> list:
    """A loss scaler over shards, one of which overflows: all ranks leave the step out and lower the scale."""
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model, mesh=mesh_of((dist.get_world_size(),)))
    optimizer = make_optimizer("adamw_fused", model.parameters())
    scaler = fastclip.GradScaler(device(), init_scale=64.0)
    handle = fastclip.attach(optimizer, MAX_NORM, scaler=scaler) if attached else None
    before = {name: value.clone() for name, value in weights_of(model).items()}
    scales = []
    for step in range(3):
        x, y = batch_of(step)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if step == 0 and dist.get_rank() == 0:
            next(iter(model.parameters())).grad.to_local()[0, 0] = INF
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step == 0:
            after = weights_of(model)
            assert all(torch.equal(after[name], value) for name, value in before.items())
            assert scaler.stats.nonfinite_ranks == [0] and scaler.overflows == 1
            assert handle is None or handle.last_step_applied is False
    assert not torch.equal(weights_of(model)["0.weight"], before["0.weight"])
    return scales


def ddp(kind: str, way: str) -> list[float]:
    model = nn.parallel.DistributedDataParallel(make_model())
    norms = train(model, kind, way, dist.get_world_size(), dist.get_rank())
    return assert_like_alone(weights_of(model), norms, kind)


def tensor_parallel(kind: str, way: str) -> list[float]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of((dist.get_world_size(),))
    model = make_model()
    parallelize_module(model, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
    # A DTensor and a plain tensor cannot be stepped in one foreach call by torch: sgd goes one by one.
    norms = train(model, kind, way, 1, 0)
    return assert_like_alone(weights_of(model), norms, kind)


def pipeline(kind: str, way: str) -> list[float]:
    """Two stages with different parameters; one norm over both."""
    rank = dist.get_rank()
    whole_model = make_model()
    stage = whole_model[:2] if rank == 0 else whole_model[2:]
    optimizer = make_optimizer(kind, stage.parameters())
    handle = None
    if way == "attach":
        handle = fastclip.attach(optimizer, MAX_NORM, process_group=dist.group.WORLD)
    norms = []
    for step in range(STEPS):
        x, y = batch_of(step)
        optimizer.zero_grad()
        if rank == 0:
            hidden = stage(x)
            dist.send(hidden.detach(), 1)
            grad = torch.empty_like(hidden)
            dist.recv(grad, 1)
            hidden.backward(grad)
        else:
            hidden = torch.empty(8, WIDTH).requires_grad_()
            dist.recv(hidden.detach(), 0)
            loss_of(stage, hidden, y).backward()
            dist.send(hidden.grad, 0)
        if handle is None:
            norms.append(
                float(fastclip.clip_grad_norm_(stage.parameters(), MAX_NORM, process_group=dist.group.WORLD))
            )
        optimizer.step()
        if handle is not None:
            norms.append(float(handle.stats.total_norm))
    names = [n for n, _ in whole_model.named_parameters()]
    mine = {n: p.detach() for n, p in whole_model.named_parameters()}
    own = [n for n in names if (int(n.split(".")[0]) < 2) == (rank == 0)]
    gold, gold_norms = train_alone(kind)
    for step, (norm, expected) in enumerate(zip(norms, gold_norms, strict=True)):
        assert abs(norm / expected - 1) < 2e-4, (step, norms, gold_norms)
    for n in own:
        torch.testing.assert_close(mine[n], gold[n], rtol=2e-3, atol=2e-4)
    return norms


def experts(norm_type: float) -> list[float]:
    """A router that every rank has, and two experts of each rank's own; the norm counts the router once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(8)
    router = torch.randn(5, generator=generator)
    every = [torch.randn(3, 4, generator=generator) for _ in range(2 * world)]
    gold = [nn.Parameter(torch.zeros_like(v)) for v in (router, *every)]
    for p, v in zip(gold, (router, *every), strict=True):
        p.grad = v.clone()
    expected = torch.nn.utils.clip_grad_norm_(gold, 0.5, norm_type)
    own = [router, *every[2 * rank : 2 * rank + 2]]
    parameters = [nn.Parameter(torch.zeros_like(v)) for v in own]
    for p, v in zip(parameters, own, strict=True):
        p.grad = v.clone()
    total_norm = fastclip.clip_grad_norm_(
        parameters, 0.5, norm_type, process_group={dist.group.WORLD: parameters[1:]}
    )
    torch.testing.assert_close(total_norm, expected, rtol=1e-6, atol=0)
    for p, v in zip(parameters, (gold[0], *gold[1 + 2 * rank : 3 + 2 * rank]), strict=True):
        torch.testing.assert_close(p.grad, v.grad, rtol=1e-5, atol=1e-7)
    return [total_norm.item()]


def two_process_groups() -> list[float]:
    """A grid of 2 x 2: tensors that differ along one way, the other, both and neither."""
    mesh = mesh_of((2, 2))
    rows, columns = (
        mesh.get_group(0),
        mesh.get_group(1),
    )  # ranks that differ in the first, in the second place
    place = mesh.get_coordinate()
    generator = torch.Generator().manual_seed(9)
    every = torch.randn(4, 2, 2, 5, generator=generator)
    own = [every[0, place[0], 0], every[1, 0, place[1]], every[2, place[0], place[1]], every[3, 0, 0]]
    parts = [every[0, :, 0], every[1, 0], every[2], every[3, 0, 0]]
    expected = torch.cat([p.flatten() for p in parts]).norm()
    parameters = [nn.Parameter(torch.zeros(5)) for _ in own]
    for p, g in zip(parameters, own, strict=True):
        p.grad = g.clone()
    differ = {rows: [parameters[0], parameters[2]], columns: [parameters[1], parameters[2]]}
    total_norm = fastclip.get_total_norm(
        [p.grad for p in parameters],
        process_group={group: [p.grad for p in own_parameters] for group, own_parameters in differ.items()},
    )
    torch.testing.assert_close(total_norm, expected, rtol=1e-6, atol=0)
    again = fastclip.clip_grad_norm_(parameters, 0.5, process_group=differ)
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=0)
    return [total_norm.item()]


# The other functions, and what goes wrong.


def two_meshes() -> list[float]:
    """Of other names over the same ranks, and over each rank alone: torch stacks norms of one mesh only."""
    world = dist.get_world_size()
    meshes = [
        init_device_mesh(device(), (world,), mesh_dim_names=("x",)),
        init_device_mesh(device(), (1, world), mesh_dim_names=("one", "y")),
        mesh_of((world,)),
    ]
    values = whole_gradients()
    gold = torch.nn.utils.get_total_norm(values)
    placements = [[Shard(0)], [Shard(0), Shard(1)], [Replicate()]]
    parameters = [
        parameter_of(v, meshes[i % 3], placements[i % 3] if v.dim() > 1 else [Shard(0)] * meshes[i % 3].ndim)
        for i, v in enumerate(values)
    ]
    total_norm = fastclip.clip_grad_norm_(parameters, 0.1)
    torch.testing.assert_close(total_norm, gold, rtol=1e-6, atol=0)
    for p, v in zip(parameters, values, strict=True):
        torch.testing.assert_close(whole(p.grad), v * (0.1 / (gold + 1e-6)), rtol=1e-5, atol=1e-9)
    return [total_norm.item()]


def other_functions() -> list[float]:
    mesh = mesh_of((dist.get_world_size(),))
    values = whole_gradients()
    layouts = LAYOUTS_1D["mixed"]
    gold_norm = torch.nn.utils.get_total_norm(values)
    parameters = make(layouts, mesh, values)
    total_norm = fastclip.get_total_norm([p.grad for p in parameters])
    torch.testing.assert_close(total_norm, gold_norm, rtol=1e-6, atol=0)
    stats = fastclip.grad_stats([(f"p{i}", p) for i, p in enumerate(parameters)])
    by_name = dict(zip(stats.names, stats.per_tensor.norm.tolist(), strict=True))
    for i, value in enumerate(values):
        assert abs(by_name[f"p{i}"] / value.norm().item() - 1) < 1e-6
    sharded = [p for p in parameters if isinstance(p.grad, DTensor)]
    whole_norm = torch.nn.utils.get_total_norm([p.grad for p in sharded])  # a DTensor, as Accelerate has it
    fastclip.clip_grads_with_norm_(sharded, 0.1, whole_norm)
    coef = 0.1 / (float(whole_norm.full_tensor()) + 1e-6)
    for p, value in zip(parameters, values, strict=True):
        if p in set(sharded):
            torch.testing.assert_close(whole(p.grad), value * coef, rtol=1e-5, atol=1e-9)
    parameters = make(layouts, mesh, values)
    partial_norm = DTensor.from_local(torch.tensor(3.0), mesh, [Partial()])  # 3 on each rank, summed
    fastclip.clip_grads_with_norm_(parameters, 0.1, partial_norm)
    coef = 0.1 / (3.0 * dist.get_world_size() + 1e-6)
    for p, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(whole(p.grad), value * coef, rtol=1e-5, atol=1e-9)
    parameters = make(layouts, mesh, values)
    fastclip.clip_grad_value_(parameters, 0.4)
    for p, value in zip(parameters, values, strict=True):
        torch.testing.assert_close(whole(p.grad), value.clamp(-0.4, 0.4))
    parameters = make(layouts, mesh, values)
    groups = [0, 0, 1, 1, 2, 2]
    stats = fastclip.clip_(parameters, 0.1, groups=groups)
    for label, norm in zip(stats.labels, stats.total_norm.tolist(), strict=True):
        own = torch.nn.utils.get_total_norm([v for v, g in zip(values, groups, strict=True) if g == label])
        assert abs(norm / own.item() - 1) < 1e-6
    return [total_norm.item(), *stats.total_norm.tolist()]


def nan_on_one_rank(nonfinite: str, norm_type: float = 2.0) -> tuple:
    """In the last shard only. What every rank knows afterwards, and whether its gradients changed."""
    mesh = mesh_of((dist.get_world_size(),))
    values = whole_gradients()
    parameters = make(LAYOUTS_1D["shard"], mesh, values)
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        parameters[2].grad.to_local()[0, 1] = NAN
        parameters[2].grad.to_local()[1, 1] = INF
    before = [p.grad.to_local().clone() for p in parameters]
    named = [(f"layer{i}", p) for i, p in enumerate(parameters)]
    try:
        stats = fastclip.clip_(named, 0.1, norm_type, nonfinite=nonfinite)
    except RuntimeError as error:
        same = all(
            torch.equal(p.grad.to_local(), b) or b.isnan().any()
            for p, b in zip(parameters, before, strict=True)
        )
        return str(error), same
    worst = stats.worst(1)[0]
    changed = [not torch.equal(p.grad.to_local(), b) for p, b in zip(parameters, before, strict=True)]
    return (
        (worst.name, worst.nan_count, worst.inf_count, stats.nonfinite_ranks, stats.found_inf.item()),
        [c for c, b in zip(changed, before, strict=True) if b.numel() and not b.isnan().any()],
        [whole(p.grad).isfinite().all().item() for p in parameters],
        stats.total_norm.item(),
    )


def rank_without_gradients(norm_type: float) -> list[float]:
    """Rank 1 has none; some others have some. The result counts what there is."""
    mesh = mesh_of((dist.get_world_size(),))
    values = whole_gradients()
    parameters = make(LAYOUTS_1D["shard"], mesh, values)
    if dist.get_rank() == 1:
        for p in parameters:
            p.grad = None
    parameters[3].grad = None
    locals_ = torch.cat(
        [p.grad.to_local().flatten() for p in parameters if p.grad is not None] or [torch.zeros(0)]
    )
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, locals_)
    expected = torch.linalg.vector_norm(torch.cat(gathered).double(), norm_type)
    total_norm = fastclip.clip_grad_norm_(parameters, 0.1, norm_type)
    assert abs(total_norm.item() / expected.item() - 1) < 1e-6
    return [total_norm.item()]


def unequal_lists(after_an_equal_one: bool) -> str:
    """Rank 0 passes one parameter more than the others."""
    mesh = mesh_of((dist.get_world_size(),))
    parameters = make(LAYOUTS_1D["shard"], mesh, whole_gradients())
    if after_an_equal_one:
        fastclip.clip_grad_norm_(parameters, 0.1)
    try:
        fastclip.clip_grad_norm_(parameters if dist.get_rank() == 0 else parameters[:-1], 0.1)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def flat_shards() -> list:
    """FSDP1: refused, right with its process group."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    x, y = part_of_batch(0, dist.get_world_size(), dist.get_rank())
    loss_of(model, x, y).backward()
    refused = []
    for call in (
        lambda: fastclip.clip_grad_norm_(model.parameters(), 0.1),
        lambda: fastclip.attach(torch.optim.SGD(model.parameters(), lr=0.1), 0.1),
    ):
        try:
            call()
            refused.append("nothing was raised")
        except RuntimeError as error:
            refused.append(str(error))
    total_norm = fastclip.clip_grad_norm_(model.parameters(), 0.1, process_group=model.process_group)
    return [*refused, total_norm.item(), train_alone()[1][0]]


def count_collectives(shape: tuple[int, ...], norm_type: float, with_group: bool) -> list[tuple[int, int]]:
    """(size of the group, elements) of each all_reduce of a second call."""
    from fastclip.distributed import all_reduce as collectives

    mesh = mesh_of(shape)
    layouts = LAYOUTS_1D["shard"] if len(shape) == 1 else LAYOUTS_2D["fsdp_tp"]
    parameters = make(layouts, mesh, whole_gradients())
    group = dist.group.WORLD if with_group else None
    fastclip.clip_grad_norm_(parameters, 0.1, norm_type, process_group=group)
    seen = []
    real = dist.all_reduce

    def counting(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        seen.append((dist.get_world_size(group), tensor.numel()))
        return real(tensor, op, group, async_op)

    collectives.dist.all_reduce = counting
    try:
        fastclip.clip_grad_norm_(parameters, 0.1, norm_type, process_group=group)
    finally:
        collectives.dist.all_reduce = real
    return seen


def mistaken_groups() -> list[str]:
    """Errors, the same on every rank, before any collective."""
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    outside = dist.new_group([dist.get_world_size() - 1])
    optimizer = torch.optim.SGD([p], lr=0.1)
    calls = [
        lambda: fastclip.clip_grad_norm_([p], 1.0, process_group="pipeline"),
        lambda: fastclip.attach(optimizer, 1.0, process_group={3: [p]}),
        lambda: fastclip.clip_([p], 1.0, groups="tensor", process_group=dist.group.WORLD),
    ]
    if dist.get_rank() == 0:
        calls.append(lambda: fastclip.get_total_norm([p], process_group=outside))
    messages = []
    for call in calls:
        try:
            call()
            messages.append("nothing was raised")
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    handle = fastclip.attach(optimizer, 1.0, process_group={dist.group.WORLD: iter([p])})
    for _ in range(2):  # the iterable is there for the second step too
        p.grad = torch.ones(2)
        optimizer.step()
        assert abs(handle.stats.total_norm.item() - (2 * dist.get_world_size()) ** 0.5) < 1e-6
    return messages


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def fail() -> None:
    raise ZeroDivisionError
