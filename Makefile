# Two commands do everything on a fresh machine: make demo, make test.
# Each target creates .venv and builds the native module if needed; after the first time, that is quick.

SHELL  := /bin/bash
# A Python that is named (make test PYTHON=python3.13) gets a virtual environment of its own.
ifeq ($(origin PYTHON),undefined)
PYTHON := python3
VENV   := .venv
else
VENV   := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
endif
BIN    := $(VENV)/bin
UV     := $(shell command -v uv 2>/dev/null)
NATIVE := $(shell find src/rust -name '*.rs' -not -path '*/target/*') src/rust/Cargo.toml src/rust/Cargo.lock
PIP    := $(if $(UV),$(UV) pip,$(BIN)/python -m pip --disable-pip-version-check)
CARGO  := cargo --locked
CRATE  := --manifest-path src/rust/Cargo.toml
export CARGO_TARGET_DIR := $(CURDIR)/target
export VIRTUAL_ENV      := $(CURDIR)/$(VENV)
export PATH             := $(CURDIR)/$(BIN):$(PATH)
export MATURIN_PEP517_ARGS := --locked

.PHONY: help demo test soak check bench docs browser wheel lock clean
help:
	@echo "make demo     a real private study on this machine: servers, devices, estimates next to the truth"
	@echo "make test     all tests"
	@echo "make soak     a long fault test of two operators (SOAK_SECONDS=600, SEED=...), which prints its seed"
	@echo "make check    lint, types, import layers, clippy"
	@echo "make bench    all benchmarks"
	@echo "make docs     the documentation, into docs/_build/html"
	@echo "make browser  Chromium for the console's tests (the only target that installs a system package)"
	@echo "make wheel    a wheel, into dist/"
	@echo "make lock     recompute the lock files"
	@echo "make clean    remove everything that was built"

# --- bootstrap -----------------------------------------------------------------------------------

$(VENV)/.python: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Chorister needs Python 3.11 or newer: install it, or name one with 'make PYTHON=/path/to/python3 ...'." >&2; exit 1; }
ifdef UV
	@test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@echo "installing Python packages into $(VENV)"
	@$(PIP) sync --quiet --compile-bytecode --require-hashes requirements.lock
else
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "Python's venv module is missing: install it (Debian: apt-get install python3-venv), or install uv." >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade >/dev/null
	@echo "installing Python packages into $(VENV)"
	@$(PIP) install --quiet --no-deps --require-hashes -r requirements.lock
endif
	@test -e .venv || ln -s $(VENV) .venv
	@touch $@

# Bytecode is compiled once, in case Python can't write it later: the demo and the tests start many processes.
# The editable install builds the native module in release mode, into src/chorister.
$(VENV)/.native: $(VENV)/.python $(NATIVE) pyproject.toml
	@command -v cargo >/dev/null || \
	  { echo "Chorister's native module needs Rust 1.89 or newer: install it with rustup, then run make again." >&2; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
	  { echo "Rust needs a C compiler to link: install one (Debian: apt-get install gcc), then run make again." >&2; exit 1; }
	@echo "building the native module; the first time this takes a minute or two"
	@$(PIP) install --quiet --no-deps --no-build-isolation $(if $(UV),--reinstall,) --editable .
	@$(BIN)/python -m compileall -q src/chorister
	@touch $@

# --- what people call ----------------------------------------------------------------------------

demo: $(VENV)/.native
	@$(BIN)/chorister demo

# By file: the code blocks of a page build on each other. Skipped tests are listed with their reasons; with CI=true a skipped test has failed.
# Every core has a worker already, so threads of linear algebra would only wait for each other.
test: $(VENV)/.native
	@$(CARGO) test $(CRATE) --quiet --no-default-features
	@OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile $(PYTEST_ARGS)

# Kills and cuts everything at random moments; a seed that fails goes into tests/faults/test_storm.py.
SOAK_SECONDS ?= 600
soak: $(VENV)/.native
	@$(BIN)/python -m tests.faults.storm --seconds $(SOAK_SECONDS) $(if $(SEED),--seed $(SEED))

check: $(VENV)/.native
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --config pyproject.toml
	@cargo fmt $(CRATE) --check
	@$(CARGO) clippy $(CRATE) --quiet --all-targets -- -D warnings

bench: $(VENV)/.native
	@for bench in benchmarks/[a-z]*.py; do echo "== $$bench"; $(BIN)/python $$bench || exit 1; done

docs: $(VENV)/.native
	@$(BIN)/sphinx-build -W -q docs docs/_build/html
	@echo "docs/_build/html/index.html"

browser:
	@command -v chromium >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends chromium; }
	@test -e target/axe/node_modules/axe-core/axe.min.js || npm install --silent --no-audit --no-fund --prefix target/axe axe-core@4.14.0

wheel: $(VENV)/.native
	@$(BIN)/maturin build --quiet --release --locked --out dist
	@ls dist

lock:
	@test -n "$(UV)" || { echo "make lock needs uv: install it with 'pip install uv'." >&2; exit 1; }
	@$(UV) pip compile --quiet --universal --generate-hashes --no-header --python-version 3.11 \
	  --all-extras --group dev pyproject.toml --output-file requirements.lock
	@cargo update $(CRATE) --workspace

clean:
	@rm -rf .venv .venv-* target dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@rm -f src/chorister/_native*.so
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
