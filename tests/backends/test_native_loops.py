# SPDX-License-Identifier: BSD-3-Clause
"""The inner loops as plain C++, without torch: native_loops/loops_check.cpp, by several compilers.

The program compares every loop with naive arithmetic and prints a digest of all results. The digest must not
depend on the instruction set, the compiler, the optimization or the processor.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOPS = ROOT / "csrc" / "cpu"
PROGRAM = Path(__file__).parent / "native_loops" / "loops_check.cpp"
SETUP_FLAGS = ("-O3", "-ffp-contract=off", "-fvisibility=hidden")
# The oldest standard that a supported torch compiles extensions with, and what setuptools adds.
FLAGS = ("-std=c++17", "-fPIC", *SETUP_FLAGS)
INSTRUCTION_SETS = {"baseline": "kBaselineLoops", "avx2": "kAvx2Loops", "avx512": "kAvx512Loops"}
NOT_ON_THIS_CPU = 77  # an exit status of the program


@dataclass(frozen=True)
class Build:
    """A compiler, flags after the common ones, and the emulator that runs what it makes."""

    compiler: str
    flags: tuple[str, ...] = ()
    emulator: str | None = None

    def reason_against(self, directory: Path) -> str | None:
        """Why this build is not possible here, or None if it is."""
        for tool in filter(None, (self.compiler, self.emulator)):
            if not shutil.which(tool):
                return f"{tool} is not installed"
        source, program = directory / "empty.cpp", directory / "empty"
        source.write_text("#include <string>\nint main() { return std::string().size(); }\n")
        linked = call(self.compiler, *self.flags, str(source), "-o", str(program))
        if linked.returncode or call(*self.command(program)).returncode:
            return f"{self.compiler} {' '.join(self.flags)} makes no program that runs here: {linked.stderr}"
        return None

    def command(self, program: Path) -> list[str]:
        return [*filter(None, (self.emulator,)), str(program)]


SANITIZERS = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BUILDS = {
    "g++": Build("g++"),
    "clang++": Build("clang++"),
    "sanitizers": Build("g++", SANITIZERS),
    "aarch64": Build("aarch64-linux-gnu-g++", ("-static",), "qemu-aarch64"),
}
# `make test` runs what g++ makes; the other builds take as long again, each.
RUNS = [
    pytest.param(
        *(build, instruction_set),
        id=f"{build}-{instruction_set}",
        marks=[pytest.mark.slow] * (build != "g++"),
    )
    for build in BUILDS
    for instruction_set in INSTRUCTION_SETS
    if build != "aarch64" or instruction_set == "baseline"
]


def call(*command: str) -> subprocess.CompletedProcess:
    # The search for leaks fails where a process may not trace another, and nothing here could leak.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)


def call_tool(*command: str) -> str:
    result = call(*command)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[-4000:]}"
    return result.stdout


class Workshop:
    """Makes the wanted builds and runs them, all at once, with one process a core."""

    def __init__(self, directory: Path, wanted: set[str]):
        self.directory = directory
        self.processes = ThreadPoolExecutor(os.cpu_count())
        self.builds = ThreadPoolExecutor(len(BUILDS))  # these wait for processes, and need no core
        self.results = {name: self.builds.submit(self.make, name) for name in BUILDS if name in wanted}

    def object_file(self, build: str, source: str) -> Path:
        return self.directory / build / f"{source}.o"

    def finished(self, build: str, source: str) -> Path:
        """The compiled csrc/cpu/<source>.cpp; skips the test if it cannot be made here."""
        self.made(build)
        return self.object_file(build, source)

    def made(self, build: str) -> dict[str, Future]:
        result = self.results[build].result()
        if isinstance(result, str):
            pytest.skip(result)
        return result

    def make(self, name: str) -> str | dict[str, Future]:
        """Compiles and links one build and starts its runs; or tells why it cannot be made here."""
        build = BUILDS[name]
        directory = self.directory / name
        directory.mkdir()
        reason = build.reason_against(directory)
        if reason:
            return reason
        x86_only = [] if name == "aarch64" else ["loops_avx2", "loops_avx512"]
        sources = [PROGRAM, *(LOOPS / f"{source}.cpp" for source in ["loops_baseline", *x86_only])]
        compiled = [self.processes.submit(self.compile, name, source) for source in sources]
        objects = [str(future.result()) for future in compiled]
        program = directory / "loops_check"
        call_tool(build.compiler, *build.flags, *objects, "-o", str(program))
        return {
            instruction_set: self.processes.submit(call, *build.command(program), instruction_set)
            for instruction_set in INSTRUCTION_SETS
        }

    def compile(self, name: str, source: Path) -> Path:
        build, target = BUILDS[name], self.object_file(name, source.stem)
        flags = [*FLAGS, *build.flags, f"-I{LOOPS}"]
        call_tool(build.compiler, *flags, "-c", str(source), "-o", str(target))
        return target

    def run(self, build: str, instruction_set: str) -> subprocess.CompletedProcess:
        """One run of the program; skips the test if it is not possible here."""
        run = self.made(build)[instruction_set].result()
        if run.returncode == NOT_ON_THIS_CPU:
            pytest.skip(run.stdout.strip())
        return run


@pytest.fixture(scope="session")
def workshop(request, tmp_path_factory):
    """Builds only what the selected tests ask for, and what they compare it with."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {p["build"] for p in parameters if p.get("build") in BUILDS}
    return Workshop(tmp_path_factory.mktemp("loops"), wanted | {"g++"})


def digest_of(run: subprocess.CompletedProcess) -> str:
    found = re.search(r"^digest ([0-9a-f]{16})$", run.stdout, re.MULTILINE)
    assert found, run.stdout + run.stderr
    return found[1]


def test_loops_are_compiled_with_the_flags_of_setup():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for flag in SETUP_FLAGS:
        assert f'"{flag}"' in setup


@pytest.mark.parametrize(("build", "instruction_set"), RUNS)
def test_loops_agree_with_naive_arithmetic(workshop, build, instruction_set):
    run = workshop.run(build, instruction_set)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert re.search(r"^[0-9]{7,} checks, 0 failures$", run.stdout, re.MULTILINE)


@pytest.mark.parametrize(("build", "instruction_set"), RUNS[1:])
def test_loops_give_the_same_bits_in_every_build(workshop, build, instruction_set):
    """Those of g++ for any x86 CPU; but for some bits of NaN, see Rule in check_update.h."""
    expected = digest_of(workshop.run("g++", "baseline"))
    assert digest_of(workshop.run(build, instruction_set)) == expected


def needs(tool: str) -> pytest.MarkDecorator:
    here = sys.platform == "linux" and platform.machine() == "x86_64" and shutil.which(tool)
    return pytest.mark.skipif(not here, reason=f"needs {tool} and x86-64 Linux")


OBJECTS = pytest.mark.parametrize("build", ["g++", pytest.param("clang++", marks=pytest.mark.slow)])


@needs("nm")
@OBJECTS
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_loop_object_defines_nothing_but_its_table(workshop, build, instruction_set):
    """Anything else, such as a template of the standard library, could be the linker's only copy of it."""
    target = workshop.finished(build, f"loops_{instruction_set}")
    external = call_tool("nm", "-C", "--defined-only", "--extern-only", str(target)).splitlines()
    names = [line.split(maxsplit=2)[2] for line in external]
    assert names == [f"fastclip::{INSTRUCTION_SETS[instruction_set]}"]
    assert "std::" not in call_tool("nm", "-C", str(target))


def instructions(target: Path) -> list[str]:
    """Name and operands of each; section headings and labels have no tab."""
    listing = call_tool("objdump", "-d", "--no-show-raw-insn", str(target)).splitlines()
    return [line.split("\t", 1)[1] for line in listing if "\t" in line]


@needs("objdump")
@OBJECTS
def test_loop_object_stays_within_its_instruction_set(workshop, build):
    baseline, avx2, avx512 = (
        instructions(workshop.finished(build, f"loops_{name}")) for name in INSTRUCTION_SETS
    )
    # All instructions of AVX and of its successors begin with a v, also on 128-bit registers.
    assert not [i for i in baseline if i.startswith("v") or re.search("%[yz]mm", i)]
    assert [i for i in avx2 if "%ymm" in i] and [i for i in avx512 if "%zmm" in i]
    assert not [i for i in avx2 if re.search(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2[0-9]|3[01])", i)]
    contracted = re.compile("vfn?m(add|sub)")
    assert not [i for i in baseline + avx2 + avx512 if contracted.match(i)]
