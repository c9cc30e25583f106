# SPDX-License-Identifier: BSD-3-Clause
"""Decoding of the trees that encode.py makes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_MAX_DEPTH = 200  # more than encode makes, and well below Python's recursion limit
_SCALARS = (type(None), bool, int, float, complex, str)


class DecodeError(ValueError):
    """Raised for what encode() did not make; the message says what was found."""


@dataclasses.dataclass(frozen=True)
class Unrestored:
    """A placeholder for a value that could not be stored.

    Attributes:
        type_name: the module and name of its type.
        text: its repr, shortened.
    """

    type_name: str
    text: str


@dataclasses.dataclass(frozen=True, eq=False)
class StoredShard:
    """The part of a DTensor that was on one process.

    Attributes:
        local: the values on that process.
        description: their place in the whole tensor, see
            :func:`fastclip.monitor.incidents.shards.describe_shard`.
    """

    local: Tensor
    description: dict[str, Any]


def decode(tree: Any) -> Any:
    """Return the value of a tree; without NumPy, its arrays become tensors.

    Raises:
        DecodeError: encode() did not make the tree.
    """
    return _Decoder().decode(tree, 0)


class _Decoder:
    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # by id of the node: the tree keeps all nodes alive

    def decode(self, node: Any, depth: int) -> Any:
        if type(node) in _SCALARS or isinstance(node, Tensor):
            return node
        if type(node) is not tuple or not node or type(node[0]) is not str or node[0] not in _MAKERS:
            raise DecodeError(f"expected an encoded value, but got {repr(node)[:80]}")
        if depth > _MAX_DEPTH:
            raise DecodeError(f"expected at most {_MAX_DEPTH} nested containers, but got a deeper tree")
        if id(node) not in self._known:
            try:
                self._known[id(node)] = _MAKERS[node[0]](self, depth + 1, *node[1:])
            except DecodeError:
                raise
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                raise DecodeError(
                    f"expected an encoded value, but got an invalid {node[0]!r}: {error}"
                ) from error
        return self._known[id(node)]

    def all(self, nodes: Any, depth: int) -> list[Any]:
        if type(nodes) is not list:
            raise DecodeError(f"expected a list of encoded values, but got {type(nodes).__name__}")
        return [self.decode(node, depth) for node in nodes]

    def pairs(self, depth: int, keys: Any, values: Any) -> list[tuple[Any, Any]]:
        return list(zip(self.all(keys, depth), self.all(values, depth), strict=True))


def _namedtuple(decoder: _Decoder, depth: int, name: str, fields: list[str], items: list[Any]) -> Any:
    # namedtuple refuses names that are not identifiers, so that none can be code.
    return collections.namedtuple(name, fields)(*decoder.all(items, depth))


def _object(decoder: _Decoder, depth: int, name: str, fields: list[str], parts: list[Any]) -> Any:
    return SimpleNamespace(**dict(decoder.pairs(depth, fields, parts)))


def _array(decoder: _Decoder, depth: int, tensor: Tensor, dtype: str, is_scalar: bool) -> Any:
    try:
        import numpy
    except ImportError:
        return tensor
    wanted = numpy.dtype(dtype)
    if wanted.kind not in "biufc":
        raise DecodeError(f"expected a numeric dtype, but got {dtype!r}")
    array = tensor.numpy()
    # astype would copy even to the same dtype.
    array = array if array.dtype == wanted else array.astype(wanted)
    return array[()] if is_scalar else array


def _dtype(decoder: _Decoder, depth: int, name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise DecodeError(f"expected the name of a dtype, but got {name!r}")
    return dtype


def _bytes(decoder: _Decoder, depth: int, data: Tensor) -> bytes:
    return bytes(_bytearray(decoder, depth, data))


def _bytearray(decoder: _Decoder, depth: int, data: Tensor) -> bytearray:
    return bytearray(data.tolist())


_MAKERS: dict[str, Callable[..., Any]] = {
    "list": lambda decoder, depth, items: decoder.all(items, depth),
    "tuple": lambda decoder, depth, items: tuple(decoder.all(items, depth)),
    "set": lambda decoder, depth, items: set(decoder.all(items, depth)),
    "frozenset": lambda decoder, depth, items: frozenset(decoder.all(items, depth)),
    "namedtuple": _namedtuple,
    "dict": lambda decoder, depth, keys, values: dict(decoder.pairs(depth, keys, values)),
    "ordered_dict": lambda decoder, depth, k, v: collections.OrderedDict(decoder.pairs(depth, k, v)),
    "counter": lambda decoder, depth, k, v: collections.Counter(dict(decoder.pairs(depth, k, v))),
    "object": _object,
    "numpy": _array,
    "dtensor": lambda decoder, depth, local, its: StoredShard(local, decoder.decode(its, depth)),
    "int": lambda decoder, depth, digits: int(digits, 16),
    "bytes": _bytes,
    "bytearray": _bytearray,
    "dtype": _dtype,
    "device": lambda decoder, depth, name: torch.device(name),
    "size": lambda decoder, depth, sizes: torch.Size(sizes),
    "repr": lambda decoder, depth, name, text: Unrestored(name, text),
}
