# SPDX-License-Identifier: BSD-3-Clause
"""A gradient of more than 2^31 elements: every index must be 64 bits wide."""

import pytest
import torch

import fastclip


@pytest.mark.slow
def test_get_total_norm_and_clip_of_more_than_2_to_the_31_elements(native_only):
    grad = torch.zeros(2**31 + 12345, dtype=torch.bfloat16)
    grad[0], grad[2**31 + 1], grad[-1] = 4.0, float("nan"), 3.0
    assert fastclip.get_total_norm([grad]).isnan()
    grad[2**31 + 1] = 0.0
    assert fastclip.get_total_norm([grad]).item() == 5.0
    native_only.clip_([grad], 2.5, 2.0, "propagate")
    assert (grad[0].item(), grad[-1].item()) == (2.0, 1.5)
    native_only.clamp_([grad], 1.75)
    assert (grad[0].item(), grad[-1].item(), grad.count_nonzero().item()) == (1.75, 1.5, 2)
