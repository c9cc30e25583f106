# SPDX-License-Identifier: BSD-3-Clause
"""`make gpu-check`: build, test and measure on a machine with a GPU, and write one report.

Everything runs in the current Python environment and needs no network. Exit status: 0 if all tests passed and
all bars were reached, 1 if a test failed, 2 if only a bar was missed, 3 if there is no GPU.
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

from ..provenance import ROOT, commit

RESULTS = ROOT / "benchmarks" / "results"
FAILED, BAR_MISSED, NO_GPU = 1, 2, 3
STEPS = ("tests", "memcheck", "racecheck", "benchmarks", "variants")

# Builds to compare with the shipped one, by macros of csrc/cuda/tuning.cuh.
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
class CheckStep:
    """The title and the output of one part of the check, and whether it passed."""

    title: str
    text: str
    passed: bool = True


def run(*command: str, timeout: int = 1800, **environment: str) -> subprocess.CompletedProcess:
    """Run a command in the project's root and return its result, with both streams in stdout."""
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
    """Return the last lines of an output, where tools print their verdict."""
    return "\n".join(text.strip().splitlines()[-count:])


def own_architecture() -> str:
    """Return the compute capability of this GPU, such as 9.0."""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def build(flags: str = "", architecture: str | None = None) -> CheckStep:
    """Build both libraries in place, with kernels for all GPUs or for one."""
    chosen = {"TORCH_CUDA_ARCH_LIST": architecture} if architecture else {}
    result = run(
        sys.executable,
        *("setup.py", "build_ext", "--inplace", "--force"),
        FASTCLIP_BUILD="cuda",
        NVCC_APPEND_FLAGS=flags,
        **chosen,
    )
    return CheckStep("Build", last_lines(result.stdout, 3), result.returncode == 0)


def tests() -> CheckStep:
    """Run every test that needs a GPU."""
    result = run(sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests")
    return CheckStep("Tests marked gpu", last_lines(result.stdout, 40), result.returncode == 0)


def sanitizer(tool: str) -> CheckStep:
    """Run every op under compute-sanitizer, if it is installed and supports this device."""
    title = f"compute-sanitizer {tool}"
    program = shutil.which("compute-sanitizer")
    if program is None:
        return CheckStep(title, "not installed")
    command = (program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu.small")
    result = run(*command, timeout=900)
    if "Device not supported" in result.stdout:
        return CheckStep(title, "does not support this device: " + last_lines(result.stdout, 3))
    return CheckStep(title, last_lines(result.stdout, 8), result.returncode == 0)


def benchmarks() -> CheckStep:
    """Print the tables in a process of its own; a missed bar does not fail this step."""
    result = run(sys.executable, "-m", "benchmarks.gpu.tables", timeout=3000)
    return CheckStep("Benchmarks", result.stdout.strip(), result.returncode in (0, BAR_MISSED))


def variants() -> CheckStep:
    """Measure other builds of the kernels for this GPU alone, then restore the shipped build."""
    lines = []
    for name, flags in VARIANTS.items():
        made = build(flags, own_architecture())
        if not made.passed:
            lines.append(f"{name}: does not compile")
            continue
        result = run(sys.executable, "-m", "benchmarks.gpu.tables", "--ops")
        lines.append(f"{name}: {last_lines(result.stdout, 1)}")
    return CheckStep("Variants of the build", "\n".join(lines), build().passed)


def head() -> str:
    """Return a list of the GPU, driver, versions and commit."""
    gpu = torch.cuda.get_device_properties(0)
    query = run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = query.stdout.strip().splitlines()[0] if query.returncode == 0 else "unknown"
    facts = {
        "GPU": f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB",
        "devices": str(torch.cuda.device_count()),
        "driver": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "python": sys.version.split()[0],
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def report(steps: list[CheckStep]) -> str:
    """Return the text of the report."""
    parts = [f"# fastclip on {torch.cuda.get_device_name(0)}\n\n{head()}"]
    for step in steps:
        verdict = "" if step.passed else " (FAILED)"
        tables = step.title == "Benchmarks"
        parts.append(f"## {step.title}{verdict}\n\n" + (step.text if tables else f"```\n{step.text}\n```"))
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run the check, write its report, and return the exit status."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--steps", nargs="+", choices=STEPS, default=STEPS, help="parts of the check (default: all)"
    )
    parser.add_argument("--output", type=Path, help="the file of the report (default: in benchmarks/results)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device here; nothing was built, tested or measured", file=sys.stderr)
        return NO_GPU
    wanted: dict[str, Callable[[], CheckStep]] = {
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
