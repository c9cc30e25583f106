# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures for every test: a seed, poisoned memory, and a choice of backend and instruction set."""

import pytest
import torch

import fastclip
from fastclip import backends
from fastclip.backends import native
from helpers import shim
from helpers.available import BACKENDS, reason_against_the_interpreter

# Files whose tests take minutes, to begin with.
LONGEST = {
    "test_cuda_kernels.py",
    "test_distributed.py",
    "test_oldest_versions.py",
    "test_packaging.py",
    "test_random.py",
}


def pytest_report_header() -> list[str]:
    """Which torch and which backends a run has covered; a missing one must not go unnoticed."""
    return [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, backends: {', '.join(BACKENDS)}",
        f"native: {native.unavailable(torch.device('cpu')) or 'in use'}",
        f"CUDA kernels on the CPU: {shim.reason_against() or 'in use'}",
        f"Triton's interpreter: {reason_against_the_interpreter() or 'in use'}",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out lists of thousands of gradients for Triton's interpreter, which takes milliseconds for each,
    but for one: test_triton.py has a test of its own."""
    kept, left_out = [], []
    for item in items:
        parameters = (getattr(item, "callspec", None) and item.callspec.params) or {}
        slow = parameters.get("backend") == "triton" and parameters.get("case") == "many"
        (left_out if slow else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept
    # Stable, so that each file keeps its own order: no process then waits long for the last one.
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked gpu says why it did not run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def seed_and_poison():
    """Fixed seeds; fresh memory filled with NaN, also what C++ allocates, so that no read of it passes."""
    torch.manual_seed(20261130)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=BACKENDS)
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
