# Everything a developer types. `make` lists it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

PIP := $(BIN)/pip --quiet --disable-pip-version-check
LOCK := build/lock/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	--upgrade --custom-compile-command "make lock"

.PHONY: help setup judges demo test test-slow matrix fuzz lint fmt types arch check bench smoke audit lock size clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## make the virtual environment

$(VENV)/.ready: pyproject.toml locks/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --requirement locks/dev.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $@

judges: $(VENV)/.judges ## add torch, transformers and mlx-lm, which the slow tests compare with

# torch stands in no lock: machines have builds of their own, with hashes of their own.
$(VENV)/.judges: $(VENV)/.ready locks/judges.txt
	$(PIP) install --require-hashes --requirement locks/judges.txt
	$(PIP) install 'torch==2.13.0'
	touch $@

demo: setup ## inspect, convert, inspect and verify a small model
	$(BIN)/python scripts/demo.py

test: setup ## the quick tests
	$(BIN)/python -m pytest -n auto -q

test-slow: judges ## the slow tests, with the independent judges
	$(BIN)/python -m pytest -n auto -q -m slow

matrix: ## the quick tests under every Python from 3.10 to 3.14 that is here
	$(PYTHON) scripts/matrix.py

fuzz: setup ## what reads a stranger's bytes, fuzzed for a minute each
	$(PIP) install '.[fuzz]'
	for target in header json-header index config name folder; do $(BIN)/python scripts/fuzz.py $$target || exit 1; done

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

audit: setup ## known faults of the locked packages; asks the package index about each
	$(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	build/audit/bin/pip-audit --strict --require-hashes --disable-pip --requirement locks/dev.txt

lock: ## pin what CI installs anew, with hashes
	$(PYTHON) -m venv build/lock && build/lock/bin/pip install --quiet --disable-pip-version-check uv
	$(LOCK) --python-version 3.10 --extra dev pyproject.toml --output-file locks/dev.txt
	$(LOCK) --python-version 3.11 --extra dev pyproject.toml locks/judges.in --output-file locks/judges.txt

size: ## lines per room
	@wc -l $$(git ls-files 'qwen35conv/*.py') | sort -n

clean: ## remove what was made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
