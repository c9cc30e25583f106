# SPDX-License-Identifier: BSD-3-Clause
"""What bad input gets: an error at once, before any gradient has changed, that says what was wanted and got.

Dtypes and what is not a parameter are in test_torch_parity.py, modes and groups in test_stats.py, the ops'
own refusals in test_ops.py.
"""

import pytest
import torch

import fastclip
from helpers import cases
from helpers.cases import assert_bitwise_equal

CALLS = {
    "clip_grad_norm_": lambda p: fastclip.clip_grad_norm_(p, 0.1),
    "clip_grad_norm_ p=3": lambda p: fastclip.clip_grad_norm_(p, 0.1, 3.0),
    "clip_grad_value_": lambda p: fastclip.clip_grad_value_(p, 0.1),
    "clip_grads_with_norm_": lambda p: fastclip.clip_grads_with_norm_(p, 0.1, torch.tensor(9.0)),
    "clip_": lambda p: fastclip.clip_(p, 0.1),
}


class Holder(torch.Tensor):
    """A tensor that takes any gradient, however unlike itself."""

    grad = None

    def __new__(cls, grad):
        holder = torch.zeros(1).as_subclass(cls)
        holder.grad = grad
        return holder


def overlapping() -> dict[str, list[torch.Tensor]]:
    memory = torch.ones(100)
    return {
        "expanded": [torch.ones(3), torch.ones(1).expand(5)],
        "partly shared": [memory[:60], torch.ones(2), memory[59:]],
        "partly shared columns": [memory.view(10, 10)[:, :5], memory.view(10, 10)[:, 4:]],
    }


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", overlapping())
def test_clip_raises_on_overlapping_memory_before_any_write(backend, call, case):
    grads = overlapping()[case]
    with pytest.raises(RuntimeError, match="overlaps itself|share part of their memory") as error:
        CALLS[call]([Holder(g) for g in grads])
    assert "1" in str(error.value) or "2" in str(error.value)
    assert all((g == 1).all() for g in grads)


@pytest.mark.parametrize("call", CALLS)
def test_clip_accepts_views_that_do_not_overlap(backend, call):
    memory = torch.ones(10, 10)
    grads = [memory[:, :5], memory[:, 5:]]
    CALLS[call]([Holder(g) for g in grads])
    assert (memory < 1).all()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("bad", [None, 3, "weights"])
def test_clip_raises_on_what_is_not_a_tensor(call, bad):
    with pytest.raises(TypeError):
        CALLS[call](bad)
    with pytest.raises(TypeError, match="at index 1"):
        CALLS[call]([torch.ones(2), bad])


@pytest.mark.parametrize("bad", [None, 1.0, "2"])
def test_clip_raises_on_a_gradient_that_is_not_a_tensor(backend, bad):
    with pytest.raises(TypeError, match="gradients to be tensors, but got .* as gradient 1"):
        fastclip.get_total_norm([torch.ones(2), bad])
    with pytest.raises(TypeError, match="gradients to be tensors, but got .* as gradient 0"):
        fastclip.get_total_norm([bad])


@pytest.mark.parametrize(
    "total_norm, error", [(5.0, TypeError), (None, TypeError), (torch.ones(2), ValueError)]
)
def test_clip_grads_with_norm_raises_on_a_bad_total_norm(total_norm, error):
    with pytest.raises(error, match="total_norm"):
        fastclip.clip_grads_with_norm_([Holder(torch.ones(2))], 1.0, total_norm)


@pytest.mark.parametrize("max_norm", [torch.ones(2), torch.ones(0)])
def test_clip_raises_on_max_norm_with_several_elements(backend, max_norm):
    holder = Holder(torch.ones(2))
    for call in (
        lambda: fastclip.clip_grad_norm_([holder], max_norm),
        lambda: fastclip.clip_([holder], max_norm),
        lambda: fastclip.clip_grads_with_norm_([holder], max_norm, torch.tensor(2.0)),
    ):
        with pytest.raises(ValueError, match="max_norm to have one element, but got shape"):
            call()
    assert (holder.grad == 1).all()


@pytest.mark.parametrize("value", ["abc", None, [1.0], object()])
def test_clip_raises_on_a_limit_that_is_not_a_number(value):
    holder = Holder(torch.ones(2))
    with pytest.raises((TypeError, ValueError)):
        fastclip.clip_grad_value_([holder], value)
    with pytest.raises((TypeError, ValueError)):
        fastclip.clip_grad_norm_([holder], value)
    assert (holder.grad == 1).all()


def test_clip_raises_on_process_group_without_torch_distributed():
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(
        RuntimeError, match="expected torch.distributed to be initialized, since process_group"
    ):
        fastclip.clip_grad_norm_([p], 1.0, process_group=object())


def test_clip_raises_on_csr_gradients(backend):
    dense = torch.eye(3)
    with pytest.raises(TypeError, match="strided or sparse COO gradients, but got layout torch.sparse_csr"):
        fastclip.get_total_norm([torch.ones(2), dense.to_sparse_csr()])


def test_clip_serves_inference_tensors_as_torch(backend):
    """They have no version counter to bump. As in torch, they may be written where they were made."""
    with torch.inference_mode():
        grad = torch.full((3,), 5.0)
        fastclip.clip_grad_norm_([Holder(grad)], 1.0)
        assert grad.norm() <= 1
        fastclip.clip_grad_value_([Holder(grad)], 0.1)
        assert grad.max() <= 0.1


def test_clip_changes_nothing_when_it_raises(backend):
    """The very next call with good gradients works as ever."""
    grads = [torch.ones(4), torch.ones(1).expand(3)]
    before = cases.clone(grads[:1])
    with pytest.raises(RuntimeError):
        fastclip.clip_grad_norm_([Holder(g) for g in grads], 0.1)
    assert_bitwise_equal(grads[:1], before)
    assert fastclip.clip_grad_norm_([Holder(grads[0])], 0.1).item() == 2.0
