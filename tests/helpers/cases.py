# SPDX-License-Identifier: BSD-3-Clause
"""Named lists of gradients: the edges of sizes, layouts and values that every backend is held against."""

import functools
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CHUNK = 32768  # csrc/cpu/chunks.h, kChunkSize; test_layout.py holds them equal
NAN, INF = math.nan, math.inf
NORM_TYPES = [1.0, 2.0, INF]
CLAMP_LIMITS = [0.0, 0.1, 1e3, INF]
SEED = 20261130  # what every test, and every case within a test, begins with


def dtype_name(dtype: torch.dtype) -> str:
    """float32, for the names of tests."""
    return str(dtype).removeprefix("torch.")


by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    """Normally distributed elements."""
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def filled(dtype: torch.dtype, value: float, size: int) -> Tensor:
    """One value everywhere."""
    return torch.full((size,), value, dtype=torch.float64).to(dtype)


def with_values(grad: Tensor, **at: float) -> Tensor:
    """The gradient with elements replaced: with_values(g, _0=nan, _7=inf)."""
    flat = grad.view(-1)
    for position, value in at.items():
        flat[int(position.removeprefix("_"))] = value
    return grad


def misaligned(dtype: torch.dtype, offset: int, size: int) -> Tensor:
    """A view that begins `offset` elements into its memory."""
    return normal(dtype, size + offset)[offset:]


def extremes(dtype: torch.dtype) -> tuple[float, float]:
    """A large and a small number whose squares leave the range of float32, or of the dtype itself."""
    return {torch.float16: (6e4, 6e-8), torch.float64: (1e150, 1e-150)}.get(dtype, (1e20, 1e-25))


Case = Callable[[torch.dtype], list[Tensor]]

# Sizes round those of a vector, a flush of the lanes and a chunk; empty gradients in every position.
SIZES: dict[str, Case] = {
    "one element": lambda t: [normal(t, 1)],
    "scalar": lambda t: [normal(t)],
    "one empty": lambda t: [normal(t, 0)],
    "empty first": lambda t: [normal(t, 0), normal(t, 5)],
    "empty in the middle": lambda t: [normal(t, 5), normal(t, 3, 0), normal(t, 7)],
    "empty last": lambda t: [normal(t, 5), normal(t, 0)],
    "empty around a chunk": lambda t: [normal(t, 0), normal(t, CHUNK), normal(t, 0), normal(t, 0)],
    "vector edges": lambda t: [normal(t, n) for n in (1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65)],
    "flush edges": lambda t: [normal(t, n) for n in (1023, 1024, 1025, 2048, 4097)],
    "chunk edges": lambda t: [normal(t, CHUNK + d) for d in (-1, 0, 1)],
    "several chunks": lambda t: [normal(t, 3 * CHUNK + 5), normal(t, 3), normal(t, 2 * CHUNK)],
    "many": lambda t: [normal(t, 1 + i % 70) for i in range(1000)],
}

# Memory that is not one run from an aligned address.
LAYOUTS: dict[str, Case] = {
    "misaligned": lambda t: [misaligned(t, offset, 100) for offset in range(1, 20)],
    "misaligned chunk": lambda t: [misaligned(t, 3, CHUNK + 1)],
    "transposed": lambda t: [normal(t, 40, 30).t(), normal(t, 4, 5, 6).permute(2, 0, 1)],
    "channels_last": lambda t: [normal(t, 3, 4, 5, 6).to(memory_format=torch.channels_last)],
    "columns": lambda t: [normal(t, 50, 20)[:, ::2], normal(t, 50, 20)[:, 3:11]],
    "rows": lambda t: [normal(t, 50, 20)[::3]],
    "gaps over chunks": lambda t: [normal(t, 700, 200)[:, 1:150:2]],
    "gaps in three dimensions": lambda t: [normal(t, 9, 8, 14)[1:7:2, ::3, 2:13:5].transpose(0, 1)],
    "fused columns": lambda t: list(normal(t, 30, 48).chunk(3, 1)),
    "interleaved": lambda t: [g := normal(t, 600), g[::2], g[1::2]][1:],
}

# Values at the ends of the range, and zeros.
VALUES: dict[str, Case] = {
    "zeros": lambda t: [filled(t, 0.0, 100), filled(t, 0.0, CHUNK + 3)],
    "negative zeros": lambda t: [filled(t, -0.0, 100)],
    "zeros but one": lambda t: [with_values(filled(t, 0.0, CHUNK), _31=0.5)],
    "constant": lambda t: [filled(t, 0.1, 2 * CHUNK)],
    "large": lambda t: [filled(t, extremes(t)[0], 100), normal(t, 10)],
    "small": lambda t: [filled(t, extremes(t)[1], 1000)],
    "small among zeros": lambda t: [with_values(filled(t, 0.0, 3000), _77=extremes(t)[1])],
    "small beside large": lambda t: [filled(t, extremes(t)[1], 500), filled(t, 3.0, 5)],
    "subnormal": lambda t: [filled(t, torch.finfo(t).tiny / 4, 200)],
    "largest": lambda t: [filled(t, torch.finfo(t).max if t is not torch.float64 else 1e153, 1)],
}

# NaN and Inf in every place: first, last, alone, all, both, in one chunk of several, under gaps.
NONFINITE: dict[str, Case] = {
    "nan first": lambda t: [with_values(normal(t, 100), _0=NAN), normal(t, 9)],
    "nan last": lambda t: [normal(t, 9), with_values(normal(t, 100), _99=NAN)],
    "nan only": lambda t: [filled(t, NAN, 1)],
    "nan all": lambda t: [filled(t, NAN, CHUNK + 2), normal(t, 4)],
    "inf first": lambda t: [with_values(normal(t, 100), _0=-INF)],
    "inf last": lambda t: [with_values(normal(t, CHUNK + 1), **{f"_{CHUNK}": INF})],
    "inf only": lambda t: [normal(t, 5), filled(t, INF, 1)],
    "inf all": lambda t: [filled(t, -INF, 77)],
    "nan and inf": lambda t: [with_values(normal(t, 3 * CHUNK), _5=NAN, _40000=INF, _40001=-INF, _90000=NAN)],
    "inf and nan apart": lambda t: [with_values(normal(t, 50), _3=INF), with_values(normal(t, 60), _8=NAN)],
    "nan under gaps": lambda t: [with_values(normal(t, 900), _0=NAN, _2=INF, _3=NAN).view(30, 30)[:, ::2]],
    "large and inf": lambda t: [with_values(filled(t, extremes(t)[0], 64), _9=INF)],
}

FINITE: dict[str, Case] = {**SIZES, **LAYOUTS, **VALUES}
ALL: dict[str, Case] = {**FINITE, **NONFINITE}


def each_case(table: dict[str, Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test with an argument `case` to run all cases of a table in one item of pytest.

    An item of its own for each case would cost more than most cases do. Each begins with the seed of a test.
    All of them run; the error names those that failed and is raised from the first.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**arguments: object) -> None:
            failed: dict[str, Exception] = {}
            for case in table:
                if case == "many" and arguments.get("backend") == "triton":
                    continue  # milliseconds for each gradient; test_triton.py has a test of thousands
                torch.manual_seed(SEED)
                try:
                    test(case=case, **arguments)
                except Exception as error:
                    failed[case] = error
            if failed:
                first, error = next(iter(failed.items()))
                message = f"{len(failed)} of {len(table)} cases failed: {list(failed)}; {first!r}: {error}"
                raise AssertionError(message) from error

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name != "case"]
        run_all.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run_all

    return decorate


def random_factors(count: int) -> Tensor:
    """Return a factor for each gradient, every other one 1."""
    factors = torch.rand(count, dtype=torch.float64) + 0.1
    factors[::2] = 1.0
    return factors


def mixed(dtypes: list[torch.dtype] = DTYPES) -> list[Tensor]:
    """All dtypes in one list, small and large, with an empty one among them."""
    sizes = (3, CHUNK + 1, 0, 100, 1, 2 * CHUNK)
    return [normal(dtype, size) for size in sizes for dtype in dtypes]


def clone(grads: list[Tensor], device: str | torch.device = "cpu") -> list[Tensor]:
    """Copies with the same strides. Views that share one memory become views of one copied memory."""
    copied: dict[int, Tensor] = {}
    clones = []
    for grad in grads:
        storage = grad.untyped_storage()
        if storage._cdata not in copied:
            flat = torch.empty(0, dtype=grad.dtype, device=grad.device).set_(storage)
            copied[storage._cdata] = flat.clone().to(device)
        base = copied[storage._cdata]
        clones.append(base.as_strided(grad.shape, grad.stride(), grad.storage_offset()))
    return clones


def exact_norm(grads: list[Tensor], norm_type: float) -> float:
    """The norm in float64, scaled by the largest element so that nothing over- or underflows.

    float64 gradients are not scaled: their squares may leave the range, as in torch.
    """
    values = torch.cat([g.to(torch.float64).reshape(-1) for g in grads])
    largest = values.abs().max().item() if values.numel() else 0.0
    if norm_type == INF or largest == 0 or not math.isfinite(largest):
        return largest
    if any(g.dtype == torch.float64 for g in grads):
        return torch.linalg.vector_norm(values, norm_type).item()
    return largest * torch.linalg.vector_norm(values / largest, norm_type).item()


def bits(tensor: Tensor) -> Tensor:
    """Return the memory of the elements as integers: NaN then equals NaN, and 0 differs from -0."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(whole).reshape(-1)


def without_nan_payloads(tensors: list[Tensor]) -> list[Tensor]:
    """Replace each NaN by the same one: sign and payload of a NaN are the processor's affair."""
    return [torch.where(t.isnan(), torch.nan, t) for t in tensors]


def assert_bitwise_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    """Raise AssertionError with the first element whose memory differs."""
    assert len(actual) == len(expected)
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, f"tensor {index}"
        different = bits(a) != bits(b)
        if different.any():
            at = int(different.nonzero()[0])
            x, y = a.reshape(-1)[at].item(), b.reshape(-1)[at].item()
            raise AssertionError(f"tensor {index}, element {at} of {a.numel()}: {x!r} is not {y!r}")
