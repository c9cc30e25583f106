# SPDX-License-Identifier: BSD-3-Clause
"""docs/stability.md lists exactly what is public."""

import importlib
import re
from pathlib import Path

import pytest

import fastclip
from fastclip.cli import _COMMANDS
from fastclip.monitor.incidents import files
from fastclip.monitor.sinks import jsonl
from fastclip.monitor.sinks.scalars import TAGS

PAGE = Path(__file__).parents[2] / "docs" / "stability.md"
INTEGRATIONS = Path(fastclip.__file__).parent / "integrations"
HELPERS = ("__init__", "lightning_callback", "lightning_checks", "monitor_options", "trainer_run")
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
if not TEXT:
    pytest.skip("the tests run without the documentation", allow_module_level=True)


def rows(heading: str) -> dict[str, str]:
    """First and second cell of the table below a heading."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split(" | ", 1) for line in section.splitlines() if line.startswith("|")]
    return {first.strip(" `"): second for first, second in cells[2:]}


def test_public_names_are_those_of_each_module():
    listed = rows("Public names")
    for module, names in listed.items():
        found = re.findall(r"`(\w+)`", names)
        imported = importlib.import_module(module)
        assert all(hasattr(imported, name) for name in found), module
        assert set(found) == set(imported.__all__), module
    assert list(listed)[:4] == ["fastclip", "fastclip.backends", "fastclip.policies", "fastclip.monitor"]
    integrations = {f"fastclip.integrations.{path.stem}" for path in INTEGRATIONS.glob("*.py")}
    helpers = {f"fastclip.integrations.{name}" for name in HELPERS}
    assert {name for name in listed if "integrations" in name} == integrations - helpers


def test_api_reference_has_every_public_module():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (PAGE.parent / "reference").glob("*.rst"))
    modules = re.findall(r"^\.\. automodule:: (\S+)$", text, re.MULTILINE)
    assert sorted(modules) == sorted(rows("Public names"))


def test_commands_have_the_exit_statuses_of_their_help():
    listed = rows("Commands")
    commands = {f"fastclip {module.__name__.rpartition('.')[2]}": module for module in _COMMANDS}
    assert set(listed) == set(commands)
    for name, module in commands.items():
        documented = re.search(r"Exit status: (.*?)\n\n", module.__doc__ + "\n\n", re.DOTALL)
        own = set(re.findall(r"\b[0-3]\b", documented[1])) if documented else {"0"}
        assert set(re.findall(r"\b[0-3]\b", listed[name])) == own, name


def test_file_formats_have_the_versions_of_the_code():
    text = " ".join(rows("Files").values())
    assert f"`{jsonl.VERSION_KEY}` {jsonl.FORMAT} " in text
    assert f"`{files.VERSION_KEY}` {files.FORMAT} " in text


def test_tags_are_those_of_the_scalars():
    section = TEXT.split("The tags of the scalars")[1].split("\n\n")[0]
    assert set(re.findall(r"`([\w/]+)`", section)) == set(TAGS.values())


def test_oldest_versions_are_those_of_pyproject():
    listed = rows("Python and torch")
    project = (PAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={listed["Python"].split(" |")[0].strip()}"' in project
    assert f'"torch>={listed["torch"].split(" |")[0].strip()}"' in project
    oldest = ".".join(map(str, fastclip.backends.libraries.OLDEST_TORCH))
    assert listed["compiled kernels"].startswith(f"torch {oldest} ")
