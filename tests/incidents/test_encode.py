# SPDX-License-Identifier: BSD-3-Clause
"""encode() and decode() of all kinds of values, hostile ones included."""

import collections
import dataclasses
import enum
import io
import subprocess
import sys
import types

import hypothesis.strategies as st
import numpy
import pytest
import torch
from hypothesis import given, settings

from fastclip.monitor.incidents.decode import DecodeError, Unrestored, decode
from fastclip.monitor.incidents.encode import encode

NAN = float("nan")
Pair = collections.namedtuple("Pair", ["left", "right"])


def stored(tree):
    """Save a tree and load it."""
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def round_trip(value):
    tree, problems = encode(value)
    return decode(stored(tree)), problems


def same(a, b):
    """Return whether two values have the same types, order and bits."""
    if type(a) is not type(b) and not hasattr(a, "_fields"):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
    if isinstance(a, (numpy.ndarray, numpy.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    return a == b


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.uint32]
TENSORS = st.builds(
    lambda dtype, shape: torch.randint(0, 2, shape).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
)
KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary(), st.floats(allow_nan=False))
LEAVES = st.one_of(
    KEYS,
    st.floats(),
    st.complex_numbers(),
    st.integers(min_value=-(1 << 4000), max_value=1 << 4000),
    st.text(st.characters(codec=None, categories=["Cs", "Cc", "L"])),
    st.sets(KEYS),
    st.frozensets(KEYS),
    TENSORS,
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.one_of(KEYS, st.tuples(KEYS, KEYS)), inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text(), inner).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_decode_inverts_encode(value):
    again, problems = round_trip(value)
    assert same(value, again) and problems == []


@pytest.mark.parametrize("value", [b"", bytearray(b"\0\xff"), 1 << 5000, -(1 << 5000), torch.Size([2, 0])])
def test_encode_converts_what_the_loader_refuses(value):
    again, problems = round_trip({"it": value})
    assert same({"it": value}, again) and not problems
    assert round_trip([torch.float8_e5m2, torch.device("cuda:1")])[0] == [
        torch.float8_e5m2,
        torch.device("cuda:1"),
    ]


def test_encode_stores_only_the_visible_part_of_a_storage():
    whole = torch.arange(1 << 20, dtype=torch.float32)
    value = {
        "slice": whole[5:9],
        "step": whole[::1000],
        "empty": whole[:0],
        "expanded": whole[:1].expand(1000),
    }
    tree, _ = encode(value)
    file = io.BytesIO()
    torch.save(tree, file)
    assert len(file.getvalue()) < 20_000
    assert same(value, decode(stored(tree)))
    images = torch.rand(4, 3, 4, 5).to(memory_format=torch.channels_last)
    for part in (images, images[2:]):
        assert round_trip(part)[0].stride() == part.stride()


def test_encode_stores_shared_objects_once():
    tensor, items = torch.ones(3), [1]
    again, _ = round_trip([tensor, tensor, items, items])
    assert again[0] is again[1] and again[2] is again[3]
    deep = [1]
    for _ in range(60):
        deep = [deep, deep]  # 2 ** 60 leaves, if each were gone through
    assert round_trip(deep)[1] == []


def test_encode_of_tensor_layouts_and_classes():
    dense = torch.tensor([[0.0, NAN], [2.0, 0.0]])
    parameter = torch.nn.Parameter(torch.ones(2))
    for tensor in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        again, problems = round_trip(tensor)
        assert again.layout == tensor.layout and not problems
        assert torch.equal(again.to_dense().nan_to_num(9.0), dense.nan_to_num(9.0))
    again, problems = round_trip([parameter, parameter * 2, torch.ones(2, dtype=torch.complex64).conj()])
    assert not problems and not any(t.requires_grad for t in again) and type(again[0]) is torch.Tensor
    for tensor in (torch.empty(2, device="meta"), torch.nested.nested_tensor([torch.ones(1)])):
        again, problems = round_trip([tensor])
        assert isinstance(again[0], Unrestored) and "torch cannot store" in problems[0]


class Image(torch.Tensor):
    pass


def test_encode_stores_a_tensor_subclass_as_a_tensor():
    again, problems = round_trip(torch.ones(2).as_subclass(Image))
    assert type(again) is torch.Tensor and "Image is stored as torch.Tensor" in problems[0]


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "f8", "?", "u2", ">u4", "i1", "c16"])
def test_encode_of_numpy_arrays(dtype):
    array = numpy.arange(12).astype(dtype).reshape(3, 4)
    for value in (array, array[::-1, ::2], array[1, 1], array[:0], array.T, {array[1, 1]: 1}):
        again, problems = round_trip(value)
        assert same(value, again) and not problems


def test_encode_reports_numpy_dtypes_that_torch_lacks():
    values = [
        numpy.array([object()]),
        numpy.array(["a"]),
        numpy.datetime64("2020-01-01"),
        numpy.longdouble(1),
    ]
    again, problems = round_trip(values)
    assert all(isinstance(v, Unrestored) for v in again) and len(problems) == 4
    assert "value[1]: numpy.ndarray: torch has no dtype <U1" in problems[1]


@dataclasses.dataclass
class Batch:
    inputs: torch.Tensor
    name: str = "x"


class Color(enum.IntEnum):
    RED = 1


class Broken:
    def __init__(self):
        self.fine = 1

    def __repr__(self):
        raise ValueError("no repr")

    @property
    def __class__(self):
        raise ValueError("no class")


class BrokenMapping(collections.UserDict):
    def __getitem__(self, key):
        if key == "bad":
            raise OSError("gone")
        return super().__getitem__(key)


class Endless(collections.abc.Mapping):
    def __len__(self):
        return 1

    def __iter__(self):
        return iter(["next"])

    def __getitem__(self, key):
        return Endless()


def test_encode_stores_other_types_as_attributes_or_base():
    value = [
        Batch(torch.ones(1)),
        collections.UserDict(a=1),
        Color.RED,
        collections.deque([1]),
        numpy.float64(2),
    ]
    (batch, mapping, color, queue, number), problems = round_trip(value)
    assert isinstance(batch, types.SimpleNamespace) and torch.equal(batch.inputs, torch.ones(1))
    assert mapping == {"a": 1} and color == 1 and type(color) is int and queue == [1]
    assert type(number) is numpy.float64
    assert [p.partition(":")[0] for p in problems] == [f"value[{i}]" for i in range(4)]


def test_encode_reports_hostile_values_and_never_raises():
    cycle = [1]
    cycle.append(cycle)
    deep = []
    for _ in range(5000):
        deep = [deep]
    slotted = type("Slotted", (), {"__slots__": ("a",)})()
    strange = [cycle, deep, Broken(), BrokenMapping(bad=1, fine=2), Endless(), slotted, lambda: 0, sys]
    strange += [
        torch.nn.Linear(1, 1),
        Batch,
        {(Broken(),): 1},
        {Batch: 2},
        iter([]),
        object(),
        types.MappingProxyType({}),
    ]
    for value in strange:
        again, problems = round_trip({"it": value, "after": 1})
        assert problems and again["after"] == 1
    again, problems = round_trip(BrokenMapping(bad=1, fine=2))
    assert again["fine"] == 2 and any("reading it raised OSError: gone" in p for p in problems)
    assert round_trip([object()] * 3 + [object() for _ in range(500)])[1][-1].startswith("and 40")


@pytest.mark.parametrize(
    "tree",
    [
        [1],
        ("unknown", 1),
        ("list", 5),
        ("dict", [1], []),
        ("dict", [("list", [])], [1]),
        ("namedtuple", "A", ["x, y: __import__('os')"], [1]),
        ("dtype", "save"),
        ("numpy", torch.ones(1), "O", False),
        ("int", None),
        (),
        ("list",),
    ],
    ids=str,
)
def test_decode_raises_on_other_values(tree):
    with pytest.raises(DecodeError, match="expected"):
        decode(tree)
    endless = []
    endless.append(("list", endless))
    with pytest.raises(DecodeError, match="deep"):
        decode(endless[0])


def test_rng_state_and_encode_without_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from fastclip.monitor.incidents.rng import rng_state\n"
        "from fastclip.monitor.incidents.decode import decode\n"
        "from fastclip.monitor.incidents.encode import encode\n"
        "import torch\n"
        "assert sorted(rng_state()) == ['python', 'torch']\n"
        "assert decode(encode({'a': b'xy'})[0]) == {'a': b'xy'}\n"
        "assert torch.equal(decode(('numpy', torch.ones(2), '<f4', False)), torch.ones(2))\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
