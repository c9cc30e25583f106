# SPDX-License-Identifier: BSD-3-Clause
"""The structure of the project: layers, private and public names, and what an import loads."""

import ast
import collections
import functools
import graphlib
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


# Names that stand in several packages for the same concept.
SHARED_NAMES = {
    "arguments": "checks of arguments, of policies and of the monitor",
    "base": "the base class of a package: of policies, of detectors",
    "bench": "the command and its package",
    "demo": "the command and its package",
    "diagnose": "the command and its function",
    "incidents": "the command and its package",
    "monitor": "the package and its class",
    "recommend": "the command and its function",
    "replay": "the command and its package",
    "report": "the command and its package",
    "tensorboard": "the format, written by the sink and read as a log",
}


def layer_of(module: str) -> int:
    """Return the number of a module's layer."""
    names = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    while module not in names:
        module = module.rpartition(".")[0]
        assert module, "a module without a layer"
    return names[module]


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of all modules of the package; "" is fastclip itself."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported_names(module: str) -> list[tuple[str, str, str]]:
    """Return what a module imports from the package: the module, the name in it or "", and the name here."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            assert not any(a.name.startswith("fastclip") for a in node.names), "use relative imports"
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        parts = package.split(".") if package else []
        base = parts[: len(parts) - (node.level - 1)]
        origin = ".".join([*base, *(node.module.split(".") if node.module else [])])
        for alias in node.names:
            name, here = f"{origin}.{alias.name}".strip("."), alias.asname or alias.name
            found.append((name, "", here) if name in modules() else (origin, alias.name, here))
    return found


def imports_of(module: str) -> set[str]:
    """Return the modules of the package that this one imports, anywhere in it."""
    return {origin for origin, _, _ in imported_names(module)}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_downwards(module):
    for imported in imports_of(module):
        assert layer_of(imported) <= layer_of(module), f"{module or 'fastclip'} imports {imported}"


def test_backends_do_not_import_each_other():
    for name in ("backends.native", "backends.triton", "backends.reference"):
        shared = {"backends", "backends.checks", "backends.libraries", "backends.transfer"}
        own = {m for m in modules() if m.startswith(f"{name}.")}
        others = imports_of(name) - shared - own
        assert not others, f"{name} imports {others}"


def test_imports_have_no_cycles():
    # A package imports its modules, which import from the package's siblings: the package itself is no step.
    graph = {m: {i for i in imports_of(m) if i != m and not m.startswith(f"{i}.")} for m in modules()}
    graphlib.TopologicalSorter(graph).prepare()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_module_uses_a_private_name_of_another(module):
    imported = imported_names(module)
    used = [f"from {origin or 'fastclip'} import {name}" for origin, name, _ in imported if is_private(name)]
    local_modules = {here for _, name, here in imported if not name}
    for node in ast.walk(parse(modules()[module])):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in local_modules and is_private(node.attr):
                used.append(f"{node.value.id}.{node.attr} in line {node.lineno}")
    assert not used, used


def test_a_name_stands_for_one_thing():
    """No two packages have a class or a module of the same name, unless it is the same concept."""
    places = collections.defaultdict(set)
    for module, path in modules().items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        places[module.rpartition(".")[2]].add(module.rpartition(".")[0])
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not is_private(node.name):
                places[node.name].add(package)
    twice = {name: sorted(where) for name, where in places.items() if len(where) > 1}
    assert set(twice) <= set(SHARED_NAMES), {n: w for n, w in twice.items() if n not in SHARED_NAMES}
    assert set(SHARED_NAMES) <= set(twice), "a name that stands once needs no entry"


def test_test_files_import_from_helpers_only():
    tests = Path(__file__).parents[1]
    names = {path.stem for path in tests.rglob("test_*.py")} | {"conftest"}
    for path in tests.rglob("*.py"):
        for node in ast.walk(parse(path)):
            origins = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            origins += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for origin in origins:
                assert not names & set(origin.split(".")), f"{path} imports {origin}"


def test_public_names_are_sorted_and_documented():
    assert fastclip.__all__ == sorted(fastclip.__all__)
    for name in fastclip.__all__:
        value = getattr(fastclip, name)
        assert inspect.getdoc(value), f"{name} has no docstring"


def test_every_argument_of_a_public_function_is_documented():
    for name in fastclip.__all__:
        function = getattr(fastclip, name)
        if inspect.isfunction(function):
            for argument in inspect.signature(function).parameters:
                assert re.search(rf"\b{argument}\b.*:", inspect.getdoc(function)), f"{name}: {argument}"


@pytest.mark.parametrize(
    "path", sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("csrc/**/*.*")]), ids=lambda p: p.name
)
def test_files_are_short_and_begin_with_the_licence(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 300
    assert "SPDX-License-Identifier: BSD-3-Clause" in lines[0]


def test_cases_use_the_chunk_size_of_the_kernels():
    header = (ROOT / "csrc/cpu/chunks.h").read_text()
    assert int(re.search(r"kChunkSize = (\d+);", header).group(1)) == cases.CHUNK


def test_import_loads_nothing_but_torch():
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


def test_libraries_hold_no_path_of_the_build_machine(native_only):
    for library in PACKAGE.glob("*.so"):
        assert str(ROOT).encode() not in library.read_bytes()
        assert str(Path(torch.__file__).parent).encode() not in library.read_bytes()
