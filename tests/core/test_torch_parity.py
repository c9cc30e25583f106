# SPDX-License-Identifier: BSD-3-Clause
"""The public functions against torch.nn.utils, behaviour by behaviour.

Each test is either an equality or one of the differences that the README lists as deliberate.
"""

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import utils as theirs

import fastclip as ours
from helpers import cases
from helpers.cases import DTYPES, INF, NAN, assert_bitwise_equal, dtype_name

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
WARNS_OF_GENERATORS = TORCH >= (2, 8)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def parameters(*grads: Tensor | None) -> list[Parameter]:
    """Parameters that hold copies of the gradients."""
    made = []
    for grad in grads:
        like = torch.zeros(3) if grad is None else grad
        parameter = Parameter(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype))
        parameter.grad = None if grad is None else cases.clone([grad])[0]
        made.append(parameter)
    return made


def grads_of(params: list[Parameter]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def both(*grads: Tensor | None):
    """Two equal lists of parameters, one for each library."""
    return parameters(*grads), parameters(*grads)


def assert_same_clipping(grads, max_norm, *args, exact=False, **kwargs) -> None:
    """Equal norms and gradients; to the bit if torch's norm has no rounding of its own."""
    a, b = both(*grads)
    expected = theirs.clip_grad_norm_(a, max_norm, *args, **kwargs)
    actual = ours.clip_grad_norm_(b, max_norm, *args, **kwargs)
    assert actual.shape == expected.shape == ()
    if exact:
        assert_bitwise_equal([actual, *grads_of(b)], [expected, *grads_of(a)])
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(grads_of(b), grads_of(a), rtol=1e-5, atol=0, equal_nan=True)


# Inputs


@pytest.mark.parametrize("empty", [list, tuple, lambda: iter([]), lambda: filter(None, []), dict])
@pytest.mark.parametrize("error_if_nonfinite", [False, True])
def test_clip_grad_norm_of_no_parameters_is_zero_on_the_cpu(backend, empty, error_if_nonfinite):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for library in (theirs, ours):
            norm = library.clip_grad_norm_(empty(), 1.0, error_if_nonfinite=error_if_nonfinite)
            assert (
                norm.shape == () and norm == 0 and norm.device.type == "cpu" and norm.dtype == torch.float32
            )
            assert library.get_total_norm(empty()) == 0


def test_clip_grad_norm_ignores_parameters_without_gradients(backend):
    grad = cases.normal(torch.float32, 50)
    assert_same_clipping([None, grad, None], 0.5)
    for library in (theirs, ours):
        assert library.clip_grad_norm_(parameters(None, None), 1.0) == 0
        assert library.clip_grad_norm_(Parameter(torch.zeros(3)), 1.0) == 0
        assert library.clip_grads_with_norm_(parameters(None), 1.0, torch.tensor(2.0)) is None


@pytest.mark.parametrize("exhausted", [False, True])
def test_clip_grad_norm_warns_on_an_empty_generator_as_torch(exhausted):
    def generator():
        used = (p for p in ([torch.zeros(2)] if exhausted else []))
        list(used)
        return used

    caught = []
    for library in (theirs, ours) if WARNS_OF_GENERATORS else (ours,):
        with pytest.warns(UserWarning) as record:
            assert library.clip_grad_norm_(generator(), 1.0) == 0
        assert len(record) == 1
        caught.append((str(record[0].message), record[0].filename))
    assert caught[0] == caught[-1]
    assert caught[-1][1] == __file__


def test_clip_grad_norm_takes_a_single_tensor(backend):
    a, b = both(cases.normal(torch.float32, 10))
    expected = theirs.clip_grad_norm_(a[0], 1.0)
    torch.testing.assert_close(ours.clip_grad_norm_(b[0], 1.0), expected)
    torch.testing.assert_close(grads_of(b), grads_of(a))
    torch.testing.assert_close(ours.get_total_norm(a[0].grad), theirs.get_total_norm(a[0].grad))
    ours.clip_grad_value_(b[0], 0.1)
    theirs.clip_grad_value_(a[0], 0.1)
    torch.testing.assert_close(grads_of(b), grads_of(a))


def test_clip_grad_norm_uses_a_generator_once(backend):
    params = parameters(cases.normal(torch.float32, 10))
    assert ours.clip_grad_norm_((p for p in params), 1.0) > 1
    assert grads_of(params)[0].norm() <= 1
    ours.clip_grad_value_((p for p in params), 0.01)
    assert grads_of(params)[0].abs().max() <= 0.01
    ours.clip_grads_with_norm_((p for p in params), 1.0, torch.tensor(1e6))
    assert grads_of(params)[0].abs().max() <= 1e-7


def test_clip_grad_value_of_nothing_does_nothing():
    """Deliberate difference 4: torch raises."""
    for empty in ([], parameters(None)):
        with pytest.raises(RuntimeError):
            theirs.clip_grad_value_(empty, 1.0)
        assert ours.clip_grad_value_(empty, 1.0) is None


def test_clip_grad_norm_of_gradients_instead_of_parameters_changes_nothing(backend):
    grads = [cases.normal(torch.float32, 10) * 100]
    before = cases.clone(grads)
    for library in (theirs, ours):
        library.clip_grads_with_norm_(grads, 1.0, torch.tensor(100.0))
        assert_bitwise_equal(grads, before)


@pytest.mark.parametrize(
    "given, words",
    [
        (lambda m: m.named_parameters(), "tuple at index 0.*named_parameters"),
        (lambda m: m.state_dict(), "str at index 0"),
        (lambda m: [{"params": list(m.parameters())}], "dict at index 0.*'params'"),
        (lambda m: [None], "NoneType at index 0"),
        (lambda m: [*m.parameters(), 3], "int at index 2"),
    ],
)
def test_clip_grad_norm_raises_on_what_is_not_a_parameter(given, words):
    """torch raises AttributeError; the message here tells what was wanted."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(AttributeError):
        theirs.clip_grad_norm_(given(model), 1.0)
    for call in (lambda p: ours.clip_grad_norm_(p, 1.0), lambda p: ours.clip_grad_value_(p, 1.0)):
        with pytest.raises(TypeError, match=words):
            call(given(model))
    with pytest.raises(TypeError):
        ours.clip_grad_norm_(None, 1.0)


@pytest.mark.parametrize("norm_type", [2, "2", 1, "inf", "-inf", INF, 0.5, True])
def test_norm_type_takes_what_float_takes(backend, norm_type):
    assert_same_clipping([cases.normal(torch.float32, 30)], 0.3, norm_type)


@pytest.mark.parametrize("norm_type, error", [(None, TypeError), ("fro", ValueError)])
def test_clip_grad_norm_raises_on_a_bad_norm_type(norm_type, error):
    for library in (theirs, ours):
        with pytest.raises(error):
            library.clip_grad_norm_(parameters(torch.ones(3)), 1.0, norm_type)


# Orders of the norm and max_norm


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, -INF, 0.0, 0.5, 1.5, 3.0, 4.0, -1.0, -2.0, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
def test_clip_grad_norm_matches_torch_for_every_order(backend, norm_type, dtype):
    grads = [cases.normal(dtype, n).abs() + 0.1 for n in (10, 1, 200)]
    grads[1].neg_()
    assert_same_clipping(grads, 0.01, norm_type)


@pytest.mark.parametrize("norm_type", [-1.0, -2.0, -INF])
def test_negative_order_with_a_zero_element_matches_torch(backend, norm_type):
    assert_same_clipping([torch.tensor([0.0, 2.0]), torch.ones(3)], 1e-3, norm_type, exact=True)


def test_negative_order_keeps_an_inf_element(backend):
    grads = [torch.tensor([INF, 1.0]), torch.tensor([2.0, 1.0])]
    assert_same_clipping(grads, 0.1, -1.0)
    assert_same_clipping(grads, 0.1, -1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("norm_type", [INF, -INF, -1.0])
def test_clip_grad_norm_raises_on_an_empty_gradient_under_inf(backend, norm_type):
    for library in (theirs, ours):
        params = parameters(torch.ones(3), torch.ones(0, 2))
        with pytest.raises(RuntimeError):
            library.clip_grad_norm_(params, 0.1, norm_type)
        assert_bitwise_equal(grads_of(params), [torch.ones(3), torch.ones(0, 2)])
    with pytest.raises(RuntimeError, match=r"gradient 1 with shape \[0, 2\]"):
        ours.clip_grad_norm_(parameters(torch.ones(3), torch.ones(0, 2)), 0.1, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.0])
def test_empty_gradient_adds_nothing_to_the_norm(backend, norm_type):
    assert_same_clipping([torch.ones(3), torch.ones(0, 2)], 0.1, norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, -INF, NAN, -1e-45])
def test_clip_grad_norm_raises_on_negative_or_nan_max_norm(max_norm):
    """Deliberate difference 3: torch turns every sign round, or makes everything NaN."""
    params = parameters(torch.tensor([3.0, 4.0]))
    for call in (
        lambda: ours.clip_grad_norm_(params, max_norm),
        lambda: ours.clip_grads_with_norm_(params, max_norm, torch.tensor(5.0)),
        lambda: ours.clip_(params, max_norm),
    ):
        with pytest.raises(ValueError, match="max_norm"):
            call()
    assert_bitwise_equal(grads_of(params), [torch.tensor([3.0, 4.0])])
    theirs.clip_grad_norm_(params, -1.0)
    assert (grads_of(params)[0] < 0).all()


@pytest.mark.parametrize("max_norm", [0, 0.0, 1e-45, INF, 1, "2.5", True, 5.0, 4.999])
def test_clip_grad_norm_matches_torch_for_every_max_norm(backend, max_norm):
    assert_same_clipping([torch.tensor([3.0, 4.0])], max_norm, exact=True)


def test_clip_grad_norm_raises_on_max_norm_none():
    for library in (theirs, ours):
        with pytest.raises(TypeError):
            library.clip_grad_norm_(parameters(torch.ones(3)), None)


def test_clip_grad_norm_scales_a_norm_of_max_norm_by_epsilon(backend):
    params = parameters(torch.tensor([3.0, 4.0]))
    ours.clip_grad_norm_(params, 5.0)
    assert_bitwise_equal(grads_of(params), [torch.tensor([2.9999993, 3.999999])])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_clip_grad_norm_takes_max_norm_as_a_tensor(backend, shape):
    a, b = both(cases.normal(torch.float32, 100))
    theirs.clip_grad_norm_(a, 0.5)
    ours.clip_grad_norm_(b, torch.full(shape, 0.5))
    torch.testing.assert_close(grads_of(b), grads_of(a), rtol=1e-6, atol=0)


# Types


@pytest.mark.parametrize(
    "dtypes",
    list(itertools.combinations_with_replacement(DTYPES, 2)),
    ids=lambda d: "+".join(map(dtype_name, d)),
)
def test_total_norm_has_the_documented_dtype(backend, dtypes):
    """Deliberate difference 1: alone, bfloat16 and float16 give float32 here and their own dtype in torch."""
    grads = [cases.normal(dtype, 20) for dtype in dtypes]
    norm = ours.clip_grad_norm_(parameters(*grads), 0.1)
    expected = theirs.clip_grad_norm_(parameters(*grads), 0.1)
    halves = {torch.bfloat16, torch.float16}
    alone = len(set(dtypes)) == 1 and dtypes[0] in halves
    assert norm.dtype == (torch.float32 if alone else expected.dtype)
    assert expected.dtype == (dtypes[0] if alone else norm.dtype)
    assert not norm.requires_grad and norm.device == grads[0].device
    assert abs(norm.item() / cases.exact_norm(grads, 2.0) - 1) <= 1e-6
    torch.testing.assert_close(norm.to(expected.dtype), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("size", [1, 5, 33, 1000])
def test_clip_grad_norm_gives_torchs_bits_where_the_norms_agree(backend, dtype, size):
    """Integers have exact sums, so both norms are rounded alike; the coefficient is too.

    torch squares and adds rounded 2-norms, which costs it a bit in float64 and of several gradients.
    """
    grads = [torch.randint(-3, 4, (size,)).to(dtype) for _ in range(3)]
    assert_same_clipping(grads[:1], 0.7, exact=dtype == torch.float32)
    assert_same_clipping(grads, 0.7, 1.0, exact=True)
    assert_same_clipping(grads, 0.7, INF, exact=True)
    assert_same_clipping(grads[:1], 1e6, exact=dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_clip_grad_norm_rounds_half_gradients_once(backend, dtype):
    """Beside a float32 gradient torch's coefficient is float32 too: then the results agree to the bit."""
    grads = [torch.randint(-3, 4, (500,)).to(dtype) / 4, torch.full((7,), 0.5)]
    assert_same_clipping(grads, 0.3, INF, exact=True)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=dtype_name)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 3.0])
def test_clip_grad_norm_of_complex_gradients_matches_torch(backend, dtype, norm_type):
    grads = [torch.randn(20, dtype=dtype), torch.randn(3), torch.randn(7, dtype=dtype)]
    assert_same_clipping(grads, 0.2, norm_type)
    assert_same_clipping(grads[:1], 0.2, norm_type)
    for library in (theirs, ours):
        with pytest.raises(RuntimeError):  # and NotImplementedError, which is one, from torch 2.8 on
            library.clip_grad_value_(parameters(grads[0]), 0.1)


def test_clip_counts_nonfinite_complex_elements(backend):
    grads = [torch.tensor([complex(NAN, INF), complex(1, INF), 3]), torch.tensor([1.0, NAN])]
    stats = ours.grad_stats(parameters(*grads))
    assert stats.per_tensor.nan_count.tolist() == [1, 1] and stats.per_tensor.inf_count.tolist() == [1, 0]


class _Holder:
    """Carries a gradient that a Parameter of this torch would refuse."""

    def __init__(self, grad):
        self.grad = grad


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("position", [0, 1])
def test_clip_grad_norm_raises_on_dtypes_without_a_norm(backend, dtype, position):
    grads = [torch.ones(4), torch.ones(2)]
    grads.insert(position, torch.ones(3).to(dtype))
    holders = [_Holder(g.clone()) for g in grads]
    with pytest.raises((RuntimeError, NotImplementedError)):
        theirs.clip_grad_norm_(holders, 0.1)
    for call in (
        lambda: ours.clip_grad_norm_(holders, 0.1),
        lambda: ours.clip_grad_value_(holders, 0.1),
        lambda: ours.get_total_norm(h.grad for h in holders),
        lambda: ours.clip_grads_with_norm_(holders, 0.1, torch.tensor(2.0)),
    ):
        with pytest.raises(TypeError, match=rf"gradient {position} with shape \[3\], dtype {dtype}"):
            call()
    assert all(torch.equal(h.grad.float(), g.float()) for h, g in zip(holders, grads, strict=True))


def sparse(values: list[float], at: list[int], size: int = 6) -> Tensor:
    return torch.sparse_coo_tensor([at], torch.tensor(values), (size,), check_invariants=True)


def sparse_and_dense() -> list[Parameter]:
    """An embedding whose sparse gradient holds an index twice, and a dense gradient."""
    torch.manual_seed(4)
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    assert not embedding.weight.grad.is_coalesced()
    other = Parameter(torch.zeros(5))
    other.grad = torch.full((5,), 2.0)
    return [embedding.weight, other]


def test_clip_grad_norm_of_sparse_gradients(backend):
    """Deliberate difference 4: torch raises before 2.14. Doubled indices are summed first."""
    params = sparse_and_dense()
    before = [p.grad.to_dense().clone() for p in params]
    norm = ours.clip_grad_norm_(params, 1.0)
    exact = cases.exact_norm(before, 2.0)
    assert norm.item() == pytest.approx(exact, rel=1e-6)
    for parameter, grad in zip(params, before, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), grad / exact)
    if TORCH >= (2, 14):
        assert norm.item() == pytest.approx(theirs.clip_grad_norm_(sparse_and_dense(), 1.0).item())
    else:
        with pytest.raises(NotImplementedError):
            theirs.clip_grad_norm_(sparse_and_dense(), 1.0)


def test_clip_grad_value_of_sparse_gradients(backend):
    parameter = Parameter(torch.zeros(6))
    parameter.grad = sparse([3.0, 4.0, -9.0, 0.5], [1, 1, 2, 5])
    grad = parameter.grad
    ours.clip_grad_value_([parameter], 5.0)
    assert parameter.grad is grad
    assert parameter.grad.to_dense().tolist() == [0, 5, -5, 0, 0, 0.5]


# Non-finite elements, overflow and underflow


def test_clip_grad_norm_propagates_inf_as_torch(backend):
    grads = [torch.tensor([INF, 1.0, -2.0]), torch.tensor([3.0])]
    assert_same_clipping(grads, 1.0)
    _, b = both(*grads)
    ours.clip_grad_norm_(b, 1.0)
    assert b[0].grad[0].isnan() and b[0].grad[1:].tolist() == [0, -0.0] and b[1].grad == 0


def test_clip_grad_norm_propagates_nan_as_torch(backend):
    grads = [torch.tensor([NAN, 1.0]), torch.tensor([3.0])]
    assert_same_clipping(grads, 1.0)
    assert_same_clipping(grads, INF)


@pytest.mark.parametrize("max_norm", [INF, 1.0])
def test_clip_grad_norm_with_inf_norm_and_inf_limit_matches_torch(backend, max_norm):
    assert_same_clipping([torch.tensor([INF, 1.0])], max_norm)


@by_dtype
@pytest.mark.parametrize("end", [0, 1], ids=["overflow", "underflow"])
def test_total_norm_is_right_where_float32_squares_leave_the_range(backend, dtype, end):
    """Deliberate difference 2: torch gives Inf and silently zeroes the gradients, or gives 0."""
    value = cases.extremes(dtype)[end]
    grads = [cases.filled(dtype, value, 4), cases.filled(dtype, value, 5)]
    norm = ours.clip_grad_norm_(parameters(*grads), INF)
    assert norm.item() == pytest.approx(cases.exact_norm(grads, 2.0), rel=1e-6)
    params = parameters(*grads)
    ours.clip_grad_norm_(params, value / 2)
    clipped = cases.exact_norm(grads_of(params), 2.0)
    assert clipped == pytest.approx(value / 2, rel=0.02 if end == 0 else 1)
    torch_norm = theirs.clip_grad_norm_(parameters(*grads), INF).item()
    if dtype in (torch.float32, torch.bfloat16) or (dtype == torch.float16 and end == 0):
        assert torch_norm == (0.0 if end else INF)


def test_total_norm_of_float64_overflows_as_in_torch(backend):
    grads = [torch.full((10,), 2e200, dtype=torch.float64)]
    assert_same_clipping(grads, 1.0, exact=True)
    one = torch.zeros(10, dtype=torch.float64)
    one[1] = 2e200
    assert_same_clipping([one], 1.0, exact=True)


def test_total_norm_of_a_single_float64_element_overflows(backend):
    """Part of deliberate difference 2: torch does not square where one gradient holds one element."""
    grads = [torch.tensor([2e200], dtype=torch.float64)]
    assert theirs.get_total_norm(grads).item() == 2e200
    assert ours.get_total_norm(grads).item() == INF
    assert theirs.get_total_norm(grads * 2).item() == ours.get_total_norm(grads * 2).item() == INF


def test_clip_grad_value_of_nonfinite_elements_matches_torch(backend):
    grads = [torch.tensor([NAN, INF, -INF, 0.5, -7.0])]
    for value in (1.0, INF, 0.0, NAN, -1.0):
        a, b = both(*grads)
        theirs.clip_grad_value_(a, value)
        ours.clip_grad_value_(b, value)
        torch.testing.assert_close(grads_of(b), grads_of(a), equal_nan=True, rtol=0, atol=0)


# Layout, autograd, devices


@by_dtype
@pytest.mark.parametrize("case", cases.LAYOUTS)
def test_clip_grad_norm_serves_every_memory_layout(backend, case, dtype):
    grads = cases.LAYOUTS[case](dtype)
    a = [_Holder(g) for g in cases.clone(grads)]
    b = [_Holder(g) for g in cases.clone(grads)]
    expected = theirs.clip_grad_norm_(a, 0.5)
    actual = ours.clip_grad_norm_(b, 0.5)
    rtol = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(actual.to(dtype), expected, rtol=rtol, atol=0)
    torch.testing.assert_close([h.grad for h in b], [h.grad for h in a], rtol=rtol, atol=1e-6)


def test_clip_grad_norm_keeps_the_graph_of_a_gradient(backend):
    x = torch.ones(4, requires_grad=True)
    grad = x * 3
    holder = _Holder(grad)
    before = grad.grad_fn
    ours.clip_grad_norm_([holder], 1.0)
    assert holder.grad is grad and grad.grad_fn is before and grad.requires_grad
    assert grad.norm() <= 1


@pytest.mark.parametrize("max_norm", [0.1, INF])
def test_clip_bumps_version_counters_as_torch(backend, max_norm):
    a, b = both(torch.ones(3), torch.ones(2))
    before = [p.grad._version for p in b]
    theirs.clip_grad_norm_(a, max_norm)
    ours.clip_grad_norm_(b, max_norm)
    if backend != "reference":  # which leaves out the multiplication with 1
        assert [p.grad._version for p in b] == [p.grad._version for p in a]
    if max_norm < 1:
        assert all(p.grad._version > v for p, v in zip(b, before, strict=True))


def test_backward_raises_on_a_saved_gradient_that_was_clipped(backend):
    weight = torch.ones(3, requires_grad=True)
    grad = torch.full((3,), 5.0)
    loss = (weight * grad).sum()
    ours.clip_grad_norm_([_Holder(grad)], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_norm_of_meta_gradients_gives_a_meta_norm(foreach):
    params = [Parameter(torch.zeros(3, device="meta"))]
    params[0].grad = torch.zeros(3, device="meta")
    for library in (theirs, ours):
        norm = library.clip_grad_norm_(params, 1.0, foreach=foreach)
        assert norm.device.type == "meta" and norm.shape == () and norm.dtype == torch.float32
        with pytest.raises(RuntimeError, match="can't use the foreach API on meta tensors"):
            library.clip_grad_norm_(params, 1.0, foreach=True)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_foreach_changes_nothing_on_the_cpu(backend, foreach):
    assert_same_clipping([cases.normal(torch.float32, 40)], 0.1, foreach=foreach)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF, 3.0])
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
def test_get_total_norm_and_clip_grads_with_norm_match_torch(backend, dtype, norm_type, total_dtype):
    grads = [cases.normal(dtype, n) for n in (10, 300)]
    a, b = both(*grads)
    expected = theirs.get_total_norm([p.grad for p in a], norm_type)
    actual = ours.get_total_norm([p.grad for p in b], norm_type)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    theirs.clip_grads_with_norm_(a, 0.3, expected.to(total_dtype))
    ours.clip_grads_with_norm_(b, 0.3, expected.to(total_dtype))
    torch.testing.assert_close(grads_of(b), grads_of(a), rtol=1e-6, atol=0)


def test_get_total_norm_and_clip_grads_with_norm_equal_clip_grad_norm(backend):
    a, b = both(cases.normal(torch.float32, 100), cases.normal(torch.bfloat16, 50))
    ours.clip_grad_norm_(a, 0.3)
    ours.clip_grads_with_norm_(b, 0.3, ours.get_total_norm([p.grad for p in b]))
    assert_bitwise_equal(grads_of(b), grads_of(a))


def test_get_total_norm_reads_overlapping_tensors(backend):
    """An expanded gradient has a norm; clipping it raises, in torch too."""
    expanded = torch.full((1,), 2.0).expand(9)
    assert ours.get_total_norm([expanded]).item() == theirs.get_total_norm([expanded]).item() == 6.0
    for library in (theirs, ours):
        with pytest.raises(RuntimeError):
            library.clip_grad_norm_([_Holder(expanded)], 1.0)


def test_signatures_start_with_torchs():
    import inspect

    for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_"):
        expected = inspect.signature(getattr(theirs, name)).parameters.values()
        actual = list(inspect.signature(getattr(ours, name)).parameters.values())
        for mine, torchs in zip(actual, expected, strict=False):
            assert (mine.name, mine.kind, mine.default) == (torchs.name, torchs.kind, torchs.default)
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in actual[len(list(expected)) :])


def test_training_gives_torchs_losses(backend):
    """Twenty steps of a small network, clipped at every one."""

    def losses(clip):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        x, y = torch.randn(64, 8), torch.randn(64, 1)
        history = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            clip(model.parameters(), 0.05)
            optimizer.step()
            history.append(loss.item())
        return history

    assert losses(ours.clip_grad_norm_) == pytest.approx(losses(theirs.clip_grad_norm_), rel=1e-5)


def test_error_if_nonfinite_starts_with_torchs_message(backend):
    for value in (NAN, INF):
        for norm_type in (2.0, 1.0, INF, 0.5):
            params = parameters(torch.tensor([1.0, value]), torch.ones(2))
            before = cases.clone(grads_of(params))
            words = []
            for library in (theirs, ours):
                with pytest.raises(
                    RuntimeError, match=f"The total norm of order {norm_type} for gradients"
                ) as e:
                    library.clip_grad_norm_(params, 1.0, norm_type, error_if_nonfinite=True)
                words.append(str(e.value))
                with pytest.raises(RuntimeError, match=f"The total norm of order {norm_type} for gradients"):
                    library.get_total_norm(grads_of(params), norm_type, error_if_nonfinite=True)
                assert_bitwise_equal(grads_of(params), before)
            assert math.isnan(value) == ("nan" in words[1].split(";")[0])
