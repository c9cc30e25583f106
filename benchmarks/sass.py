# SPDX-License-Identifier: BSD-3-Clause
"""Registers, memory and hot loops of the compiled kernels, read from the library with NVIDIA's cuobjdump."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", re.MULTILINE
)

_NAMES = {0: "norm 1", 1: "norm 2", 2: "norm inf"}


def find_tools() -> Path | None:
    """Return the folder of cuobjdump and nvdisasm: on PATH, beside nvcc, or in Triton's wheel; else None."""
    places = [Path(found).parent for name in ("cuobjdump", "nvcc") if (found := shutil.which(name))]
    if spec := importlib.util.find_spec("triton"):
        places += [Path(p) / "backends" / "nvidia" / "bin" for p in spec.submodule_search_locations or ()]
    return next((p for p in places if (p / "cuobjdump").exists() and (p / "nvdisasm").exists()), None)


def _cuobjdump(library: Path, *options: str) -> str:
    tools = find_tools()
    if tools is None:
        raise FileNotFoundError("cuobjdump and nvdisasm are not installed (Triton's wheel carries both)")
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(tools / "cuobjdump"), *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def _kernel_name(mangled: str) -> str:
    if found := re.search(r"statistics_kernelILNS_4NormE(\d)E", mangled):
        return f"statistics, {_NAMES[int(found[1])]}"
    found = re.search(r"\d+(scale|clamp)_kernel", mangled)
    if found is None:
        raise ValueError(f"unknown kernel: {mangled}")
    return found[1]


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel; `stack` and `local` are bytes per thread, `shared` is bytes per block."""

    registers: int
    stack: int
    local: int
    shared: int


def resources(library: Path) -> dict[tuple[int, str], Resources]:
    """Return the resources by architecture (90 for sm_90) and kernel."""
    found: dict[tuple[int, str], Resources] = {}
    architecture, kernel = 0, ""
    for line in _cuobjdump(library, "-res-usage").splitlines():
        if match := re.match(r"arch = sm_(\d+)", line):
            architecture = int(match[1])
        elif match := re.match(r" Function (\w+):", line):
            kernel = _kernel_name(match[1])
        elif match := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, match.groups())
            found[architecture, kernel] = Resources(registers, stack, local, shared)
    return found


@dataclass(frozen=True)
class Loop:
    """The instructions of one iteration of a hot loop, as one thread executes them."""

    kernel: str
    dtype: str
    operations: Counter

    @property
    def instructions(self) -> int:
        return sum(self.operations.values())

    def count(self, *names: str) -> int:
        """Return the number of instructions whose name begins with one of `names`."""
        return sum(n for operation, n in self.operations.items() if operation.startswith(names))

    @property
    def loaded_bytes(self) -> int:
        return 16 * self.count("LDG.E.128")


def _dtype_of(operations: Counter) -> str:
    """Infer the dtype from the conversions and from the number of elements computed per loaded byte."""

    def count(*names: str) -> int:
        return sum(n for operation, n in operations.items() if operation.startswith(names))

    if count("DFMA", "DADD", "DMUL", "DSETP") or any(o.endswith(".EX") for o in operations):
        return "float64"
    if count("HADD2", "F2FP.F16", "F2F.F16"):
        return "float16"
    arithmetic = count("FFMA", "FADD", "FMUL")
    if arithmetic == 0:  # an integer maximum looks the same for both formats
        return "bfloat16 or float16" if count("SHF.R", "PRMT") else "float32"
    return "bfloat16" if arithmetic * 4 > 16 * count("LDG.E.128") else "float32"


def _instructions(text: str) -> list[tuple[int, str, str]]:
    return [(int(place, 16), name, operands) for place, name, operands in _INSTRUCTION.findall(text)]


def _innermost_loops(code: list[tuple[int, str, str]]) -> Iterator[list[tuple[int, str, str]]]:
    ends = []
    for place, name, operands in code:
        target = re.search(r"0x([0-9a-f]+)\s*$", operands)
        if name.startswith("BRA") and target and int(target[1], 16) <= place:
            ends.append((int(target[1], 16), place))
    for begin, end in ends:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in ends):
            yield [i for i in code if begin <= i[0] <= end]


def hot_loops(library: Path, architecture: int) -> list[Loop]:
    """Return the loops over full chunks, which are those with at least two loads of 16 bytes."""
    text = _cuobjdump(library, "-sass", "-arch", f"sm_{architecture}")
    loops = []
    for part in text.split("Function : ")[1:]:
        for body in _innermost_loops(_instructions(part)):
            operations = Counter(name for _, name, _ in body)
            if sum(n for name, n in operations.items() if name.startswith("LDG.E.128")) >= 2:
                loops.append(Loop(_kernel_name(part.split()[0]), _dtype_of(operations), operations))
    return loops
