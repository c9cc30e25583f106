# SPDX-License-Identifier: BSD-3-Clause
"""What the compiler made of the CUDA kernels, for every GPU that the library was built for."""

import subprocess
import sys

import pytest
import torch

from benchmarks import gpu_bound, sass
from fastclip.backends import libraries

REGISTERS = 65536  # of a multiprocessor
RESIDENT_THREADS = {75: 1024, 86: 1536, 87: 1536, 89: 1536, 120: 1536, 121: 1536}  # 2048 elsewhere
BLOCK = 256
KERNELS = {"statistics, norm 1", "statistics, norm 2", "statistics, norm inf", "scale", "clamp"}


def needs_library_and_tools() -> None:
    if not libraries.CUDA_LIBRARY.exists():
        pytest.skip(f"no CUDA library: {libraries.build_report()}")
    if sass.find_tools() is None:
        pytest.skip("no cuobjdump and nvdisasm: neither a CUDA toolkit nor Triton is installed")


@pytest.fixture(scope="module")
def resources():
    needs_library_and_tools()
    return sass.resources(libraries.CUDA_LIBRARY)


def test_cuda_library_has_every_kernel_for_every_architecture(resources):
    architectures = {architecture for architecture, _ in resources}
    assert architectures and set(resources) == {(a, k) for a in architectures for k in KERNELS}


def test_cuda_kernels_spill_no_registers(resources):
    """No stack and no local memory: each would be traffic that nobody asked for."""
    assert not {key: r for key, r in resources.items() if r.stack or r.local}


def test_cuda_kernels_registers_allow_full_occupancy(resources):
    for (architecture, kernel), found in resources.items():
        resident = RESIDENT_THREADS.get(architecture, 2048)
        rounded = -(-found.registers // 8) * 8  # registers are given out in eights
        assert rounded * resident <= REGISTERS, f"{kernel} for sm_{architecture}: {found.registers} registers"
        assert found.shared * (resident // BLOCK) <= 32 << 10


def test_cuda_hot_loops_load_16_bytes_at_a_time(resources):
    """Four at once in the statistics and where nothing is zeroed, at least two elsewhere; in every dtype."""
    for architecture in {architecture for architecture, _ in resources}:
        loops = sass.hot_loops(libraries.CUDA_LIBRARY, architecture)
        for kernel in KERNELS:
            own = [loop for loop in loops if loop.kernel == kernel]
            # The scale kernel has two for each of the four dtypes: with and without a look for NaN and Inf.
            assert len(own) == (8 if kernel == "scale" else 4), (architecture, kernel, own)
            for loop in own:
                narrow = loop.count("LDG.E.64", "LDG.E.U16") + loop.operations["LDG.E"] + loop.count("LD.E")
                assert narrow == 0, (architecture, loop)
                statistics = kernel.startswith("statistics")
                assert loop.count("LDG.E.128") >= (4 if statistics else 2), (architecture, loop)
                assert statistics or loop.count("STG.E.128") == loop.count("LDG.E.128"), (architecture, loop)


def test_cuda_hot_loops_are_bound_by_memory(resources):
    """By instruction counts and bytes under way, with room to spare; see benchmarks/GPU_BOUND.md."""
    found = gpu_bound.bounds(libraries.CUDA_LIBRARY)
    if not found:
        pytest.skip("the library was built for none of the GPUs of the page")
    for bound in found:
        assert bound.reachable >= 1.5, (bound.gpu.name, bound.loop.kernel, bound.loop.dtype, bound)


def test_cuda_library_loads_where_torch_has_cuda(resources):
    """All symbols are found and the ops get CUDA implementations, also on a machine without a GPU."""
    if torch.version.cuda is None:
        pytest.skip("this torch was built without CUDA, and the library is left alone")
    code = (
        "import torch, fastclip\n"
        "from fastclip.backends import libraries\n"
        "if str(libraries.CUDA_LIBRARY) not in torch.ops.loaded_libraries:\n"
        "    torch.ops.load_library(libraries.CUDA_LIBRARY)\n"
        "for op in ('grad_stats', 'scale_', 'clip_', 'clamp_'):\n"
        "    assert torch._C._dispatch_has_kernel_for_dispatch_key(f'fastclip::{op}', 'CUDA'), op\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
