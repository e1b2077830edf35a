# Everything a developer types. `make` lists it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: help setup judges demo test test-slow lint fmt types arch check bench smoke size clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## make the virtual environment

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

judges: $(VENV)/.judges ## add torch, transformers and mlx-lm, which the slow tests compare with

$(VENV)/.judges: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[judges]'
	touch $@

demo: setup ## inspect, convert, inspect and verify a small model
	$(BIN)/python scripts/demo.py

test: setup ## the quick tests
	$(BIN)/python -m pytest -n auto -q

test-slow: judges ## the slow tests, with the independent judges
	$(BIN)/python -m pytest -n auto -q -m slow

lint: setup ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

fmt: setup ## rewrite to the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## mypy, strict
	$(BIN)/mypy

arch: setup ## each room imports only rooms below it
	$(BIN)/lint-imports

check: lint types arch test ## all that must be green before a commit

bench: judges ## speed and memory of convert and batch, beside cp and mlx-lm
	$(BIN)/python scripts/bench.py
	$(BIN)/python scripts/bench_batch.py

smoke: ## the wheel alone, in a clean environment
	rm -rf build/smoke && $(PYTHON) -m venv build/smoke
	build/smoke/bin/pip install --quiet --disable-pip-version-check .
	build/smoke/bin/python scripts/demo.py

size: ## lines per room
	@wc -l $$(git ls-files 'qwen35conv/*.py') | sort -n

clean: ## remove what was made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
