# SPDX-License-Identifier: BSD-3-Clause
"""patch_torch: what it reaches, and that it is undone exactly."""

import pytest
import torch
from torch.nn.utils import clip_grad, clip_grad_norm_  # imported by name before any patch, on purpose

import fastclip

PUBLIC = ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"]
PRIVATE = ["_get_total_norm", "_clip_grads_with_norm_"]


def snapshot() -> dict:
    return {
        **{("utils", n): getattr(torch.nn.utils, n) for n in PUBLIC},
        **{("clip_grad", n): getattr(clip_grad, n, None) for n in PUBLIC + PRIVATE},
    }


@pytest.fixture(autouse=True)
def unpatched():
    before = snapshot()
    yield
    assert snapshot() == before


def test_patch_torch_in_a_with_block():
    before = snapshot()
    with fastclip.patch_torch():
        for name in PUBLIC:
            assert getattr(torch.nn.utils, name) is getattr(fastclip, name)
            if hasattr(clip_grad, name):
                assert getattr(clip_grad, name) is getattr(fastclip, name)
    assert snapshot() == before


def test_patch_torch_is_undone_after_an_error():
    before = snapshot()
    with pytest.raises(KeyError), fastclip.patch_torch():
        raise KeyError
    assert snapshot() == before


def test_patch_torch_lasts_until_undo():
    before = snapshot()
    patch = fastclip.patch_torch()
    assert torch.nn.utils.clip_grad_norm_ is fastclip.clip_grad_norm_
    patch.undo()
    patch.undo()
    assert snapshot() == before


def test_nested_patches_undo_their_own_changes():
    before = snapshot()
    with fastclip.patch_torch():
        with fastclip.patch_torch():
            pass
        assert torch.nn.utils.clip_grad_norm_ is fastclip.clip_grad_norm_
    assert snapshot() == before


def test_patch_torch_reaches_clip_grad_norm_imported_by_name(backend):
    """1e20 tells them apart: torch's own norm of it is Inf."""
    parameter = torch.nn.Parameter(torch.zeros(4))

    def norm() -> float:
        parameter.grad = torch.full((4,), 1e20)
        return clip_grad_norm_([parameter], 1e20).item()

    assert norm() == float("inf")
    with fastclip.patch_torch():
        assert norm() == pytest.approx(2e20)
        assert parameter.grad.norm(dtype=torch.float64).item() == pytest.approx(1e20)
    assert norm() == float("inf")


def test_training_code_runs_under_patch_torch(backend):
    model = torch.nn.Linear(3, 2)
    with fastclip.patch_torch():
        model(torch.ones(1, 3)).sum().backward()
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert max(p.grad.abs().max() for p in model.parameters()) <= 0.1
