# SPDX-License-Identifier: BSD-3-Clause
"""Run a page of the documentation, for test_docs.py.

A page runs in its own process and an empty directory: its ```python blocks from top to bottom in one
namespace, its ```console blocks where they are between them. The processes are forked from one that has
imported fastclip, since importing torch takes longer than running most pages. A ```python block whose first
line is `# NAME.py` is a file: it is written, not run, and a later block has to use it. ```sh blocks are only
checked, ```text blocks are ignored, and there may be no other fences.
"""

import ast
import contextlib
import importlib.util
import io
import json
import linecache
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "console", "sh", "text")
SECONDS = 120  # for a block; it is there so that a page that hangs fails
_PATTERNS = {
    "any": r".*",
    "number": r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?",
    "space": r"\s+",
}
_TOKEN = re.compile(r"(?P<any>\.\.\.)|(?P<number>\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)|(?P<space>\s+)")
# What a command needs beside torch, and what an import in a page needs.
_EXTRAS = ("accelerate", "lightning", "plotext", "rich", "tensorboard", "tqdm", "transformers")
_NEEDS = {"fastclip demo": ("plotext", "tqdm"), "fastclip bench": ("rich",)}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the number of its first line in the page."""

    language: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that a Python block contains; None if the block is run."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found and self.language == "python" else None


def read(path: Path) -> tuple[list[Block], list[str]]:
    """Return the fenced blocks of a page and its other lines (blank where a block is)."""
    blocks: list[Block] = []
    prose: list[str] = []
    opened: tuple[str, int] | None = None
    body: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fence = re.match(r"\s*(```+|~~~+)\s*(.*)$", line)
        if opened is None and fence:
            assert line.startswith("```"), f"{path.name}:{number}: a fence is three backticks at the margin"
            opened, body = (fence[2].strip(), number + 1), []
        elif opened is not None and fence:
            assert line.rstrip() == "```", f"{path.name}:{number}: a fence inside a block"
            blocks.append(Block(opened[0], "".join(f"{text}\n" for text in body), opened[1]))
            opened = None
        elif opened is not None:
            body.append(line)
            prose.append("")
            continue
        prose.append("" if fence else line)
    assert opened is None, f"{path.name}:{opened and opened[1]}: the block is never closed"
    return blocks, prose


@dataclass(frozen=True)
class Command:
    """A line `$ ...` of a console block, its expected exit status, and the lines shown below it."""

    text: str
    status: int
    shown: list[str]
    line: int


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a console block."""
    lines = block.text.splitlines()
    status, i = 0, 0
    while i < len(lines):
        start = block.line + i
        if found := re.fullmatch(r"# exit status (\d+)", lines[i]):
            status = int(found[1])
            i += 1
            assert i < len(lines) and lines[i].startswith("$ "), f"line {start}: a status above no command"
            continue
        assert lines[i].startswith("$ "), f"line {start}: output above the first command, or a comment"
        text = lines[i][2:]
        while text.endswith("\\"):
            i += 1
            text = text[:-1] + lines[i]
        i += 1
        shown = []
        while i < len(lines) and not re.match(r"\$ |# exit status \d+$", lines[i]):
            shown.append(lines[i])
            i += 1
        yield Command(text, status, shown, start)
        status = 0


def pattern(line: str) -> re.Pattern:
    """Return a pattern for a shown line: a number matches any number, `...` any text, space any space."""
    parts, end = [], 0
    line = line.strip()
    for token in _TOKEN.finditer(line):
        parts.append(re.escape(line[end : token.start()]) + _PATTERNS[token.lastgroup])
        end = token.end()
    return re.compile("".join(parts) + re.escape(line[end:]))


def missing(shown: list[str], output: str) -> str | None:
    """Return the first shown line that is missing in the output, in the order shown, or None.

    The output may have other lines in between, with or without a shown line `...`.
    """
    lines = iter(re.split(r"[\n\r]+", output))
    for line in shown:
        wanted = pattern(line)
        if line.strip() not in ("", "...") and not any(wanted.fullmatch(real.strip()) for real in lines):
            return line
    return None


def absent(blocks: list[Block]) -> list[str]:
    """Return the packages that the code and the commands of a page need and that are not installed."""
    found: set[str] = set()
    for block in blocks:
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found.update(part for name in names for part in name.split(".") if part in _EXTRAS)
        elif block.language == "console":
            for words, packages in _NEEDS.items():
                found.update(packages if words in block.text else ())
    return sorted(name for name in found if importlib.util.find_spec(name) is None)


def run(path: Path, directory: Path, before: str = "") -> None:
    """Run a page in a directory, after the code `before`.

    Raises:
        AssertionError: with the line that is wrong.
    """
    blocks, _ = read(path)
    commands_at = shims(directory.with_name(directory.name + "_bin"))
    with Page(path, directory, commands_at) as page:
        if before:
            page.execute(Block("python", before, 1))
        for number, block in enumerate(blocks):
            if block.file is not None:
                stem = block.file.removesuffix(".py")
                below = "".join(later.text for later in blocks[number + 1 :])
                assert re.search(rf"\b{stem}\b", below), (
                    f"{path.name}:{block.line}: nothing uses {block.file}"
                )
                (directory / block.file).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                page.execute(block)
            elif block.language == "console":
                for command in commands(block):
                    status, output = page.shell(command.text)
                    where = f"{path.name}:{command.line}: {command.text}"
                    assert status == command.status, f"{where}\nexit status {status}\n{output}"
                    line = missing(command.shown, output)
                    assert line is None, f"{where}\nthe output has no line\n{line}\nbut is\n{output}"


class Page:
    """The processes of one page."""

    def __init__(self, path: Path, directory: Path, shims: Path) -> None:
        self.path, self.directory = path, directory
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.environment["PATH"] = f"{shims}{os.pathsep}{os.environ.get('PATH', '')}"
        for name in ("TRITON_INTERPRET", "FASTCLIP_BACKEND", "FASTCLIP_CPU_CAPABILITY"):
            self.environment.pop(name, None)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch._dynamo", "fastclip.cli", "pytest"])

    def __enter__(self) -> "Page":
        self.connection, theirs = self.context.Pipe()
        self.process = self.context.Process(
            target=_serve_blocks, args=(theirs, str(self.path), str(self.directory), self.environment)
        )
        self.process.start()
        theirs.close()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.connection.close()
        self.process.join(30)
        ends = self.process.exitcode
        if ends is None:
            self.process.kill()
            self.process.join()
        if kind is None:
            assert ends is not None, f"{self.path.name}: the process does not end, something still runs in it"
            assert ends == 0, f"{self.path.name}: the process ends with {ends}"

    def execute(self, block: Block) -> None:
        """Run a Python block in the namespace of the blocks before it."""
        where = f"{self.path.name}:{block.line}"
        self.connection.send((block.text, block.line))
        try:
            assert self.connection.poll(SECONDS), f"{where}: still running after {SECONDS} s"
            problem = self.connection.recv()
        except EOFError:
            self.process.join(10)
            raise AssertionError(f"{where}: the process died with {self.process.exitcode}") from None
        assert problem is None, f"{where}\n{problem}"

    def shell(self, text: str) -> tuple[int, str]:
        """Run a command as bash would; return its status and output.

        A plain `fastclip ...` or `python FILE.py ...` does not need a shell, nor an import of torch.
        """
        words = [] if re.search(r"[|&;<>$`*?#~(){}\[\\]", text) else shlex.split(text)
        if words[:1] != ["fastclip"] and not (
            words[:1] == ["python"] and words[1:2] and words[1][-3:] == ".py"
        ):
            return self._bash(text)
        record = self.directory.with_name(self.directory.name + "_output")
        process = self.context.Process(
            target=_serve_command, args=(words, str(self.directory), self.environment, str(record))
        )
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
        output = record.read_text(encoding="utf-8", errors="replace")
        assert process.exitcode is not None, f"{text}: still running after {SECONDS} s\n{output}"
        return process.exitcode, output

    def _bash(self, text: str) -> tuple[int, str]:
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{text}: still running after {SECONDS} s") from None
        return process.returncode, output


def notebook(path: Path) -> dict:
    """Return a page as a notebook: text in Markdown cells, code in code cells, commands as `!` lines."""
    cells: list[dict] = []
    text = path.read_text(encoding="utf-8")
    for number, part in enumerate(re.split(r"^```(python|console)\n(.*?)^```\n", text, flags=re.M | re.S)):
        place = number % 3
        if place == 0 and part.strip():
            cells.append({"cell_type": "markdown", "source": part.strip()})
        elif place == 1:
            language = part
        elif place == 2:
            block = Block(language, part, 1)
            lines = part.rstrip()
            if language == "console":
                lines = "\n".join(f"!{command.text}" for command in commands(block))
            cells.append({"cell_type": "code", "source": lines, "execution_count": None, "outputs": []})
    for index, cell in enumerate(cells):
        cell |= {"id": f"cell-{index}", "metadata": {}, "source": cell["source"].splitlines(keepends=True)}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write_notebook(path: Path) -> None:
    """Write the notebook of a page next to it."""
    text = json.dumps(notebook(path), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    path.with_suffix(".ipynb").write_text(text, encoding="utf-8")


def shims(directory: Path) -> Path:
    """Make a directory for PATH in which `fastclip` and `python` are those of this interpreter."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, more in (("fastclip", " -m fastclip"), ("python", "")):
        shim = directory / name
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{more} "$@"\n', encoding="utf-8")
        shim.chmod(0o755)
    return directory


def _enter(directory: str, environment: dict[str, str]) -> None:
    """Make this forked process equal to a fresh one in the directory."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:] = [directory, *(entry for entry in sys.path if Path(entry) != Path(__file__).parents[1])]
    torch.set_num_threads(1)


def _serve_blocks(connection, path: str, directory: str, environment: dict[str, str]) -> None:
    """Run blocks until the other side closes the connection; answer None or the error of each."""
    _enter(directory, environment)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv[:] = [""]
    linecache.getlines(path)  # the lines of a traceback are those of the page
    warnings.filterwarnings("error", message="fastclip.Monitor:")  # a defect that a training survives
    while True:
        try:
            source, line = connection.recv()
        except EOFError:
            return
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                exec(compile("\n" * (line - 1) + source, path, "exec"), main.__dict__)
            answer = None
        except BaseException:
            answer = traceback.format_exc() + output.getvalue()[-4000:]
        connection.send(answer)


def _serve_command(words: list[str], directory: str, environment: dict[str, str], record: str) -> None:
    """Run `fastclip ...` or `python FILE.py ...` with its output in a file; exit with its status."""
    import runpy

    with open(record, "wb") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", buffering=1) for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    _enter(directory, environment)
    if words[0] == "fastclip":
        from fastclip.cli import main

        sys.argv[:] = words
        sys.exit(main(words[1:]))
    sys.argv[:] = words[1:]
    runpy.run_path(os.path.abspath(words[1]), run_name="__main__")


if __name__ == "__main__":
    write_notebook(ROOT / "docs" / "quick_start.md")
