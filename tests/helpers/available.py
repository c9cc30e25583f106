# SPDX-License-Identifier: BSD-3-Clause
"""The backends and instruction sets that this machine and this build have."""

import os
from importlib.metadata import version

import torch

from fastclip.backends import native, triton
from helpers import shim

# Before Triton is imported: its kernels then run on the CPU, one program after the other. With a GPU they
# are compiled for it, and tested by the tests marked gpu.
INTERPRETED = not torch.cuda.is_available()
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

# Not in the order of preference but in that of width: results must not depend on which one runs.
CAPABILITIES = ("baseline", "avx2", "avx512")


def usable_capabilities() -> list[str]:
    """The instruction sets that this CPU and this build have."""
    if native.unavailable(torch.device("cpu")):
        return []
    usable = []
    for name in CAPABILITIES:
        os.environ["FASTCLIP_CPU_CAPABILITY"] = name
        try:
            usable.append(native.cpu_capability())
        except RuntimeError:
            pass
        finally:
            del os.environ["FASTCLIP_CPU_CAPABILITY"]
    return usable


def reason_against_the_interpreter() -> str | None:
    """Why Triton's kernels cannot run on this CPU, or None if they can."""
    if not INTERPRETED:
        return "a GPU is here, for which they are compiled"
    if (reason := triton.reason_absent()) is not None:
        return reason
    installed = [tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy")]
    if installed[0] < (3, 8) and installed[1] >= (2, 4):
        return "before Triton 3.8 the interpreter needs a NumPy before 2.4"
    return None


USABLE = usable_capabilities()
WIDEST = USABLE[-1] if USABLE else None
BACKENDS = ["reference", *(f"native-{name}" for name in USABLE)]
if shim.reason_against() is None:
    BACKENDS.append("cuda_on_cpu")
if reason_against_the_interpreter() is None:
    BACKENDS.append("triton")
# Proven by test_instruction_sets.py to give the bits of the widest: `make test` leaves them out elsewhere.
NARROW = [f"native-{name}" for name in USABLE if name != WIDEST]
