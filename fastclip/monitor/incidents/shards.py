# SPDX-License-Identifier: BSD-3-Clause
"""State dicts with DTensors, reduced to the shards of this process and assembled from those of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...distributed.placement import local_parts

State = dict[str, Any]
Shards = dict[str, dict[str, Any]]


def dtensor_type() -> Any:
    """Return torch.distributed.tensor.DTensor, or None if it is not imported."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def describe_shard(dtensor: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the local part of a DTensor, without a copy, and its place in the whole tensor.

    The description is JSON: global_shape; offsets, the index of its first element, empty on a process outside
    the mesh; placements, as torch prints them; mesh, with shape, names, device type and the coordinate of
    this process. If a part is not one block, `runs` has the [start, length] of its pieces by dimension.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = local_parts([dtensor])[0].detach()
    mesh, placements = dtensor.device_mesh, dtensor.placements
    _, offsets = compute_local_shape_and_global_offset(dtensor.shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    description: dict[str, Any] = {
        "global_shape": list(dtensor.shape),
        "offsets": list(offsets) if coordinate is not None else [],
        "placements": [repr(placement) for placement in placements],
        "mesh": {
            "shape": list(mesh.shape),
            "names": list(mesh.mesh_dim_names or ()),
            "device_type": mesh.device_type,
            "coordinate": None if coordinate is None else list(coordinate),
        },
    }
    if coordinate is not None and (runs := _runs(dtensor, coordinate)):
        description["runs"] = runs
    return local, description


def _runs(dtensor: Any, coordinate: Sequence[int]) -> dict[str, list[list[int]]]:
    """Return the pieces along each dimension that has several, as a strided shard may have."""
    if not any("Strided" in type(placement).__name__ for placement in dtensor.placements):
        return {}
    found = {}
    for dim, size in enumerate(dtensor.shape):
        places = torch.arange(size).reshape([size if d == dim else 1 for d in range(dtensor.dim())])
        for i, placement in enumerate(dtensor.placements):
            if getattr(placement, "dim", None) == dim:
                count = dtensor.device_mesh.size(i)
                pieces, _ = placement._split_tensor(places, count, with_padding=False, contiguous=True)
                places = pieces[coordinate[i]]
        runs: list[list[int]] = []
        for place in places.flatten().tolist():
            if runs and runs[-1][0] + runs[-1][1] == place:
                runs[-1][1] += 1
            else:
                runs.append([place, 1])
        if len(runs) > 1:
            found[str(dim)] = runs
    return found


def local_state(state: Mapping[Any, Any]) -> tuple[State, Shards]:
    """Return the state dict with the local part of each DTensor, and a description of each by name.

    The name of a nested DTensor, as in an optimizer's state, is its keys and indices joined by "/". Mappings,
    lists and tuples are new objects, everything else is the object of the given state.

    Raises:
        ValueError: two DTensors have the same name.
    """
    shards: Shards = {}
    return _localized(state, "", shards), shards


def _localized(value: Any, name: str, shards: Shards) -> Any:
    dtensor = dtensor_type()
    if dtensor is not None and issubclass(type(value), dtensor):
        if name in shards:
            raise ValueError(f"expected distinct names, but got two DTensors {name!r}")
        local, shards[name] = describe_shard(value)
        return local
    if isinstance(value, Mapping):
        return {key: _localized(item, _joined(name, key), shards) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_localized(item, _joined(name, i), shards) for i, item in enumerate(value))
    return value


def _joined(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def full_state(parts: Sequence[tuple[State, Shards]]) -> State:
    """Return the state dict with whole tensors on the CPU, assembled from those of all ranks.

    Values that are not shards are taken from the first rank, and so are replicas.

    Args:
        parts: the results of :func:`local_state` on all ranks, in order.

    Raises:
        ValueError: `parts` is empty; a shard is missing or does not match its description; a tensor is a
            partial sum (Partial).
    """
    if not parts:
        raise ValueError("expected the state of at least one rank, but got none")
    return _whole([state for state, _ in parts], "", [shards for _, shards in parts])


def _whole(values: list[Any], name: str, shards: list[Shards]) -> Any:
    """Assemble the values that stand at one place in the states of all ranks."""
    first = values[0]
    if name in shards[0]:
        return _assembled(name, values, [described.get(name) for described in shards])
    if isinstance(first, Mapping):
        others = [value if isinstance(value, Mapping) else {} for value in values]
        return {
            key: _whole([value.get(key) for value in others], _joined(name, key), shards) for key in first
        }
    if type(first) in (list, tuple):
        ours = [value if type(value) is type(first) else () for value in values]
        items = [
            _whole([v[i] if i < len(v) else None for v in ours], _joined(name, i), shards)
            for i in range(len(first))
        ]
        return type(first)(items)
    return first


def _assembled(name: str, locals_: list[Any], descriptions: list[dict[str, Any] | None]) -> Tensor:
    first = descriptions[0]
    assert first is not None
    shape = first["global_shape"]
    whole: Tensor | None = None
    filled: set[tuple] = set()
    elements = 0
    for rank, (local, its) in enumerate(zip(locals_, descriptions, strict=True)):
        if its is None or not isinstance(local, Tensor) or its["global_shape"] != shape:
            raise ValueError(
                f"{name}: expected state {rank} to have a shard of shape {shape}, but it has none"
            )
        if any("Partial" in placement for placement in its["placements"]):
            raise ValueError(f"{name}: cannot assemble unreduced partial sums: {its['placements']}")
        whole = torch.empty(shape, dtype=local.dtype) if whole is None else whole
        if its["mesh"]["coordinate"] is None or local.numel() == 0:
            continue
        runs = _pieces(its, local)
        place = tuple(tuple(map(tuple, of_dim)) for of_dim in runs)
        if place in filled:
            continue  # a replica
        if [sum(length for _, length in of_dim) for of_dim in runs] != list(local.shape):
            raise ValueError(
                f"{name}: the shard of state {rank} has shape {list(local.shape)}, which its description "
                "does not match"
            )
        filled.add(place)
        elements += local.numel()
        _write(whole, local, runs)
    assert whole is not None
    if elements != whole.numel():
        raise ValueError(
            f"{name}: expected all {whole.numel()} elements of shape {shape}, but the shards of "
            f"{len(locals_)} ranks hold {elements}"
        )
    return whole


def _pieces(description: dict[str, Any], local: Tensor) -> list[list[list[int]]]:
    """Return the [start, length] of the pieces of a local part, in order, for each dimension."""
    runs = description.get("runs", {})
    offsets = description["offsets"]
    return [runs.get(str(d)) or [[offsets[d], local.shape[d]]] for d in range(local.dim())]


def _write(whole: Tensor, local: Tensor, runs: list[list[list[int]]], dim: int = 0) -> None:
    """Copy a local part into the whole tensor piece by piece, one dimension after the other."""
    if dim == len(runs):
        whole.copy_(local)
        return
    start_here = 0
    for start, length in runs[dim]:
        if start < 0 or start + length > whole.shape[dim]:
            raise ValueError(
                f"expected a shard within {whole.shape[dim]} elements, but got {length} from {start} on"
            )
        _write(whole.narrow(dim, start, length), local.narrow(dim, start_here, length), runs, dim + 1)
        start_here += length
