# Every target creates .venv and installs what it needs: nothing has to be done by hand.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)
.PHONY: demo test test-slow lint bench clean wheel-check help
.DEFAULT_GOAL := help

help:
	@echo "make demo       run the quickstart scenario and write its report"
	@echo "make test       run the tests (minutes)"
	@echo "make test-slow  run the tests that take longer"
	@echo "make lint       ruff and mypy"
	@echo "make bench      speed against peers, in one run"
	@echo "make clean      remove .venv, caches and build products"

# torch first and pinned: a looser request can pull gigabytes of CUDA packages.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	@touch $@

.venv/installed-bench: .venv/installed
	$(BIN)/pip install -q -c constraints.txt -e ".[dev,bench]"
	$(BIN)/pip install -q -c constraints.txt --no-deps pfl prv-accountant # pfl asks for an older dp-accounting
	@touch $@

demo: .venv/installed
	$(BIN)/fedsim run quickstart

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n 2

test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed-bench
	$(BIN)/python benchmarks/simulation.py

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
