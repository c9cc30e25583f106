# SPDX-License-Identifier: BSD-3-Clause
"""The shape of the project: imports point downwards, the public names, what an import costs and needs."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastclip
from helpers import cases

PACKAGE = Path(fastclip.__file__).parent
ROOT = PACKAGE.parent

# From the lowest layer to the highest: a module may import from its own layer and from those before it.
LAYERS = [
    ["backends"],
    ["dispatch"],
    ["distributed"],
    ["policies"],
    ["collect", "scaler_state"],
    ["gradient_stats"],
    ["clip_grad"],
    ["optim"],
    ["grad_scaler", "patch"],
    ["monitor"],
    ["logs"],
    ["replay", "report"],
    [""],
    ["bench", "demo", "integrations"],
    ["cli"],
    ["__main__"],
]


def layer_of(module: str) -> int:
    """By the longest prefix: backends.native is lower than backends."""
    names = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    while module not in names:
        module = module.rpartition(".")[0]
        assert module, "a module without a layer"
    return names[module]


def modules() -> dict[str, Path]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path) -> set[str]:
    """The modules of the package that this one imports, anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("fastclip") for a in node.names), "relative imports, please"
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        parts = package.split(".") if package else []
        base = parts[: len(parts) - (node.level - 1)]
        origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
        for alias in node.names:
            name = f"{origin}.{alias.name}".strip(".")
            found.add(name if name in modules() else origin)
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_downwards(module):
    for imported in imports_of(module, modules()[module]):
        assert layer_of(imported) <= layer_of(module), f"{module or 'fastclip'} imports {imported}"


def test_backends_do_not_import_each_other():
    for name in ("backends.native", "backends.triton", "backends.reference"):
        shared = {"backends", "backends.checks", "backends.libraries", "backends.transfer"}
        own = {m for m in modules() if m.startswith(f"{name}.")}
        others = imports_of(name, modules()[name]) - shared - own
        assert not others, f"{name} imports {others}"


def test_public_names():
    assert fastclip.__all__ == sorted(fastclip.__all__)
    for name in fastclip.__all__:
        value = getattr(fastclip, name)
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_documented_arguments_exist():
    """Every argument of a public function stands in its docstring."""
    for name in fastclip.__all__:
        function = getattr(fastclip, name)
        if inspect.isfunction(function):
            for argument in inspect.signature(function).parameters:
                assert re.search(rf"\b{argument}\b.*:", inspect.getdoc(function)), f"{name}: {argument}"


@pytest.mark.parametrize(
    "path", sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("csrc/**/*.*")]), ids=lambda p: p.name
)
def test_files_are_short_and_open_with_their_purpose(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert "SPDX-License-Identifier: BSD-3-Clause" in lines[0]


def test_chunk_size_of_the_cases_is_that_of_the_kernels():
    header = (ROOT / "csrc/cpu/chunks.h").read_text()
    assert int(re.search(r"kChunkSize = (\d+);", header).group(1)) == cases.CHUNK


def test_import_needs_and_loads_nothing_but_torch():
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import fastclip\n"
        "new = set(sys.modules) - before\n"
        "print(sorted({m.partition('.')[0] for m in new} - set(sys.stdlib_module_names) - {'torch'}))\n"
        "print(sorted(m for m in new if m.startswith(('torch._dynamo', 'torch._inductor'))))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout == "['fastclip']\n[]\n", result.stdout + result.stderr


def test_no_path_of_the_build_machine_in_the_library(native_only):
    for library in PACKAGE.glob("*.so"):
        assert str(ROOT).encode() not in library.read_bytes()
        assert str(Path(torch.__file__).parent).encode() not in library.read_bytes()
