# SPDX-License-Identifier: BSD-3-Clause
"""Sphinx configuration of the site that `make docs` builds in build/site.

The pages are the Markdown files of docs/, the API reference comes from the docstrings. The source directory
is the repository itself, so that a page can link to CONTRIBUTING.md or benchmarks/ as on GitHub.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import fastclip

project = "fastclip"
version = release = fastclip.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/README"
include_patterns = ["docs/*.md", "docs/reference/*.rst", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/*.md"]

html_theme = "furo"
html_title = f"fastclip {version}"
html_extra_path = ["index.html"]
html_copy_source = False

myst_heading_anchors = 4
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

# A reference that cannot be resolved is a warning, and `make docs` fails on warnings. The exceptions are
# types in signatures that have no page here: those of Python and torch, and private ones.
PAGES = "backends|logs|monitor|monitor.detectors|monitor.sinks|policies|replay|report"
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(?!fastclip\.).*"),
    ("py:class", rf"fastclip\.(?!({PAGES})\.[A-Z])[a-z_.]+\.[A-Z]\w*"),
    ("py:.*", r"torch\..*"),
]


def add_navigation(app, docname, source):
    """Give the site the sections and links of the index page as its navigation."""
    if docname == root_doc:
        sections = re.split(r"^\*\*(.+)\*\*$", source[0], flags=re.MULTILINE)[1:]
        for caption, text in zip(sections[::2], sections[1::2], strict=True):
            pages = "\n".join(re.findall(r"\]\(([\w/.]+\.(?:md|rst))\)", text))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n{pages}\n```\n"


def setup(app):
    app.connect("source-read", add_navigation)
