# The two commands of the README, and the others. Each target sets up what it needs on first use.
SHELL := /bin/bash -o pipefail
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# the tests start many processes: bytecode is written once
unexport PYTHONDONTWRITEBYTECODE
# uv installs in a fifth of pip's time and shows its progress; pip is for where uv cannot, as with an index that is named
# in pip's configuration alone
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
UV := $(BIN)/uv pip install --python $(BIN)/python -c constraints.txt
install_with = $(PIP) --quiet uv && $(UV) $(1) || $(PIP) --no-compile $(1)

.PHONY: help install quickstart test lint newest ci check format golden bench docs film
help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dtrain needs Python 3.11 or newer; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing dtrain into $(VENV)/, once"
	@$(call install_with,-e '.[all]')
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing dtrain and what its tests need into $(VENV)/, once"
	@$(call install_with,-e '.[dev]')
	@touch $@ $(VENV)/.core

install: $(VENV)/.core ## create .venv and install dtrain into it

quickstart: $(VENV)/.core ## train on real handwritten digits, in seconds
	$(BIN)/dtrain run mlp-digits

test: $(VENV)/.dev ## run the quick tests, or some of them: TESTS=tests/data
	$(BIN)/pytest -m "not slow and not nightly and not gpu and not tpu_compiler and not gpu_compiler" $(TESTS)

lint: $(VENV)/.dev ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright --level error --pythonpath $(BIN)/python

newest: $(VENV)/.dev ## run the quick tests and those marked newest, with PYTHON=python3.12 VENV=.venv-newest
	$(BIN)/pytest -m "(not slow or newest) and not nightly and not gpu and not tpu_compiler and not gpu_compiler" $(TESTS)

ci: lint ## run what CI runs of every change
	$(BIN)/pytest -m "not nightly and not gpu and not gpu_compiler"

check: lint ## run everything: format, lint, types, all tests, with commands compiled as a user's are
	DTRAIN_TEST_OPTIMISED=1 $(BIN)/pytest -m "not gpu and not gpu_compiler"

format: $(VENV)/.dev ## format the code and apply lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: $(VENV)/.dev ## rewrite tests/golden; review the diff
	DTRAIN_GOLDEN=write $(BIN)/pytest -m "not gpu and not gpu_compiler"

film: $(VENV)/.dev ## record the terminal of the README, docs/images/film.svg
	$(BIN)/python docs/film.py

docs: $(VENV)/.dev ## build the site of the documentation into build/site, with every link checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"

bench: $(VENV)/.dev ## run every benchmark that needs no accelerator, or BENCH="loop_overhead ..."; writes benchmarks/results
	$(BIN)/python benchmarks/record_results.py $(BENCH)
