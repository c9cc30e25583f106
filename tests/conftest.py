# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for every test: a seed, poisoned memory, and a choice of backend and instruction set."""

from pathlib import Path

import pytest
import torch

import fastclip
from fastclip import backends
from fastclip.backends import native
from helpers import shim
from helpers.available import BACKENDS, NARROW, reason_against_the_interpreter
from helpers.cases import SEED

# Files whose tests take longest, to begin with.
LONGEST = {
    "test_cuda_kernels.py",
    "test_distributed.py",
    "test_oldest_versions.py",
    "test_packaging.py",
    "test_random.py",
}
ROOM_OF_BACKENDS = Path(__file__).parent / "backends"


def pytest_report_header() -> list[str]:
    """Which torch and which backends a run has covered; a missing one must not go unnoticed."""
    return [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, backends: {', '.join(BACKENDS)}",
        f"native: {native.unavailable(torch.device('cpu')) or 'in use'}",
        f"CUDA kernels on the CPU: {shim.reason_against() or 'in use'}",
        f"Triton's interpreter: {reason_against_the_interpreter() or 'in use'}",
    ]


def is_slow_in_the_interpreter(item: pytest.Item) -> bool:
    """Whether a test is left to `make test-full` because Triton's interpreter takes milliseconds a gradient.

    `make test` has the value grid in bfloat16 with the 2-norm, and all else that is in tests/backends; there
    test_grad_stats_of_mixed_dtypes has every dtype and norm. Tests above the backends run on the others.
    """
    parameters = (getattr(item, "callspec", None) and item.callspec.params) or {}
    if parameters.get("backend") != "triton":
        return False
    if not item.path.is_relative_to(ROOM_OF_BACKENDS):
        return True
    of_another_dtype = parameters.get("dtype", torch.bfloat16) != torch.bfloat16
    return of_another_dtype or ("dtype" in parameters and parameters.get("norm_type", 2.0) != 2.0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow in Triton's interpreter, and begin with the longest files."""
    for item in items:
        if is_slow_in_the_interpreter(item):
            item.add_marker(pytest.mark.slow)
    # Stable, so that each file keeps its own order: no process then waits long for the last one.
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu says why it did not run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seed_and_poison():
    """Fixed seeds; fresh memory filled with NaN, also what C++ allocates, so that no read of it passes."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def backends_in_turn() -> list:
    """Return the backends; `make test` runs the native one on the widest instruction set only.

    The others give the same bits on the whole case list: tests/backends/test_instruction_sets.py.
    """
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in NARROW)) for name in BACKENDS]


@pytest.fixture(params=backends_in_turn())
def backend(request, monkeypatch) -> str:
    """Each backend in turn; the native one once for each instruction set, and with the CUDA kernels."""
    if request.param == "cuda_on_cpu":
        monkeypatch.setitem(backends._MODULES, "native", shim.backend())
        monkeypatch.setattr(backends, "_chosen", {})
        shim.configure()
        with fastclip.backends.use("native"):
            yield request.param
        return
    name, _, capability = request.param.partition("-")
    if capability:
        monkeypatch.setenv("FASTCLIP_CPU_CAPABILITY", capability)
    with fastclip.backends.use(name):
        yield request.param


@pytest.fixture
def native_only():
    """Skips a test of the compiled library where it is absent, with the reason."""
    if reason := native.unavailable(torch.device("cpu")):
        pytest.skip(f"no native library: {reason}")
    with fastclip.backends.use("native"):
        yield native


@pytest.fixture
def threads():
    """Sets the number of threads and puts it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
