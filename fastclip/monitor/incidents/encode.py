# SPDX-License-Identifier: BSD-3-Clause
"""Encoding of any value as a tree of plain values and tensors that loads with ``weights_only=True``.

Scalars and plain tensors encode to themselves. Everything else becomes a tuple whose first item names the
type: ("list", items), ("dict", keys, values) and so on. An object that occurs twice in a value occurs twice
in its tree, as one object.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import operator
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .shards import describe_shard, dtensor_type

_MAX_DEPTH = 100  # nested containers: pickle recurses twice for each
_MAX_NODES = 500_000  # a value that makes new parts on each access would never end
_MAX_PROBLEMS = 100
_MAX_REPR = 500  # characters
_LARGEST_INT_BITS = 2000  # weights_only=True loads integers of up to 255 bytes
_SCALARS = frozenset({type(None), bool, float, complex, str})
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {collections.OrderedDict: "ordered_dict", collections.Counter: "counter"}
_HASHABLE = frozenset(
    {"tuple", "namedtuple", "frozenset", "size", "dtype", "device", "bytes", "int", "numpy", "repr"}
)


def encode(value: Any) -> tuple[Any, list[str]]:
    """Return the value as a tree, and a sentence on everything that will decode to something else.

    A tensor in the tree shares memory with that of the value if it fills its storage; a view of a larger
    storage is copied, so that a slice does not bring the whole along. Strides of dense tensors are preserved,
    since kernels are chosen by them. requires_grad is dropped.

    Some types decode to others, which is a problem each: mappings to dict, dataclasses and other objects to
    :class:`types.SimpleNamespace`, subclasses to their base, functions and unknown types to
    :class:`~fastclip.monitor.incidents.decode.Unrestored`. A namedtuple decodes to one of the same name and
    fields, and a DTensor, as its local part, to :class:`~fastclip.monitor.incidents.decode.StoredShard`.

    Never raises an Exception, whatever the value does.
    """
    encoder = _Encoder()
    return encoder.encode(value, "value", hashable=False), encoder.problems()


def type_name(kind: type) -> str:
    """Return the module and name of a type, without "builtins"."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<repr raised {type(error).__name__}>"
    return text if len(text) <= _MAX_REPR else text[: _MAX_REPR - 3] + "..."


class _Encoder:
    def __init__(self) -> None:
        self._problems: list[str] = []
        self._unlisted = 0
        self._nodes = 0
        self._open: set[int] = set()
        # By id: the node, and the object itself, which keeps its id from being reused.
        self._known: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def problems(self) -> list[str]:
        """Return a sentence on each value that will decode to something else."""
        more = [f"and {self._unlisted} more"] if self._unlisted else []
        return self._problems + more

    def _problem(self, path: str, what: str) -> None:
        if len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(f"{path}: {what}")
        else:
            self._unlisted += 1

    def _unrestored(self, value: Any, path: str, why: str) -> tuple[str, str, str]:
        name = type_name(type(value))
        self._problem(path, f"{name}: {why}; only its repr is stored")
        return ("repr", name, _shown(value))

    def encode(self, value: Any, path: str, hashable: bool) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is int:
            return value if value.bit_length() <= _LARGEST_INT_BITS else ("int", hex(value))
        key = id(value), hashable
        if (found := self._known.get(key)) is not None:
            return found[0]
        if id(value) in self._open:
            return self._unrestored_briefly(value, path, "a cycle: it contains itself")
        if len(self._open) >= _MAX_DEPTH:
            return self._unrestored_briefly(value, path, f"nested more than {_MAX_DEPTH} deep")
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            return self._unrestored_briefly(value, path, f"beyond the first {_MAX_NODES} parts")
        self._open.add(id(value))
        try:
            node = self._encode(value, kind, path, hashable)
        except Exception as error:
            node = self._unrestored(value, path, f"reading it raised {type(error).__name__}: {error}"[:300])
        finally:
            self._open.discard(id(value))
        if hashable and type(node) is tuple and node[0] not in _HASHABLE:
            node = self._unrestored(value, path, "its stored form is not hashable, so it cannot be a key")
        self._known[key] = node, value
        return node

    def _unrestored_briefly(self, value: Any, path: str, why: str) -> tuple[str, str, str]:
        """Note the problem without the repr, which may be as deep as the value."""
        name = type_name(type(value))
        self._problem(path, f"{name}: {why}")
        return ("repr", name, f"<{why}>")

    def _encode(self, value: Any, kind: type, path: str, hashable: bool) -> Any:
        if issubclass(kind, Tensor):
            return self._tensor(value, kind, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and issubclass(kind, (numpy.ndarray, numpy.generic)):
            return self._array(value, kind, path, numpy)
        if issubclass(kind, (bytes, bytearray)):
            self._base(kind, (bytes, bytearray), path)
            data = (
                torch.frombuffer(bytearray(value), dtype=torch.uint8) if len(value) else torch.empty(0).byte()
            )
            return ("bytearray" if issubclass(kind, bytearray) else "bytes", data)
        if kind is torch.dtype:
            return ("dtype", str(value).removeprefix("torch."))
        if kind is torch.device:
            return ("device", str(value))
        if kind is torch.Size:
            return ("size", tuple(value))
        if issubclass(kind, Mapping):
            return self._mapping(value, kind, path)
        if issubclass(kind, (list, tuple, set, frozenset, collections.deque)):
            return self._sequence(value, kind, path, hashable)
        if isinstance(value, (type, ModuleType)) or callable(value):
            return self._unrestored(value, path, "code is not stored")
        for base in (bool, int, float, complex, str):
            if issubclass(kind, base):
                self._problem(path, f"{type_name(kind)} is stored as {base.__name__}")
                return self.encode(base(value), path, hashable)
        return self._object(value, kind, path)

    def _base(self, kind: type, bases: tuple[type, ...], path: str) -> None:
        if kind not in bases:
            base = next(base for base in bases if issubclass(kind, base))
            self._problem(path, f"{type_name(kind)} is stored as {base.__name__}")

    def _mapping(self, value: Any, kind: type, path: str) -> tuple:
        tag = _MAPPINGS.get(kind, "dict")
        if tag == "dict" and kind is not dict:
            self._problem(path, f"{type_name(kind)} is stored as dict")
        keys, values = [], []
        for name in list(value):
            keys.append(self.encode(name, f"{path} key", hashable=True))
            values.append(
                self._part(functools.partial(operator.getitem, value, name), f"{path}[{_shown(name)[:80]}]")
            )
        return (tag, keys, values)

    def _sequence(self, value: Any, kind: type, path: str, hashable: bool) -> tuple:
        names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
        tag = next((tag for base, tag in _SEQUENCES.items() if issubclass(kind, base)), "list")
        inner = hashable or tag in ("set", "frozenset")
        items = [self.encode(item, f"{path}[{i}]", inner) for i, item in enumerate(value)]
        if names is not None:
            return ("namedtuple", kind.__name__, list(map(str, names)), items)
        if kind not in _SEQUENCES:
            self._problem(path, f"{type_name(kind)} is stored as {tag}")
        return (tag, items)

    def _object(self, value: Any, kind: type, path: str) -> tuple:
        if dataclasses.is_dataclass(kind):
            names = [f.name for f in dataclasses.fields(kind)]
        elif isinstance(attributes := getattr(value, "__dict__", None), dict):
            names = [name for name in attributes if isinstance(name, str)]
        else:
            return self._unrestored(value, path, "an unknown type")
        self._problem(path, f"{type_name(kind)} is stored as its attributes")
        parts = [self._part(functools.partial(getattr, value, name), f"{path}.{name}") for name in names]
        return ("object", type_name(kind), names, parts)

    def _part(self, get: Callable[[], Any], path: str) -> Any:
        try:
            part = get()
        except Exception as error:
            self._problem(path, f"reading it raised {type(error).__name__}: {error}"[:300])
            return ("repr", "missing", f"<reading it raised {type(error).__name__}>")
        return self.encode(part, path, hashable=False)

    def _tensor(self, value: Any, kind: type, path: str) -> Any:
        if (dtensor := dtensor_type()) is not None and issubclass(kind, dtensor):
            local, description = describe_shard(value)
            plain = self._tensor(local, type(local), path)
            return ("dtensor", plain, self.encode(description, path, hashable=False))
        if value.is_meta or value.is_nested or not _is_storable(value.dtype, value.is_quantized):
            return self._unrestored(value, path, f"torch cannot store {value.dtype} on {value.device} here")
        if hasattr(kind, "__tensor_flatten__") or _has_no_memory(value):
            return self._unrestored(value, path, "a tensor subclass that wraps other tensors")
        if kind not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            self._problem(path, f"{type_name(kind)} is stored as torch.Tensor")
        return plain_tensor(value)

    def _array(self, value: Any, kind: type, path: str, numpy: Any) -> tuple:
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > (16 if value.dtype.kind == "c" else 8):
            return self._unrestored(value, path, f"torch has no dtype {value.dtype}")
        if issubclass(kind, numpy.ma.MaskedArray):
            return self._unrestored(value, path, "a masked array")
        if issubclass(kind, numpy.ndarray) and kind is not numpy.ndarray:
            self._problem(path, f"{type_name(kind)} is stored as numpy.ndarray")
        native = numpy.array(value, dtype=value.dtype.newbyteorder("="), order="C", copy=True)
        return ("numpy", torch.from_numpy(native), value.dtype.str, issubclass(kind, numpy.generic))


def plain_tensor(tensor: Tensor) -> Tensor:
    """Return a detached torch.Tensor whose storage holds the values and nothing else.

    It shares memory with `tensor` if that fills its storage.
    """
    with torch.no_grad():
        plain = tensor.detach()
        if plain.layout is not torch.strided or plain.is_quantized:
            return plain.clone()
        plain = plain.as_subclass(Tensor).resolve_conj().resolve_neg()
        dense = torch.empty_like(plain, device="meta").stride() == plain.stride()
        if dense and plain.untyped_storage().nbytes() == plain.numel() * plain.element_size():
            return plain
        return plain.clone()


def _has_no_memory(tensor: Tensor) -> bool:
    """Return whether a tensor subclass holds its values outside its own storage."""
    if tensor.layout is not torch.strided:
        return False
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() == 0
    except Exception:
        return True


@functools.cache
def _is_storable(dtype: torch.dtype, is_quantized: bool) -> bool:
    """Return whether torch can save and load this dtype, which is not so for all."""
    if is_quantized:
        return True
    try:
        file = io.BytesIO()
        torch.save(torch.empty(0, dtype=dtype), file)
        file.seek(0)
        torch.load(file, weights_only=True)
        return True
    except Exception:
        return False
