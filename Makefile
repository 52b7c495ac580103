# Every target creates .venv and installs what it needs: nothing has to be done by hand.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)
.PHONY: demo test test-slow test-hub test-deploy test-network test-docs deploy-packages faults fuzz lint docs bench \
	bench-inversion certificates calibrate clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo       run the quickstart scenario and write its report"
	@echo "make test       run the tests (minutes)"
	@echo "make test-slow  run the tests that take longer"
	@echo "make test-hub   run the tests of data with the extra hub, against a hub on this machine"
	@echo "make test-deploy  a real federation in network namespaces (root; installs nginx, iproute2, openssh)"
	@echo "make test-docs  run every command and snippet of the tutorials and how-to pages"
	@echo "make test-network  the same federation under ten faults of the network (ten minutes)"
	@echo "make faults     break a federation in every way that we know, and print what happened"
	@echo "make fuzz       thousands of strange scenarios and damaged run folders (CASES=..., SEED=...)"
	@echo "make lint       ruff and mypy"
	@echo "make docs       build the documentation into build/site; a warning is an error"
	@echo "make bench      speed against peers, in one run"
	@echo "make bench-inversion  attacks against breaching and published figures"
	@echo "make certificates  hunt for false certificates of exact inversion (ten CPU minutes)"
	@echo "make calibrate  the auditor itself: coverage, a zoo of broken mechanisms, mechanisms by name (five CPU minutes)"
	@echo "make clean      remove .venv, caches and build products"

# torch first and pinned: a looser request can pull gigabytes of CUDA packages.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -qq -c constraints.txt -e ".[dev]"
	@touch $@

# The peers of the benchmark have an environment of their own: pfl asks for an older dp-accounting.
.venv-bench/installed: pyproject.toml constraints-bench.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install -q --upgrade pip
	.venv-bench/bin/pip install -q "$(TORCH)"
	.venv-bench/bin/pip install -q -c constraints-bench.txt -e ".[bench]"
	@touch $@

demo: .venv/installed
	$(BIN)/fedsim run quickstart

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not deploy and not docs" -n 2

test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

# Apart from `make test`, so that everything else is tested without the packages that the extra brings.
test-hub: .venv/installed
	$(BIN)/pip install -qq -c constraints.txt -e ".[dev,hub]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not deploy and not docs" -n 2 tests/data

# Where packages cannot be installed or namespaces are not allowed, the tests skip and say why.
deploy-packages:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    ! { command -v ip && command -v nginx && command -v ssh-keygen && [ -e /usr/lib/nginx/modules/ngx_stream_module.so ]; } \
	    >/dev/null; then \
	    (apt-get update -qq && apt-get install -y -qq iproute2 nginx-light libnginx-mod-stream openssh-client) \
	    >/dev/null 2>&1 || echo "packages could not be installed: the tests that need them will skip"; fi

test-deploy: .venv/installed deploy-packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "deploy and not network" tests/deploy

# A clock of its own for one client takes a C compiler; without one that case skips.
test-network: .venv/installed deploy-packages
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -m deploy tests/deploy/test_network.py

test-docs: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m docs tests/docs -n 2

# Bad replies, too few replies, full disks, killed processes: what was expected of each, and what happened.
faults: .venv/installed
	@$(BIN)/pip install -q -c constraints.txt -e ".[dev,ray]" || echo "no Ray here: its test will skip"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/faults --matrix

# A failure prints its number: SEED=... with --first N --cases 1 plays it again.
CASES ?= 10000
SEED ?= $(shell date +%s)
fuzz: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz scenarios --cases $(CASES) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz folders --cases $$(($(CASES) / 10)) --seed $(SEED)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed
	$(BIN)/pip install -qq -c constraints.txt -e ".[docs]"
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	@echo "build/site/index.html"

certificates: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/certificates.py --batches 4

bench: .venv-bench/installed
	.venv-bench/bin/python benchmarks/simulation.py
	.venv-bench/bin/python benchmarks/engines.py

.venv-peers/installed: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install -q "$(TORCH)" numpy
	.venv-peers/bin/pip install -q --no-deps torchvision==0.28.0
	.venv-peers/bin/pip install -q -c constraints.txt breaching==0.1.2 scikit-image scikit-learn
	@touch $@

bench-inversion: .venv/installed .venv-peers/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/inversion.py --peer .venv-peers/bin/python
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/exact_inversion.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/table_inversion.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/text_inversion.py

calibrate: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/calibrate.py

clean:
	rm -rf .venv .venv-peers .venv-bench build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
