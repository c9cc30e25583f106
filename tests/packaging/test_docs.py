# SPDX-License-Identifier: BSD-3-Clause
"""The pages of the documentation run as they are, and their links, commands and names are valid.

helpers/pages.py runs a page and says what a page may contain.
"""

import ast
import inspect
import json
import os
import re
from pathlib import Path

import pytest

import fastclip
from helpers import pages
from helpers.pages import ROOT, Block

DOCS = sorted((ROOT / "docs").glob("*.md"))
README = ROOT / "README.md"
SHOWN = [README, *DOCS]
LINKED = [
    *SHOWN,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
LAUNCHES = ("accelerate launch", "apt-get", "cd", "docker", "git", "make", "pip", "python -m pip", "torchrun")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# What the README says is the reader's own.
YOURS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
batches = [(x, x.sum(1, keepdim=True)) for x in torch.randn(12, 32, 8)]
loss_function, device = torch.nn.MSELoss(), "cpu"
"""


@pytest.mark.parametrize("path", SHOWN, ids=name)
def test_page_runs_from_top_to_bottom(path, tmp_path):
    blocks, _ = pages.read(path)
    if missing := pages.absent(blocks):
        pytest.skip(f"the page needs {', '.join(missing)}")
    directory = tmp_path / "page"
    directory.mkdir()
    pages.run(path, directory, YOURS if path == README else "")


@pytest.mark.parametrize("path", [*SHOWN, ROOT / "CONTRIBUTING.md"], ids=name)
def test_page_has_only_known_kinds_of_blocks(path):
    blocks, prose = pages.read(path)
    unknown = [
        f"line {b.line}: {b.language or 'no language'}" for b in blocks if b.language not in pages.LANGUAGES
    ]
    assert not unknown
    hidden = [number for number, line in enumerate(prose, 1) if re.match(r" {4}|\t|\s*<pre|\s*<code", line)]
    assert not hidden, f"code that no test would run, in the lines {hidden}"


def lines_of(language: str, path: Path) -> list[tuple[Block, str]]:
    blocks, _ = pages.read(path)
    joined = [(b, b.text.replace("\\\n", " ")) for b in blocks if b.language == language]
    return [(block, line) for block, text in joined for line in text.splitlines() if line.strip()]


def faults_of_a_launch(line: str, files: set[str]) -> list[str]:
    """Return what is wrong with a launch command, as far as can be checked without running it."""
    line = re.sub(r"\s+#.*", "", line).strip()
    plain = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
    faults = []
    if not any(plain == launch or plain.startswith(f"{launch} ") for launch in LAUNCHES):
        faults.append(f"begins with none of {', '.join(LAUNCHES)}")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    known_extras = re.findall(
        r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.M
    )
    for extras in re.findall(r"(?:\.|torch-fastclip)\[([\w,-]+)\]", line):
        unknown = set(extras.split(",")) - set(known_extras)
        faults += [f"there is no extra {extra}" for extra in sorted(unknown)]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if plain.startswith("make "):
        wanted = [word for word in plain.split()[1:] if "=" not in word and not word.startswith("-")]
        faults += [f"there is no target {word}" for word in wanted if word not in targets]
    if plain.startswith(("torchrun", "accelerate launch")):
        scripts = re.findall(r"\S+\.py\b", plain)
        faults += [f"no file {s}" for s in scripts if s not in files and not (ROOT / s).is_file()]
    known = variables()
    for variable in re.findall(r"\bFASTCLIP_\w+", line):
        faults += [] if variable in known else [f"nothing reads {variable}"]
    return faults


@pytest.mark.parametrize("path", SHOWN, ids=name)
def test_sh_blocks_have_valid_commands(path):
    blocks, _ = pages.read(path)
    files = {block.file for block in blocks if block.file}
    found = [(line, faults_of_a_launch(line, files)) for _, line in lines_of("sh", path)]
    assert not [(line, faults) for line, faults in found if faults]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("pip install --no-build-isolation '.[report,test]'", None),
        ("pip install '.[repotr]'", "there is no extra repotr"),
        ("make demo TORCH=torch==2.13.0", None),
        ("make dmeo", "there is no target dmeo"),
        ("torchrun --nproc-per-node=2 examples/fsdp2.py", None),
        ("torchrun --nproc-per-node=2 examples/fsdp3.py", "no file examples/fsdp3.py"),
        ("FASTCLIP_BUILD=cpu pip install .", None),
        ("FASTCLIP_BIULD=cpu pip install .", "nothing reads FASTCLIP_BIULD"),
        ("fastclip report runs/1", f"begins with none of {', '.join(LAUNCHES)}"),
    ],
)
def test_faults_of_a_launch_finds_invalid_commands(line, fault):
    assert faults_of_a_launch(line, set()) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("shown", "real", "same"),
    [
        ("step  40: norm 0.25", "step 7: norm 1e-05", True),
        ("step 40: norm nan", "step 40: norm 1.5", False),
        ("saved 1,024 files ... in 3 s", "saved 7 files of the run in 0.1 s", True),
        ("saved 7 files", "saved 7 files of the run", False),
        ("(a+b)", "(a+b)", True),
        ("step 4", "steps 4", False),
    ],
)
def test_missing_treats_numbers_and_dots_as_wildcards(shown, real, same):
    assert (pages.missing([shown], f"first\n{real}\nlast") is None) is same


def test_missing_requires_the_order_of_the_output():
    assert pages.missing(["a", "...", "c"], "a\nb\nc\n") is None
    assert pages.missing(["a", "", "...", "b"], "a\n\nb\n") is None
    assert pages.missing(["c", "a"], "a\nb\nc\n") == "a"


GOOD = """
# Page
```python
import torch
value = torch.ones(2)
```
```console
$ echo 3 files
1 files
# exit status 4
$ exit 4
```
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ("torch.ones(2)", "touch.ones(2)", "NameError"),
        ("torch.ones(2)", "torch.ones(2)\nassert value.sum() == 3", "line 6"),
        ("torch.ones(2)", "torch.ones(2); raise SystemExit(0)", "SystemExit"),
        ("torch.ones(2)", "torch.ones(2); import os; os._exit(0)", "the process died"),
        ("1 files", "1 file", "the output has no line"),
        ("$ exit 4", "$ exit 3", "exit status 3"),
        ("# exit status 4\n", "", "exit status 4"),
        ("$ exit 4\n", "", "a status above no command"),
        ("$ echo 3 files\n", "", "output above the first command"),
        ("# Page\n", "```python\n# training.py\nx = 1\n```\n", "nothing uses training.py"),
        ("$ exit 4\n```", "$ exit 4\n", "never closed"),
    ],
)
def test_run_fails_on_a_wrong_page(tmp_path, old, new, message):
    path, directory = tmp_path / "page.md", tmp_path / "page"
    directory.mkdir()
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1) if old else GOOD, encoding="utf-8")
    if message is None:
        pages.run(path, directory)
    else:
        with pytest.raises(AssertionError, match=re.escape(message)):
            pages.run(path, directory)


def test_run_writes_files_and_runs_commands_on_them(tmp_path):
    path, directory = tmp_path / "page.md", tmp_path / "page"
    directory.mkdir()
    text = """
```python
# training.py
import sys
def build(): return 5
if __name__ == "__main__": print("built", build(), sys.argv[1])
```
```python
import training
assert training.build() == 5 and __name__ == "__main__"
```
```console
$ python training.py now
built 4 now
$ python -c "import training, sys; print('again', training.build())" | cat
again 5
$ fastclip doctor
fastclip ... at ...
# exit status 2
$ fastclip diagnose nowhere
fastclip: ...
```
"""
    path.write_text(text, encoding="utf-8")
    pages.run(path, directory)


def slugs(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    anchors = set()
    for line in pages.read(path)[1]:
        if heading := re.match(r"#{1,6}\s+(.*?)\s*#*$", line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            anchors.add(f"{slug}-{found[slug]}" if found.get(slug) else slug)
            found[slug] = found.get(slug, 0) + 1
    return anchors


def links(path: Path) -> list[str]:
    """Return the targets of a page's links and images."""
    text = "\n".join(pages.read(path)[1])
    text = re.sub(r"`[^`\n]*`", lambda code: "x" * len(code[0]), text)
    return re.findall(r"\]\(\s*([^)\s]+)[^)]*\)", text) + re.findall(r"(?:href|src)=\"([^\"]+)\"", text)


def broken(path: Path) -> list[str]:
    """Return the links of a page to files or headings that do not exist in the repository."""
    bad = []
    for link in links(path):
        if re.match(r"https://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if ":" in file or not target.exists() or not (target == ROOT or ROOT in target.parents):
            bad.append(link)
        elif anchor and (target.suffix != ".md" or anchor not in slugs(target)):
            bad.append(link)
    return bad


@pytest.mark.parametrize("path", LINKED, ids=name)
def test_links_of_page_resolve(path):
    assert not broken(path)
    definitions = [line for line in pages.read(path)[1] if re.match(r"\s*\[[^\]]+\]:\s", line)]
    assert not definitions, "write links inline: no test checks reference links"


def test_broken_finds_links_that_do_not_resolve(monkeypatch, tmp_path):
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# The `name`, twice\n## A\n## A\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#the-name-twice) [c](#here) [d](other.md#a-1) [e](https://a.b)\n"
        "[f](othre.md) [g](other.md#the-names) [h](#there) [i](../x) [j](http://a.b) ![k](k.svg) `[l](l)`\n",
        encoding="utf-8",
    )
    assert broken(page) == ["othre.md", "other.md#the-names", "#there", "../x", "http://a.b", "k.svg"]


def test_contributing_names_only_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:csrc|docs|fastclip|tests)/[\w/.-]*)`", text))
    assert len(paths) > 20
    assert not sorted(path for path in paths if "NAME" not in path and not (ROOT / path).exists())


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8")) < 9000


def test_index_lists_every_page():
    index = ROOT / "docs" / "README.md"
    listed = {link.partition("#")[0] for link in links(index)}
    assert not {path.name for path in DOCS} - listed - {"README.md"}


QUICK_START = ROOT / "docs" / "quick_start.md"


def test_notebook_is_generated_from_its_page():
    written = json.loads(QUICK_START.with_suffix(".ipynb").read_text(encoding="utf-8"))
    assert written == pages.notebook(QUICK_START), "run `python tests/helpers/pages.py`"


@pytest.mark.slow  # a kernel of Jupyter; the page itself runs in `make test`
def test_notebook_prints_what_its_page_shows(tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    directory = tmp_path / "notebook"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{pages.shims(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    run = nbformat.read(QUICK_START.with_suffix(".ipynb"), as_version=4)
    client = nbclient.NotebookClient(
        run, timeout=pages.SECONDS, resources={"metadata": {"path": str(directory)}}
    )
    client.execute()
    printed = [
        "".join(o.get("text", "") for o in cell.outputs) for cell in run.cells if cell.cell_type == "code"
    ]
    blocks = [b for b in pages.read(QUICK_START)[0] if b.language in ("python", "console")]
    assert len(printed) == len(blocks)
    for block, output in zip(blocks, printed, strict=True):
        shown = [c.shown for c in pages.commands(block)] if block.language == "console" else []
        assert pages.missing([line for lines in shown for line in lines], output) is None
    assert (directory / "report.html").stat().st_size > 10_000


def code() -> str:
    """Return all code in the README and the pages: blocks, and words between backticks."""
    text = []
    for path in SHOWN:
        blocks, prose = pages.read(path)
        text += [block.text for block in blocks]
        text += re.findall(r"`([^`\n]+)`", "\n".join(prose))
    return "\n".join(text)


def variables() -> set[str]:
    """Return the environment variables that the package and its build read."""
    sources = [ROOT / "setup.py", *(ROOT / "fastclip").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    return set(re.findall(r"\"((?:FASTCLIP|TORCH_CUDA)_[A-Z_]+)\"", text)) - {"TORCH_CUDA_VERSION"}


PUBLIC = [fastclip, fastclip.policies, fastclip.monitor]


def arguments(value: object) -> set[str]:
    """Return the names of the arguments of a function, or of a class and its public methods."""
    if not callable(value):
        return set()
    found = set()
    functions = [value]
    if inspect.isclass(value):
        functions += [v for n, v in vars(value).items() if not n.startswith("_") and inspect.isroutine(v)]
    for function in functions:
        try:
            parameters = inspect.signature(inspect.unwrap(getattr(function, "__func__", function))).parameters
        except (TypeError, ValueError):
            continue
        found |= {p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    return {name for name in found if not name.startswith("_")} - {"self", "cls"}


def members(value: object) -> set[str]:
    """Return the public attributes and methods that a class defines itself."""
    if not inspect.isclass(value):
        return set()
    return {
        name for name in (*vars(value), *vars(value).get("__annotations__", {})) if not name.startswith("_")
    }


def public() -> dict[str, set[str]]:
    """Return every public name with the names of its arguments and members."""
    found = {}
    for module in PUBLIC:
        for key in module.__all__:
            value = getattr(module, key)
            where = f"{module.__name__}.{key}"
            found[where] = {key}
            if not inspect.ismodule(value):
                found[where] |= arguments(value) | members(value)
    for module in ("accelerate", "lightning", "lightning_callback", "transformers"):
        found |= classes_in(ROOT / "fastclip" / "integrations" / f"{module}.py")
    return found


def classes_in(path: Path) -> dict[str, set[str]]:
    """Return the classes of a file with the arguments of their constructors, without importing it."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            starts = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
            constructor = {a.arg for f in starts for a in (*f.args.args, *f.args.kwonlyargs)} - {"self"}
            found[f"{path.stem}.{node.name}"] = {node.name, *constructor}
    return found


# Called by other modules of fastclip only. Users do not create GradStats.
INTERNAL = {
    "fastclip.GradStats": {"nonfinite_per_rank", "inv_scale", "summary"},
    "fastclip.Handle": {"discard_prepared", "inside_scaler_step", "prepare"},
    "fastclip.monitor.Incidents": {"store"},
    "lightning_callback.TrainerHooks": {"TrainerHooks"},
}


def test_pages_mention_every_public_name_and_argument():
    words = set(re.findall(r"\w+", code()))
    named = {where: names - INTERNAL.get(where, set()) for where, names in public().items()}
    assert {"fastclip.Monitor", "fastclip.policies.ZClip", "transformers.FastclipCallback"} <= set(named)
    assert not {where: sorted(names - words) for where, names in named.items() if names - words}


MONITOR = ROOT / "docs" / "monitor.md"


def rows(path: Path) -> list[list[str]]:
    """Return the cells of all tables of a page."""
    lines = [line for line in pages.read(path)[1] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_monitor_page_has_the_meanings_of_all_record_fields():
    documented = {cells[0].strip("` "): cells[1] for cells in rows(MONITOR) if len(cells) == 2}
    meanings = fastclip.monitor.MEANINGS
    assert {name: documented.get(name) for name in meanings} == meanings


def test_monitor_page_has_every_detector_with_its_thresholds():
    documented = {cells[0].strip("` "): cells for cells in rows(MONITOR) if len(cells) == 3}
    for detector in fastclip.monitor.default_detectors():
        parameters = inspect.signature(type(detector)).parameters.values()
        thresholds = ", ".join(f"{p.name}={p.default!r}" for p in parameters)
        assert documented[detector.kind][2] == f"`{type(detector).__name__}({thresholds})`"
        named = set(re.findall(r"`(\w+)`", documented[detector.kind][1]))
        assert named - {"info"} <= {p.name for p in parameters}


def test_readme_shows_the_replay_output_of_the_incidents_page():
    blocks, _ = pages.read(README)
    shown = [b.text for b in blocks if b.language == "text" and "$ fastclip replay" in b.text]
    assert len(shown) == 1
    page = (ROOT / "docs" / "incidents.md").read_text(encoding="utf-8")
    command, *lines = shown[0].splitlines()
    assert command.split()[-1] in page and all(line in page for line in lines)


def test_readme_figures_are_those_of_the_benchmarks_page():
    of_all = [cells for cells in rows(ROOT / "docs" / "benchmarks.md") if len(cells) >= 8]
    of_all = [[*cells[:4], *cells[5:7]] for cells in of_all]
    figures = [cells for cells in rows(README) if len(cells) == 6 and cells[3].endswith("x**")]
    assert len(figures) >= 5 and all(cells in of_all for cells in figures)


def test_pages_mention_every_environment_variable():
    assert len(variables()) >= 4
    assert not variables() - set(re.findall(r"\w+", code()))
