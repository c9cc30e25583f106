# SPDX-License-Identifier: BSD-3-Clause
"""The source distribution and the wheel built from it: what they hold, and that an installed wheel works."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fastclip
from fastclip.backends import libraries

ROOT = Path(fastclip.__file__).parent.parent
LIBRARY = "fastclip/libfastclip_cpu.so"
# What only a clone needs.
CLONE_ONLY = (".ci/", ".gitignore", ".github/")
MADE = {"PKG-INFO", "setup.cfg"}
EXTRAS = {"bench", "demo", "dev", "docs", "hf", "lightning", "nvcc", "report", "tensorboard", "test"}

if not (ROOT / "setup.py").exists():
    pytest.skip("the tests run against an installed package, not a source tree", allow_module_level=True)


def tracked() -> list[str]:
    """The files of the project as git knows them: the tracked ones that are still there."""
    try:
        done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git clone, so nothing tells which files belong to the project")
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    """A command that has to succeed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Built in a copy of what git tracks, with litter that must stay out."""
    copy = tmp_path_factory.mktemp("clone")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for litter in ("fastclip/libfastclip_cpu.so", "fastclip/_build_report.txt", "tests/cached.pyc"):
        (copy / litter).write_text("litter")
    out = tmp_path_factory.mktemp("sdist")
    code = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv.pop())"
    run(sys.executable, "-c", code, str(out), cwd=copy)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the source distribution alone, as pip does it."""
    modern = libraries.torch_version() >= libraries.OLDEST_TORCH
    out = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index")
    mode = "cpu" if modern and shutil.which(os.environ.get("CXX") or "c++") else "none"
    run(*build, "--wheel-dir", str(out), str(sdist), cwd=out, FASTCLIP_BUILD=mode)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel installed into a folder of its own, beside the torch of this environment."""
    folder = tmp_path_factory.mktemp("site")
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile")
    run(*install, "--target", str(folder), str(wheel), cwd=folder)
    return folder


@pytest.fixture
def fastclip_(site, tmp_path):
    """Run the installed command in an empty directory; returns what it printed."""

    def call(*arguments: str) -> str:
        command = [sys.executable, str(site / "bin" / "fastclip"), *arguments]
        return run(*command, cwd=tmp_path, PYTHONPATH=str(site)).stdout

    return call


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def has_library(wheel: Path) -> bool:
    return LIBRARY in names_in(wheel)


def test_sdist_holds_what_git_tracks(sdist):
    with tarfile.open(sdist) as archive:
        members = [m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()]
    held = {m for m in members if ".egg-info/" not in m} - MADE
    expected = {name for name in tracked() if not name.startswith(CLONE_ONLY)}
    assert held == expected, (sorted(held - expected), sorted(expected - held))


def test_wheel_holds_the_package_and_nothing_else(wheel):
    held = {name for name in names_in(wheel) if ".dist-info/" not in name}
    made = {LIBRARY, "fastclip/_build_report.txt"} if has_library(wheel) else {"fastclip/_build_report.txt"}
    expected = {name for name in tracked() if name.startswith("fastclip/")} | made
    assert held == expected, (sorted(held - expected), sorted(expected - held))


def test_wheel_serves_any_python_3(wheel):
    kind = "py3-none-linux" if has_library(wheel) and sys.platform == "linux" else "py3-none-"
    assert kind in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        report = archive.read("fastclip/_build_report.txt").decode()
        if has_library(wheel):
            assert report.startswith("native CPU library built with torch")
            library = archive.read(LIBRARY)
            assert str(Path(fastclip.__file__).parent).encode() not in library and b"/tmp/" not in library


def test_wheel_metadata_is_complete(wheel):
    about = metadata(wheel)
    assert (about["Name"], about["Version"]) == ("torch-fastclip", fastclip.__version__)
    assert about["License-Expression"] == "BSD-3-Clause AND MIT" and about["Requires-Python"] == ">=3.10"
    required = [r for r in about.get_all("Requires-Dist") if "extra ==" not in r]
    assert required == ["torch>=2.6"]
    licences = about.get_all("License-File")
    vendored = [n for n in tracked() if n.startswith("fastclip/") and "LICENSE" in n]
    assert sorted(licences) == sorted(["LICENSE", *vendored])
    texts = {name.partition(".dist-info/licenses/")[2] for name in names_in(wheel)} - {""}
    assert texts == set(licences)


def test_extras_that_are_named_exist(wheel):
    """In the documentation, in messages and in the metadata itself; and all of them bring something."""
    provided = set(metadata(wheel).get_all("Provides-Extra"))
    assert provided == EXTRAS
    named = set()
    for name in tracked():
        if name.endswith((".md", ".py", ".toml", ".ipynb", ".html")) and not name.startswith("tests/"):
            text = (ROOT / name).read_text(encoding="utf-8")
            for listed in re.findall(r"torch-fastclip\[([\w, ]+)\]", text):
                named |= {extra.strip() for extra in listed.split(",")}
    assert "demo" in named and named <= provided, named - provided
    brought = " ".join(metadata(wheel).get_all("Requires-Dist"))
    assert all(f'extra == "{extra}"' in brought for extra in provided)


def test_installed_doctor_works(fastclip_, wheel, site):
    output = fastclip_("doctor")
    assert output.startswith(f"fastclip  {fastclip.__version__} at {site}")
    assert ("native     in use" in output) == has_library(wheel)


def test_installed_demo_and_the_commands_it_prints_work(fastclip_, site, tmp_path):
    pytest.importorskip("plotext")
    pytest.importorskip("tqdm")
    output = fastclip_("demo", "run", "--quick", "--threads", "1")
    assert "Passed: the two trainings agree" in output and "fastclip lint run" in output
    code = "import sys; from fastclip.cli import main; print([main(line.split()) for line in sys.argv[1:]])"
    lines = ("report run -o report.html", "incidents run", "lint run")
    shown = run(sys.executable, "-c", code, *lines, cwd=tmp_path, PYTHONPATH=str(site)).stdout
    assert shown.endswith("[0, 0, 1]\n") and "whole" in shown and "nonfinite" in shown
    assert "uPlot" in (tmp_path / "report.html").read_text(encoding="utf-8")  # the assets are there


IMPORTS = """
import importlib, pkgutil, sys
import torch

for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
    del sys.modules[name]  # torch uses it where it is there; an extra of ours brings it

class NothingElse:
    '''Refuses to import what is neither torch's, Python's nor the package's.'''
    known = set(sys.modules)
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = {"fastclip", "torch", "functorch"} | set(sys.stdlib_module_names)
        if top not in ours and top not in self.known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NothingElse())
import fastclip
for found in pkgutil.walk_packages(fastclip.__path__, "fastclip."):
    if found.name.startswith("fastclip.lib"):  # of ops, not of Python
        continue
    try:
        importlib.import_module(found.name)
        print(found.name, "imported")
    except ImportError as error:
        print(found.name, "refused", error)
print(fastclip.__file__, "file")
"""


def test_modules_import_or_name_their_extra(site, tmp_path):
    """With nothing but torch and Python's own library."""
    done = run(sys.executable, "-c", IMPORTS, cwd=tmp_path, PYTHONPATH=str(site))
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert lines.pop() == [str(site / "fastclip" / "__init__.py"), "file"]
    paths = [name for name in tracked() if re.fullmatch(r"fastclip/.*\.py", name)]
    modules = {path[:-3].removesuffix("/__init__").replace("/", ".") for path in paths}
    assert {name for name, *_ in lines} == modules - {"fastclip"}
    for name, outcome, *reason in lines:
        if outcome == "refused" and not name.startswith("fastclip.backends.triton."):
            assert re.search(r"pip install .*(torch-fastclip\[\w+\]|pytorch-lightning)", reason[0]), (
                name,
                reason,
            )
    assert sum(outcome == "imported" for _, outcome, *_ in lines) > 100


def test_dockerignore_keeps_what_a_wheel_is_built_from():
    """The package, its sources and what setup.py reads, and nothing that was built."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert allowed == {"csrc/", "fastclip/", "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert {"**/*.so", "**/__pycache__/", "fastclip/_build_report.txt"} <= set(lines)
    text = (ROOT / "Dockerfile").read_text()
    assert "FASTCLIP_BUILD=cuda" in text and re.search(r'^CMD \["fastclip", "doctor"\]$', text, re.MULTILINE)
    assert re.search(r"^USER \d+$", text, re.MULTILINE)
