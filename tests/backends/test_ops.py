# SPDX-License-Identifier: BSD-3-Clause
"""The registered ops: schemas, tracing, memory around views, overlaps, messages."""

import warnings

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import cases
from helpers.cases import CHUNK, INF, assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("native_only")


def ops():
    return torch.ops.fastclip


def samples(dtype: torch.dtype) -> list[Tensor]:
    return [cases.normal(dtype, 5), cases.normal(dtype, 3, 4), cases.normal(dtype, 0)]


ARGUMENTS = {
    "grad_stats": lambda g: (g, 2.0),
    "scale_": lambda g: (g, torch.tensor([0.5], dtype=torch.float64)),
    "clip_": lambda g: (g, 0.5, 2.0, "propagate"),
    "clamp_": lambda g: (g, 0.1),
}


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("op", ARGUMENTS)
def test_ops_pass_opcheck(op, dtype):
    torch.library.opcheck(getattr(ops(), op).default, ARGUMENTS[op](samples(dtype)))


def test_ops_pass_opcheck_with_every_optional_argument():
    limits, inv_scale = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.5)
    grads = samples(torch.float32)
    torch.library.opcheck(ops().clip_.default, (grads, 0.0, INF, "zero", [2, 1, 0], limits, inv_scale))
    torch.library.opcheck(ops().grad_stats.default, (grads, 1.0, True, [0, 1, 0]))
    torch.library.opcheck(ops().scale_.default, (grads, torch.rand(3), True))


def test_op_schemas_mark_what_is_written():
    for name, writes in {"grad_stats": False, "scale_": True, "clip_": True, "clamp_": True}.items():
        schema = getattr(ops(), name).default._schema
        assert schema.is_mutable == writes, schema
        alias = schema.arguments[0].alias_info
        assert (alias is not None and alias.is_write) == writes


@pytest.mark.parametrize("wide", [False, True])
def test_ops_give_fake_tensors_the_shapes_and_dtypes_of_real_ones(wide):
    dtype = torch.float64 if wide else torch.bfloat16
    real = [torch.ones(3, dtype=dtype), torch.ones(4, 2)]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(g) for g in real]
        fake_results = [
            *ops().grad_stats(fake, 2.0),
            *ops().clip_(fake, 1.0, 2.0, "propagate", [0, 1]),
        ]
    results = [*ops().grad_stats(real, 2.0), *ops().clip_(real, 1.0, 2.0, "propagate", [0, 1])]
    for a, b in zip(fake_results, results, strict=True):
        assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


@pytest.mark.parametrize("offset", range(0, 41))
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=cases.dtype_name)
def test_ops_leave_the_memory_around_a_view_alone(offset, dtype):
    size = 3 * 32 + offset
    memory = torch.full((size + 2 * 41,), torch.nan, dtype=dtype)
    view = memory[offset : offset + size]
    view.copy_(cases.normal(dtype, size))
    around = memory.clone()
    total_norm, stats = ops().grad_stats([view], 2.0)
    assert stats[0, 1:].tolist() == [0, 0] and total_norm.isfinite()
    ops().clip_([view], 1e-3, 2.0, "zero")
    ops().scale_([view], torch.tensor([0.5]), True)
    ops().clamp_([view], 1e-6)
    assert view.abs().max() <= 1e-6
    around[offset : offset + size] = view
    assert_bitwise_equal([memory], [around])


def test_ops_do_not_write_gaps_between_elements():
    memory = torch.full((500, 200), torch.nan)
    view = memory[3:490:2, 1:180:3]
    view.copy_(torch.randn(view.shape))
    gaps = memory.isnan()
    ops().clip_([view], 1e-3, 2.0, "propagate")
    ops().clamp_([view], 1e-6)
    assert torch.equal(memory.isnan(), gaps) and view.abs().max() <= 1e-6


@pytest.fixture
def read_only() -> Tensor:
    """Zeros in memory that may only be read: writing even the same value there ends the process."""
    import mmap

    with open("/dev/zero", "rb") as zeros:
        page = mmap.mmap(zeros.fileno(), 1 << 16, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says, once, that it is not writable
        return torch.frombuffer(page, dtype=torch.float32)


def test_scale_by_one_touches_no_memory(read_only):
    ops().clip_([read_only], 1.0, 2.0, "propagate")
    ops().scale_([read_only], torch.tensor([1.0]))
    ops().clamp_([read_only], 1.0)
    assert read_only.count_nonzero() == 0


def test_scale_with_zero_nonfinite_writes_only_where_it_must(read_only):
    grad = torch.zeros(4 * CHUNK)
    grad[2 * CHUNK] = torch.nan
    ops().clip_([read_only, grad], 1.0, 2.0, "zero")
    assert grad.count_nonzero() == 0


# Overlaps: refused before anything is written.


def overlapping() -> dict[str, list[Tensor]]:
    memory = torch.ones(100)
    matrix = torch.ones(20, 30)
    return {
        "shifted": [memory[:60], memory[59:]],
        "inside": [memory, memory[10:20]],
        "in reverse order": [memory[50:], memory[:51]],
        "third of three": [memory[:10], memory[20:40], memory[39:50]],
        "columns": [matrix[:, :16], matrix[:, 15:]],
        "column and row": [matrix[:, 3], matrix[7]],
        "steps": [memory[::2], memory[::3]],
        "another dtype": [memory[:50], memory.view(torch.bfloat16)[90:110]],
        "the same start": [memory[:10], memory[:11]],
        "a transposed view with gaps": [matrix[:10, :10], matrix[:10, :10].t()[:5]],
    }


def apart() -> dict[str, list[Tensor]]:
    memory = torch.ones(100)
    matrix = torch.ones(20, 30)
    return {
        "halves": [memory[:50], memory[50:]],
        "in reverse order": [memory[50:], memory[:50]],
        "columns": [matrix[:, :15], matrix[:, 15:]],
        "interleaved": [memory[::2], memory[1::2]],
        "three columns": [matrix[:, 0], matrix[:, 1], matrix[:, 29]],
        "steps that never meet": [memory[::6], memory[1::3], memory[2::6]],
        "empty views": [memory, memory[5:5]],
        "another dtype": [memory[:50], memory.view(torch.bfloat16)[100:]],
        "many": [memory[i : i + 1] for i in range(100)],
    }


WRITES = {name: ARGUMENTS[name] for name in ("scale_", "clip_", "clamp_")}


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("case", overlapping())
def test_ops_raise_on_gradients_that_overlap_in_part(op, case):
    grads = overlapping()[case]
    with pytest.raises(RuntimeError, match=r"grads\[\d\] and grads\[\d\] share part of their memory"):
        getattr(ops(), op)(*WRITES[op](grads))
    assert all((g.float() == 1).all() or g.dtype != torch.float32 for g in grads)


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize("case", apart())
def test_ops_accept_gradients_that_do_not_overlap(op, case):
    grads = apart()[case]
    getattr(ops(), op)(*WRITES[op](grads))
    assert all((g != 1).all() for g in grads if g.dtype == torch.float32)


@pytest.mark.parametrize("op", WRITES)
@pytest.mark.parametrize(
    "grad",
    [torch.ones(1).expand(4), torch.ones(3, 1).expand(3, 5), torch.ones(9).as_strided((3, 3), (2, 1))],
    ids=["scalar", "column", "overlapping rows"],
)
def test_ops_raise_on_a_gradient_that_overlaps_itself(op, grad):
    with pytest.raises(RuntimeError, match=r"grads\[1\] overlaps itself"):
        getattr(ops(), op)(*WRITES[op]([torch.ones(3), grad]))
    assert (grad == 1).all()


def test_overlap_check_is_exact_on_random_views():
    """Against marking every element: the search must neither miss an overlap nor invent one."""
    generator = torch.Generator().manual_seed(5)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def place(view: Tensor) -> tuple:
        return view.storage_offset(), sorted(zip(view.stride(), view.shape, strict=True))

    judged = {True: 0, False: 0}
    for _ in range(600):
        memory = torch.zeros(24, 24)
        views = []
        for _ in range(2):
            rows, columns = (slice(number(0, 8), number(8, 25), number(1, 5)) for _ in range(2))
            view = memory[rows, columns]
            views.append(view.t() if number(0, 2) else view)
        for view in views:
            view += 1
        if place(views[0]) == place(views[1]):
            continue  # the very same elements twice are allowed
        overlaps = bool((memory > 1).any())
        try:
            ops().clamp_(views, 0.5)
            refused = False
        except RuntimeError:
            refused = True
        assert refused == overlaps, (views[0].shape, views[0].stride(), views[1].shape, views[1].stride())
        judged[overlaps] += 1
    assert min(judged.values()) > 100, judged


# Other refusals. The public functions say more; see test_bad_input.py.


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda g: ops().grad_stats(g, 3.0), "norm_type to be 1, 2 or inf"),
        (lambda g: ops().clip_(g, 1.0, 2.0, "ignore"), "'propagate', 'zero' or 'skip', but got 'ignore'"),
        (
            lambda g: ops().grad_stats(g, 2.0, False, [0]),
            r"groups to have one entry per gradient \(2\), but got 1",
        ),
        (lambda g: ops().grad_stats(g, 2.0, False, [0, -1]), "groups to be numbers from 0.*but got -1"),
        (lambda g: ops().grad_stats(g, 2.0, False, [0, 2]), "groups to be numbers from 0 to 1"),
        (lambda g: ops().scale_(g, torch.ones(3)), "scale to have 1 or 2 elements, but got 3"),
        (lambda g: ops().scale_(g, torch.ones(1, dtype=torch.int64)), "contiguous float32 or float64"),
        (lambda g: ops().clamp_(g, float("nan")), "limit to be a number"),
        (lambda g: ops().clip_([g[0], g[1].int()], 1.0, 2.0, "skip"), r"grads\[1\] has another dtype"),
    ],
)
def test_op_errors_name_the_argument_and_no_build_path(call, words):
    grads = [torch.ones(3), torch.ones(2)]
    with pytest.raises(RuntimeError, match=words) as error:
        call(grads)
    assert "csrc" not in str(error.value) and ".cpp" not in str(error.value)
    assert all((g == 1).all() for g in grads)


def test_cpu_capability_raises_on_an_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("FASTCLIP_CPU_CAPABILITY", "sse9")
    with pytest.raises(RuntimeError, match=r"FASTCLIP_CPU_CAPABILITY.*baseline.*but got 'sse9'"):
        ops().cpu_capability()


def test_compiled_ops_equal_eager():
    """One graph, the same bits, the mutation seen; the rest of torch.compile has tests of its own."""
    import fastclip

    def clip(*grads):
        holders = [torch.zeros_like(g) for g in grads]
        for holder, grad in zip(holders, grads, strict=True):
            holder.grad = grad
        return torch.ops.fastclip.clip_(list(grads), 0.5, 2.0, "propagate")[0]

    grads = [torch.randn(5), torch.randn(70)]
    eager = cases.clone(grads)
    expected = clip(*eager)
    compiled = torch.compile(clip, backend="aot_eager", fullgraph=True)
    actual = compiled(*grads)
    assert_bitwise_equal([actual, *grads], [expected, *eager])
    assert fastclip.backends.name_in_use() == "native"
