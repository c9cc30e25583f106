# SPDX-License-Identifier: BSD-3-Clause
"""The tests of the integrations, run with the oldest versions of the libraries that they support."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent
REQUIREMENTS = HERE / "oldest" / "requirements.txt"
LIGHTNING = sorted(path.name for path in HERE.glob("test_lightning*.py"))

# In another process, where the directory of old versions comes first: no import before the check.
PROGRAM = """
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest

directory, requirements, *arguments = sys.argv[1:]
for line in open(requirements):
    if "==" in line:
        name, _, wanted = line.strip().partition("==")
        assert version(name) == wanted, f"{name} {version(name)}, not {wanted}"
for name in ("transformers", "accelerate", "lightning", "pytorch_lightning"):
    assert find_spec(name).origin.startswith(directory), find_spec(name).origin
sys.exit(pytest.main(arguments))
"""


def directory_of_old_versions() -> str:
    given = os.environ.get("FASTCLIP_OLDEST", os.path.join(sys.prefix, "oldest"))
    if os.path.isdir(given):
        return given
    command = f"{sys.executable} -m pip install --target {given} --no-deps -r {REQUIREMENTS}"
    reason = f"the oldest versions are not in {given}: {command}"
    if os.environ.get("FASTCLIP_TEST_OLDEST") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


# Each takes half a minute; `make test` runs one.
@pytest.mark.parametrize(
    "files",
    [pytest.param(("test_transformers.py", "test_accelerate.py"), marks=pytest.mark.slow), LIGHTNING],
)
def test_integrations_work_with_the_oldest_versions(files):
    directory = directory_of_old_versions()
    paths = [str(HERE / name) for name in files]
    arguments = [directory, str(REQUIREMENTS), "-q", "-p", "no:cacheprovider", *paths]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([directory, str(TESTS)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    output = result.stdout[-6000:] + result.stderr[-2000:]
    assert result.returncode == 0, output
    last = result.stdout.strip().splitlines()[-1]
    assert re.search(r"\b\d+ passed\b", last), output
    assert not re.search(r"skipped|failed|error", last), output
