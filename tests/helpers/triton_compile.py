# SPDX-License-Identifier: BSD-3-Clause
"""Compile every Triton kernel for a GPU that need not be present, and print the properties of each as JSON.

This is a separate program because the tests run Triton's interpreter, and one process cannot do both.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from benchmarks.sass import find_tools
from fastclip.backends.triton import clip_summary, statistics, update

POINTERS = {"metadata": "*i64", "counts": "*i32", "summary": "*fp32", "result": "*fp32"}
NUMBERS = {"count", "steps", "chunks", "finite_only", "groups", "repeat", "factor_stride", "max_norm_stride"}


def sources() -> Iterator[tuple[str, ASTSource]]:
    """Yield each kernel with each value of the constants that change it."""

    def source(kernel, **constants: object) -> ASTSource:
        constants["wide"] = tl.float64
        signature = {}
        for name in kernel.arg_names:
            kind = "constexpr" if name in constants else "i32" if name in NUMBERS else POINTERS.get(name)
            signature[name] = kind or "*fp64"
        return ASTSource(kernel, signature, constants)

    for norm, name in enumerate(("1", "2", "inf")):
        yield f"chunk_statistics, norm {name}", source(statistics.chunk_statistics, norm=norm)
        yield f"tensor_statistics, norm {name}", source(statistics.tensor_statistics, norm=norm)
        clip = {"real": tl.float32, "clip": True, "max_norm_is_tensor": norm == 0}
        yield f"summarize, norm {name}", source(clip_summary.summarize, norm=norm, **clip)
    for mode, name in enumerate(("propagate", "zero", "skip")):
        yield f"scale, {name}", source(update.scale, mode=mode, counted=True)
    yield "clamp", source(update.clamp)


def of_nvidia(compiled) -> dict[str, int]:
    """Return registers, spilled bytes and wide accesses, from cuobjdump and the PTX."""
    tools = find_tools()
    assert tools, "Triton's wheel carries cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text).groups()
    registers, stack, local = map(int, numbers)
    ptx = compiled.asm["ptx"]
    return {
        "registers": registers,
        "spilled": stack + local,
        "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)),
        "wide stores": len(re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", ptx)),
    }


def of_amd(compiled) -> dict[str, int]:
    """Return registers, spilled registers and wide accesses, from the assembly."""
    text = compiled.asm["amdgcn"]

    def number(name: str) -> int:
        return int(re.search(rf"\.{name}: +(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"),
        "spilled": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "wide loads": len(re.findall(r"(?:global|buffer)_load_dwordx4", text)),
        "wide stores": len(re.findall(r"(?:global|buffer)_store_dwordx4", text)),
    }


def main(backend: str, architecture: str) -> None:
    nvidia = backend == "cuda"
    target = GPUTarget(backend, int(architecture) if nvidia else architecture, 32 if nvidia else 64)
    found = {}
    for name, source in sources():
        compiled = compile_kernel(source, target=target, options={"num_warps": 8 if nvidia else 4})
        found[name] = of_nvidia(compiled) if nvidia else of_amd(compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
