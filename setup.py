# SPDX-License-Identifier: BSD-3-Clause
"""Decides what to compile, says what and why, and leaves the rest to pyproject.toml.

FASTCLIP_BUILD: "auto" compiles what this machine can and falls back with the reason, "cpu" compiles or
fails, "none" gives the pure Python package.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
REPORT = ROOT / "fastclip" / "_build_report.txt"
MODE = os.environ.get("FASTCLIP_BUILD", "auto")


def say(message: str) -> None:
    """Tell the decision to whoever watches the build, and to `python -m fastclip` afterwards."""
    bar = "*" * 100
    print(f"{bar}\nfastclip: {message}\n{bar}", file=sys.stderr)
    REPORT.write_text(message + "\n", encoding="utf-8")


def reason_against() -> str | None:
    """Why nothing can be compiled here, or None if it can."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        return (
            f"torch cannot be imported by the build ({error}); install torch first, then build with "
            "`pip install --no-build-isolation`"
        )
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        return f"the native library needs torch >= 2.10, the build sees torch {torch.__version__}"
    compiler = cpp_extension.get_cxx_compiler()
    return None if shutil.which(compiler) else f"no C++ compiler: {compiler!r} is not on PATH"


def native_build() -> dict:
    """The arguments of setup() that compile the native library."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    class Build(BuildExtension):
        def run(self) -> None:
            try:
                super().run()
            except Exception as error:
                if MODE != "auto":
                    raise
                say(f"pure Python only, the native library did not compile: {error} (FASTCLIP_BUILD=auto)")
                self.extensions: list = []
            else:
                say(f"native CPU library, built with torch {torch.__version__} (FASTCLIP_BUILD={MODE})")

    sources = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.cpp"))
    # Contraction would make the last bits of a norm depend on the instruction set; see csrc/cpu/loops.h.
    flags = [
        "-O3",
        "-g0",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
    ]
    prefix = f"-ffile-prefix-map={ROOT}=."  # no path of this machine in the binary
    extension = CppExtension(
        "fastclip.libfastclip_cpu",
        sources,
        py_limited_api=True,
        extra_compile_args=[*flags, prefix],
    )
    return {
        "ext_modules": [extension],
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
        "cmdclass": {
            "build_ext": Build.with_options(no_python_abi_suffix=True),
            "build_py": BuildLast,
        },
    }


class BuildLast(build_py):
    """Collects the package's files after the compilation, so that the report tells how it ended."""

    def run(self) -> None:
        self.run_command("build_ext")
        super().run()


def decide() -> dict:
    if MODE not in ("auto", "cpu", "none"):
        hint = ": this version has no CUDA kernels" if MODE == "cuda" else ""
        sys.exit(f"FASTCLIP_BUILD: expected auto, cpu or none, but got {MODE!r}{hint}")
    reason = "FASTCLIP_BUILD=none" if MODE == "none" else reason_against()
    if reason is None:
        return native_build()
    if MODE == "cpu":
        sys.exit(f"FASTCLIP_BUILD=cpu: {reason}")
    (ROOT / "fastclip" / "libfastclip_cpu.so").unlink(missing_ok=True)
    say(f"pure Python only, no native library: {reason}")
    return {}


setup(**decide())
