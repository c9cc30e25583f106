# SPDX-License-Identifier: BSD-3-Clause
"""A gradient of more than 2^31 elements: every index must be 64 bits wide."""

import pytest
import torch

import fastclip


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(native_only):
    size = 2**31 + 12345
    grad = torch.zeros(size, dtype=torch.bfloat16)
    last, middle = size - 1, 2**31 + 1
    grad[last], grad[middle], grad[0] = 3.0, float("nan"), 4.0
    parameter = torch.nn.Parameter(torch.empty(0))
    holder = type("Holder", (), {"grad": grad})()
    stats = fastclip.grad_stats([("huge", parameter)])
    assert stats.names == []
    assert fastclip.get_total_norm([grad]).isnan()
    grad[middle] = 0.0
    assert fastclip.clip_grad_norm_([holder], 2.5).item() == 5.0
    assert (grad[0].item(), grad[last].item()) == (2.0, 1.5)
    fastclip.clip_grad_value_([holder], 1.75)
    assert (grad[0].item(), grad[last].item(), grad.count_nonzero().item()) == (1.75, 1.5, 2)
