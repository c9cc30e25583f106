# SPDX-License-Identifier: BSD-3-Clause
"""`make gpu-check`: builds, tests and measures on a machine with a GPU, and writes one report.

Everything runs in the present Python environment and needs no network. Exit status: 0 where all tests passed
and all bars were reached, 1 where a test failed, 2 where only a bar was missed, 3 where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import machine

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FAILED, BAR_MISSED, NO_GPU = 1, 2, 3
STEPS = ("tests", "memcheck", "racecheck", "benchmarks", "variants")

# Builds that are compared with the one that is shipped: the names of macros in csrc/cuda/tuning.cuh.
VARIANTS = {
    "as shipped": "",
    "2 loads in flight": "-DFASTCLIP_LOADS_IN_FLIGHT=2",
    "8 loads in flight": "-DFASTCLIP_LOADS_IN_FLIGHT=8",
    "blocks of 128": "-DFASTCLIP_THREADS=128",
    "statistics leave no lines in L2": "-DFASTCLIP_STATISTICS_STREAM=1",
    "updates leave no lines in L2": "-DFASTCLIP_UPDATE_STREAM=1",
    "scale pass forwards": "-DFASTCLIP_SCALE_BACKWARDS=0",
}


@dataclass
class Step:
    """What one part of the check printed, and whether it did what it should."""

    title: str
    text: str
    passed: bool = True


def run(*command: str, timeout: int = 1800, **environment: str) -> subprocess.CompletedProcess:
    """A command in the project's root; its output, both streams together."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def last_lines(text: str, count: int) -> str:
    """The end of an output, where a tool says how it went."""
    return "\n".join(text.strip().splitlines()[-count:])


def own_architecture() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def build(flags: str = "", architecture: str | None = None) -> Step:
    """Both libraries in place, the kernels for all GPUs or for one."""
    chosen = {"TORCH_CUDA_ARCH_LIST": architecture} if architecture else {}
    result = run(
        sys.executable,
        *("setup.py", "build_ext", "--inplace", "--force"),
        FASTCLIP_BUILD="cuda",
        NVCC_APPEND_FLAGS=flags,
        **chosen,
    )
    return Step("Build", last_lines(result.stdout, 3), result.returncode == 0)


def tests() -> Step:
    """Every test that needs a GPU."""
    result = run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    return Step("Tests marked gpu", last_lines(result.stdout, 40), result.returncode == 0)


def sanitizer(tool: str) -> Step:
    """compute-sanitizer over a run of every op, if it is here and knows this device."""
    title = f"compute-sanitizer {tool}"
    program = shutil.which("compute-sanitizer")
    if program is None:
        return Step(title, "not installed")
    command = (program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.small")
    result = run(*command, timeout=900)
    if "Device not supported" in result.stdout:
        return Step(title, "refuses this device: " + last_lines(result.stdout, 3))
    return Step(title, last_lines(result.stdout, 8), result.returncode == 0)


def benchmarks() -> Step:
    """The tables, in a process of their own. Exit status 2 tells a missed bar."""
    result = run(sys.executable, "-m", "benchmarks.gpu.tables", timeout=3000)
    return Step("Benchmarks", result.stdout.strip(), result.returncode in (0, BAR_MISSED))


def variants() -> Step:
    """Other builds of the kernels for this GPU alone; then the shipped one again."""
    lines = []
    for name, flags in VARIANTS.items():
        made = build(flags, own_architecture())
        if not made.passed:
            lines.append(f"{name}: does not compile")
            continue
        result = run(sys.executable, "-m", "benchmarks.gpu.tables", "--ops")
        lines.append(f"{name}: {last_lines(result.stdout, 1)}")
    return Step("Variants of the build", "\n".join(lines), build().passed)


def head() -> str:
    """GPU, driver, versions and commit."""
    gpu = torch.cuda.get_device_properties(0)
    query = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = query.stdout.strip().splitlines()[0] if query.returncode == 0 else "unknown"
    facts = {
        "GPU": f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB",
        "devices": str(torch.cuda.device_count()),
        "driver": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": sys.version.split()[0],
        "commit": machine.commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def report(steps: list[Step]) -> str:
    """The whole file."""
    parts = [f"# fastclip on {torch.cuda.get_device_name(0)}\n\n{head()}"]
    for step in steps:
        verdict = "" if step.passed else " (FAILED)"
        tables = step.title == "Benchmarks"
        parts.append(f"## {step.title}{verdict}\n\n" + (step.text if tables else f"```\n{step.text}\n```"))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="default: all of them")
    parser.add_argument("--output", type=Path, help="the report's file (default: in benchmarks/results)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device here; nothing was built, tested or measured", file=sys.stderr)
        return NO_GPU
    wanted: dict[str, Callable[[], Step]] = {
        "tests": tests,
        "memcheck": lambda: sanitizer("memcheck"),
        "racecheck": lambda: sanitizer("racecheck"),
        "benchmarks": benchmarks,
        "variants": variants,
    }
    steps = [build()]
    if steps[0].passed:
        steps += [step() for name, step in wanted.items() if name in options.steps]
    name = re.sub(r"\W+", "-", torch.cuda.get_device_name(0)).strip("-").lower()
    path = options.output or RESULTS / f"{name}-{datetime.date.today()}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(steps), encoding="utf-8")
    for step in steps:
        print(f"{'passed' if step.passed else 'FAILED'}  {step.title}")
    print(f"report: {path}")
    if not all(step.passed for step in steps):
        return FAILED
    return BAR_MISSED if any("MISSED" in step.text for step in steps) else 0


if __name__ == "__main__":
    sys.exit(main())
