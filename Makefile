# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv itself.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-deploy lint bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(READY)

setup: $(READY)  ## make .venv with everything that the other commands need

demo: $(READY)  ## train on imbalanced digits and show how the minority fares (about a minute)
	$(BIN)/equipoise demo

test: $(READY) lint  ## lint, types, tests and every code block of the docs
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-deploy: $(READY)  ## a real SuperLink and real sites on this machine, with TLS and keys (some 15 minutes)
	$(BIN)/python -m pytest -m deploy --durations=0 tests/deploy_real

lint: $(READY)  ## style and types only
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/mypy

bench: $(READY)  ## time rounds against plain PyTorch on this machine (some six minutes; docs/speed.md)
	$(BIN)/python -m benchmarks

clean:  ## remove .venv, caches and the environments of benchmarks
	rm -rf $(VENV) benchmarks/.peers .mypy_cache .ruff_cache .pytest_cache .hypothesis
