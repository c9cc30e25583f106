# SPDX-License-Identifier: BSD-3-Clause
"""Lists that no single backend call serves: dense, complex and sparse gradients, several devices."""

import pytest
import torch

import fastclip
from fastclip import dispatch
from fastclip.backends import native, reference
from helpers import cases
from helpers.cases import INF, NAN, assert_bitwise_equal


def mixed_kinds() -> list[torch.Tensor]:
    torch.manual_seed(8)
    sparse = torch.sparse_coo_tensor([[0, 3]], torch.tensor([3.0, -4.0]), (6,), check_invariants=True)
    half = torch.randn(7).bfloat16()
    return [torch.randn(5), torch.randn(4, dtype=torch.complex64), sparse.coalesce(), half]


def dense(grads: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.view_as_real(g) if g.is_complex() else g.to_dense() if g.is_sparse else g for g in grads]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 0, 3), (1, 3, 2, 0)])
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_run_clip_serves_dense_complex_and_sparse_in_one_list(backend, order, norm_type):
    grads = [mixed_kinds()[i] for i in order]
    before = [g.clone() for g in dense(grads)]
    largest = max(g.abs().max().item() for g in grads if not g.is_sparse)
    expected = cases.exact_norm(before, 2.0) if norm_type == 2 else max(4.0, largest)
    summary, stats = dispatch.run_clip(grads, 0.5, norm_type, "propagate")
    assert summary[0, 0].item() == pytest.approx(expected, rel=1e-6)
    for grad, old in zip(dense(grads), before, strict=True):
        torch.testing.assert_close(grad, (old * summary[0, 1]).to(old.dtype))
    each = reference.totals(stats, norm_type, range(4)).tolist()
    at = order.index(2)
    assert each[at] == pytest.approx(5.0 if norm_type == 2 else 4.0)


def test_run_clip_applies_the_nonfinite_modes_to_a_mixed_list(backend):
    def build():
        grads = mixed_kinds()
        grads[1][2] = complex(NAN, 1)
        grads[3][0] = INF
        return grads

    grads = build()
    summary, stats = dispatch.run_clip(grads, 0.5, 2.0, "skip")
    assert summary[0, 2] == 1
    assert stats[:, 1].tolist() == [0, 1, 0, 0] and stats[:, 2].tolist() == [0, 0, 0, 1]
    torch.testing.assert_close(dense(grads), dense(build()), equal_nan=True, rtol=0, atol=0)
    dispatch.run_clip(grads, 0.5, 2.0, "zero")
    assert cases.exact_norm(dense(grads), 2.0) == pytest.approx(0.5, rel=1e-2)


def test_dispatch_refuses_before_any_part_is_written(backend):
    """The complex gradient comes first, the one that overlaps itself in another part."""
    grads = [torch.ones(3, dtype=torch.complex64), torch.ones(5), torch.ones(1).expand(4)]
    for call in (
        lambda: dispatch.run_clip(grads, 0.1, 2.0, "propagate"),
        lambda: dispatch.run_scale(grads, torch.tensor(0.5)),
    ):
        with pytest.raises(RuntimeError, match="overlaps itself"):
            call()
    assert all((g == 1).all() for g in grads)
    grads = [torch.ones(5), torch.ones(1, dtype=torch.complex64).expand(4)]
    with pytest.raises(RuntimeError, match="overlaps itself"):
        dispatch.run_clip(grads, 0.1, 2.0, "propagate")
    assert all((g == 1).all() for g in grads)


def test_run_clamp_serves_a_mixed_list(backend):
    grads = [torch.tensor([3.0, -3.0]), torch.sparse_coo_tensor([[1]], [5.0], (3,), check_invariants=True)]
    dispatch.run_clamp(grads, 1.0)
    assert grads[0].tolist() == [1, -1] and grads[1].to_dense().tolist() == [0, 1, 0]
    grads = [torch.ones(2), torch.ones(2, dtype=torch.complex64)]
    with pytest.raises(NotImplementedError, match="gradient 1 with shape"):
        dispatch.run_clamp(grads, 0.5)
    assert (grads[0] == 1).all()


class OnAnotherDevice(torch.Tensor):
    """A CPU tensor that says it lies elsewhere, so that the way over several devices can be walked here."""

    @property
    def device(self):
        return torch.device("cpu:1")


def test_run_clip_combines_several_devices(native_only, monkeypatch):
    """No second device is needed to see parts being put together; with one, see the tests marked gpu."""
    calls = []

    def elsewhere(device, norm_type=2.0):
        calls.append(device)
        return reference if device == torch.device("cpu:1") else native

    monkeypatch.setattr(dispatch, "select", elsewhere)
    plain = [torch.randn(10), torch.randn(2000), torch.randn(30), torch.randn(4)]
    before = cases.clone(plain)
    grads = [plain[0].as_subclass(OnAnotherDevice), plain[1], plain[2].as_subclass(OnAnotherDevice), plain[3]]
    summary, stats = dispatch.run_clip(grads, 0.3, 2.0, "propagate", [0, 1, 1, 0])
    assert {str(d) for d in calls} == {"cpu", "cpu:1"}
    expected, expected_stats = native.clip_(before, 0.3, 2.0, "propagate", [0, 1, 1, 0])
    for actual, wanted in zip([summary, stats, *grads], [expected, expected_stats, *before], strict=True):
        torch.testing.assert_close(actual.as_subclass(torch.Tensor), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_clip_grad_norm_combines_cpu_and_gpu(first):
    second = "cuda" if first == "cpu" else "cpu"
    grads = [torch.randn(100, device=first), torch.randn(3000, device=second), torch.randn(5, device=first)]
    before = [g.cpu() for g in grads]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    norm = fastclip.clip_grad_norm_(parameters, 0.5)
    assert norm.device.type == first and norm.item() == pytest.approx(cases.exact_norm(before, 2.0), rel=1e-6)
    assert cases.exact_norm([g.cpu() for g in grads], 2.0) == pytest.approx(0.5, rel=1e-5)


def test_mixed_gradients_refuse_dtensors_while_compiling():
    """Until sharded gradients are reduced, a local norm must not pass for the global one."""
    if not torch.distributed.is_available():
        pytest.skip("torch without torch.distributed")

    class DTensor(torch.Tensor):
        pass

    grads = [torch.ones(3), torch.ones(2).as_subclass(DTensor)]
    with pytest.raises(NotImplementedError, match="DTensor as gradient 1"):
        dispatch.MixedGradients(grads, 2.0)


def test_run_clip_gives_the_same_bits_whole_and_in_parts(native_only):
    """The way by parts, forced by one complex zero, gives the bits of the single call."""
    plain = [torch.randn(3 * cases.CHUNK), torch.randn(9)]
    whole, parts = cases.clone(plain), cases.clone(plain)
    dispatch.run_clip(whole, 0.5, 2.0, "propagate")
    dispatch.run_clip([*parts, torch.zeros(1, dtype=torch.complex64)], 0.5, 2.0, "propagate")
    assert_bitwise_equal(parts, whole)
