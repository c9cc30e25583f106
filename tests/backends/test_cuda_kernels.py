# SPDX-License-Identifier: BSD-3-Clause
"""The CUDA kernels as plain C++: tests/backends/cuda_shim/check.cpp, which needs no torch, under sanitizers.

Then with faults planted in copies of the sources: each must be found, by the build that can see it.
"""

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from helpers import cases, shim
from helpers.cases import ALL, DTYPES, assert_bitwise_equal, by_dtype, clone, each_case

ROOT = Path(__file__).parents[2]
SHIM = "tests/backends/cuda_shim"
COMMON = ["-std=c++20", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas", "-pthread"]


@dataclass(frozen=True)
class Build:
    """Flags, and whether all lists are gone through or those that a slow build can bear."""

    flags: tuple[str, ...]
    quick: bool = True
    tool: str | None = None  # must be installed


SMALL_BLOCKS = "-DFASTCLIP_THREADS=64"
ADDRESS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
THREADS = ("-O1", "-g", "-fsanitize=thread", "-DFASTCLIP_SHIM_THREADS")
BUILDS = {
    "quick, blocks of 64": Build(("-O1", SMALL_BLOCKS)),
    "blocks of 64": Build(("-O1", SMALL_BLOCKS), quick=False),
    "blocks of 256": Build(("-O2",)),
    "address": Build((*ADDRESS, SMALL_BLOCKS)),
    # Under ThreadSanitizer each thread of a block is one of the system; it wants addresses as they were.
    "threads": Build((*THREADS, SMALL_BLOCKS), tool="setarch"),
}
LONG_BUILDS = {
    "blocks of 256": Build(("-O2",), quick=False),
    "blocks of 128": Build(("-O2", "-DFASTCLIP_THREADS=128")),
    "address": Build((*ADDRESS, SMALL_BLOCKS), quick=False),
    "address, blocks of 256": Build(ADDRESS),
    "threads, blocks of 256": Build(THREADS, tool="setarch"),
}


@dataclass(frozen=True)
class Fault:
    """A passage of a source, what to put in its place, and the build that must find it."""

    file: str
    passage: str
    instead: str
    build: str = "blocks of 64"


# Those that the design fears most.
FAULTS = {
    "no barrier before the warps' sums are read": Fault(
        "reduce.cuh", "  __syncthreads();\n  double total", "  double total"
    ),
    "no barrier before shared memory is used again": Fault(
        "kernels.cuh", "    __syncthreads();  // before", "    // before", "threads"
    ),
    "no barrier between rows and totals": Fault(
        "kernels.cuh", "  __syncthreads();\n  finalize", "  finalize", "threads"
    ),
    "no fence before a segment is complete": Fault(
        "finalize.cuh", "    __threadfence();\n    done", "    done", "threads"
    ),
    "no fence before a segment is summed up": Fault(
        "finalize.cuh",
        "!= size) return;\n  __threadfence();",
        "!= size) return;",
        "threads",
    ),
    "no fence before a block is finished": Fault(
        "finalize.cuh", "    __threadfence();\n    shared.last_block", "    shared.last_block", "threads"
    ),
    "no fence before the last block reads": Fault(
        "finalize.cuh", "{\n      __threadfence();\n      atomicExch", "{\n      atomicExch", "threads"
    ),
    "a lost tail": Fault("elements.cuh", "if (tail < chunk.end) use", "if (false) use"),
    "a lost head": Fault("elements.cuh", "if (head < head_end) use", "if (false) use"),
    "a 32-bit offset": Fault(
        "tensor_list_metadata.cuh",
        "static_cast<uint64_t>(chunk_in_tensor) * kChunkBytes",
        "chunk_in_tensor * kChunkBytes",
    ),
    "gradients without elements skipped": Fault(
        "launch.cu", "const Item& item = items[i];", "const Item& item = items[i]; if (!item.numel) continue;"
    ),
    "the gradient before one without elements": Fault(
        "tensor_list_metadata.cuh",
        "metadata.first_chunk[middle] <= chunk",
        "metadata.first_chunk[middle] < chunk",
    ),
}
MORE_FAULTS = {
    "a head counted twice": Fault(
        "elements.cuh",
        "const uint32_t first = (chunk.begin + kVectorBytes - 1)",
        "const uint32_t first = chunk.begin",
    ),
    "a vector too many": Fault(
        "elements.cuh", "v < chunk.end / kVectorBytes;", "v <= chunk.end / kVectorBytes;", "address"
    ),
    "a segment counter left": Fault("finalize.cuh", "atomicExch(workspace.segment_done + segment, 0u);", ""),
    "a block counter left": Fault("finalize.cuh", "atomicExch(workspace.blocks_done, 0u);", ""),
    "a segment short of a chunk": Fault("finalize.cuh", "i = lane; i < size;", "i = lane; i + 1 < size;"),
    "sums in the order of the blocks": Fault(
        "finalize.cuh",
        "load_partial(workspace, begin + i)",
        "load_partial(workspace, begin + (i + number) % size)",
    ),
    "NaN taken for Inf": Fault("reduce.cuh", "nan_count += is_nan(x);", "inf_count += is_nan(x);"),
    "underflow taken for zero": Fault("reduce.cuh", "total < kTinySum && any", "false && any"),
    "zeros read twice make no difference, values of them do": Fault(
        "reduce.cuh", "if (finite_only || stats", "if (stats"
    ),
    "a maximum that loses NaN": Fault(
        "block_reduce.cuh", "return to_bits(a) > to_bits(b) ? a : b;", "return fmax(a, b);"
    ),
    "zero by multiplication": Fault("update.cuh", "? Real{0} : x * factor", "? x * Real{0} : x * factor"),
    "skip that writes": Fault("finalize.cuh", "scale_needed = !skips && ", "scale_needed = "),
    "found_inf missing": Fault("finalize.cuh", "decision->found_inf |= summary.found_inf;", ""),
    "groups always sorted": Fault("finalize.cuh", "if (arguments.options.groups_sorted) {", "if (true) {"),
    "a factor of another gradient": Fault(
        "launch.cu", "item.index : kSkipTensor", "item.index ^ 1 : kSkipTensor"
    ),
    "the same gradient scaled at once": Fault(
        "launch.cu", "round == item.repeat ?", "round == 0 ?", "threads"
    ),
    "one chunk too far in the scale pass": Fault(
        "kernels.cuh", "metadata.chunks - 1 - i", "metadata.chunks - i"
    ),
    "a limit that raises only": Fault("update.cuh", "x > limit ? limit : -fabs(limit)", "-fabs(limit)"),
}


def call(*command: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
    words = [str(part) for part in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment)


class Workshop:
    """Compiles and runs the program, with one process a core."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes = ThreadPoolExecutor(os.cpu_count())

    def start(self, build: Build, fault: Fault | None = None) -> Future:
        return self.processes.submit(self.run, build, fault)

    def run(self, build: Build, fault: Fault | None) -> subprocess.CompletedProcess:
        place = self.directory / f"{abs(hash((build, fault)))}"
        for folder in ("csrc/common", "csrc/cuda", SHIM):
            shutil.copytree(ROOT / folder, place / folder)
        if fault:
            source = place / "csrc/cuda" / fault.file
            text = source.read_text()
            assert text.count(fault.passage) == 1, f"{fault.file} holds {fault.passage!r} not just once"
            source.write_text(text.replace(fault.passage, fault.instead))
        sources = [place / f"{SHIM}/{name}.cpp" for name in ("check", "lists", "fibers", "threads")]
        program = place / "check"
        kernels = place / "csrc/cuda/launch.cu"
        flags = [*COMMON, *build.flags, f"-I{place / SHIM}"]
        made = call(shim.COMPILER, *flags, *sources, "-x", "c++", kernels, "-o", program)
        assert made.returncode == 0, made.stderr[-6000:]
        start = ["setarch", platform.machine(), "-R"] if build.tool == "setarch" else []
        return call(*start, program, *(["quick"] if build.quick else []))


def reason_against(build: Build) -> str | None:
    for tool in filter(None, (shim.COMPILER, build.tool)):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    return None


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request):
    """The runs of all collected tests, begun at once so that no core waits."""
    workshop = Workshop(tmp_path_factory.mktemp("cuda_kernels"))
    started: dict[object, Future] = {}
    for item in request.session.items:
        wanted = getattr(item, "callspec", None) and item.callspec.params.get("wanted")
        if wanted and wanted not in started:
            build, fault = builds_of(wanted)
            if not reason_against(build):
                started[wanted] = workshop.start(build, fault)
    yield started
    workshop.processes.shutdown(cancel_futures=True)


def builds_of(wanted: tuple[str, str]) -> tuple[Build, Fault | None]:
    kind, name = wanted
    if kind == "fault":
        fault = {**FAULTS, **MORE_FAULTS}[name]
        return BUILDS[fault.build], fault
    return (BUILDS if kind == "build" else LONG_BUILDS)[name], None


def result_of(runs, wanted) -> subprocess.CompletedProcess:
    build, _ = builds_of(wanted)
    if reason := reason_against(build):
        pytest.skip(reason)
    return runs[wanted].result()


# `make test` runs one build of each kind that takes seconds, and a fault of each kind that it can see.
# The rest is slow: every fault is a build, and under ThreadSanitizer every thread is one of the system.
QUICK = {"address", "no barrier before the warps' sums are read", "a lost tail"}


def parameters(kind: str, names) -> list:
    slow = pytest.mark.slow
    return [pytest.param((kind, name), id=name, marks=[] if name in QUICK else slow) for name in names]


def assert_clean(run: subprocess.CompletedProcess, least: int) -> None:
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]
    found = re.search(r"^(\d+) checks, 0 failures$", run.stdout, re.MULTILINE)
    assert found and int(found[1]) >= least, run.stdout


@pytest.mark.parametrize("wanted", parameters("build", BUILDS))
def test_kernels_agree_with_naive_arithmetic(runs, wanted):
    assert_clean(result_of(runs, wanted), 2000)


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("wanted", parameters("long", LONG_BUILDS))
def test_kernels_in_longer_runs(runs, wanted):
    assert_clean(result_of(runs, wanted), 2000)


def assert_found(run: subprocess.CompletedProcess, build: str) -> None:
    """By a wrong result, a crash or, under a sanitizer, its report."""
    assert run.returncode != 0, "the fault was not found"
    if run.returncode < 0:
        return  # ended by a signal
    reports = {"threads": "data race", "address": "AddressSanitizer"}
    barrier = "a barrier was not reached"
    words = run.stdout + run.stderr
    assert "FAILED" in words or barrier in words or reports.get(build, "FAILED") in words, words[-3000:]


@pytest.mark.parametrize("wanted", parameters("fault", FAULTS))
def test_kernel_check_finds_a_planted_fault(runs, wanted):
    assert_found(result_of(runs, wanted), FAULTS[wanted[1]].build)


@pytest.mark.parametrize("wanted", parameters("fault", MORE_FAULTS))
def test_kernel_check_finds_another_planted_fault(runs, wanted):
    assert_found(result_of(runs, wanted), MORE_FAULTS[wanted[1]].build)


@by_dtype
@each_case(ALL)
def test_kernels_give_the_same_bits_for_every_grid_and_order(case, dtype):
    """Through the ops, over the list of cases of all backends."""
    if reason := shim.reason_against():
        pytest.skip(reason)
    grads = ALL[case](dtype)
    outcomes = []
    for blocks, seed in ((1, 0), (2, 5), (60, 9)):
        shim.configure(blocks, seed)
        mine = clone(grads)
        results = shim.backend().clip_(mine, 0.5, 2.0, "propagate")
        outcomes.append([*results, *mine])
    for other in outcomes[1:]:
        assert_bitwise_equal(other, outcomes[0])


def test_kernels_serve_more_gradients_than_one_launch_holds():
    """Several launches, the last of which sums up all; more than 1,600 gradients once."""
    if reason := shim.reason_against():
        pytest.skip(reason)
    shim.configure()
    grads = [cases.normal(DTYPES[i % 4], i % 5) for i in range(3300)]
    total_norm, stats = shim.backend().grad_stats(grads, 2.0)
    assert abs(total_norm.item() / cases.exact_norm(grads, 2.0) - 1) < 1e-6
    groups = [i % 1700 for i in range(3300)]
    by_group, _ = shim.backend().grad_stats(grads, 2.0, False, groups)
    expected = torch.zeros(1700, dtype=torch.float64).index_add(0, torch.tensor(groups), stats[:, 0]).sqrt()
    torch.testing.assert_close(by_group, expected, rtol=1e-12, atol=0)
