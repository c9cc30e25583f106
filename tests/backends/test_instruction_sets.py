# SPDX-License-Identifier: BSD-3-Clause
"""The native backend gives the same bits on every instruction set, thread count and run.

The value grid of test_backends.py runs on the widest instruction set; what is equal to it here needs no grid.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastclip.backends import native
from helpers import cases
from helpers.available import USABLE, WIDEST
from helpers.cases import (
    ALL,
    CLAMP_LIMITS,
    DTYPES,
    INF,
    NORM_TYPES,
    assert_bitwise_equal,
    by_dtype,
    clone,
    dtype_name,
    each_case,
    random_factors,
    without_nan_payloads,
)


def grad_stats(grads: list[Tensor]) -> list[Tensor]:
    ways = [(norm_type, finite_only) for norm_type in NORM_TYPES for finite_only in (False, True)]
    return [result for way in ways for result in native.grad_stats(grads, *way)]


def clip(grads: list[Tensor]) -> list[Tensor]:
    results: list[Tensor] = []
    for nonfinite in ("propagate", "zero", "skip"):
        for max_norm in (0.5, 1e-3, INF):
            clipped = clone(grads)
            results += [*native.clip_(clipped, max_norm, 2.0, nonfinite), *clipped]
    return results


def scale(grads: list[Tensor]) -> list[Tensor]:
    factors = random_factors(len(grads))
    results: list[Tensor] = []
    for finite_only in (False, True):
        scaled = clone(grads)
        native.scale_(scaled, factors, finite_only)
        results += scaled
    return results


def clamp(grads: list[Tensor]) -> list[Tensor]:
    results: list[Tensor] = []
    for limit in CLAMP_LIMITS:
        clamped = clone(grads)
        native.clamp_(clamped, limit)
        results += clamped
    return results


OPERATIONS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "grad_stats": grad_stats,
    "clip_": clip,
    "scale_": scale,
    "clamp_": clamp,
}


@by_dtype
@pytest.mark.parametrize("operation", OPERATIONS)
@each_case(ALL)
def test_native_gives_the_bits_of_the_widest_instruction_set(
    native_only, monkeypatch, operation, case, dtype
):
    grads = ALL[case](dtype)
    results = {}
    for capability in USABLE:
        monkeypatch.setenv("FASTCLIP_CPU_CAPABILITY", capability)
        torch.manual_seed(1)
        results[capability] = without_nan_payloads(OPERATIONS[operation](grads))
    for capability in USABLE:
        assert_bitwise_equal(results[capability], results[WIDEST])


def all_results(grads: list[Tensor]) -> list[Tensor]:
    clipped = clone(grads)
    return [*native.grad_stats(grads, 2.0), *native.clip_(clipped, 0.1, 2.0, "propagate"), *clipped]


@pytest.mark.parametrize("dtype", [*DTYPES, "mixed"], ids=lambda d: d if d == "mixed" else dtype_name(d))
def test_native_gives_the_same_bits_for_every_run_and_thread_count(native_only, threads, monkeypatch, dtype):
    # Sizes that give threads shares of their own, and tails in every chunk.
    sizes = (5, 12 * cases.CHUNK + 17, 900, 3 * cases.CHUNK - 1, 64)
    grads = cases.mixed() if dtype == "mixed" else [cases.normal(dtype, n) for n in sizes]
    expected = all_results(grads)
    for capability in USABLE:
        monkeypatch.setenv("FASTCLIP_CPU_CAPABILITY", capability)
        for count in (1, 2, 4, 4, 3):
            threads(count)
            assert_bitwise_equal(all_results(grads), expected)
