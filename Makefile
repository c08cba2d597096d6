# How to work on Quiver from a fresh clone. `make help` lists what there is.
# Everything runs inside .venv, which is made on first use and again whenever what it is made from changes.

SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := dev
CODE := src tests benches examples
WORKERS ?= 2
FUZZ_RUNS ?= 20000
HTTP_CASES ?= 5000
WIRE_CASES ?= 2000
SEEDS ?= 5000
KILLS ?= 100
CLUSTERS ?= 500
PROFILE_SEEDS ?= 50
DIST_TOOLS := 'build==1.6.1' 'twine==7.0.0' 'cyclonedx-bom==7.5.0'
COVERED := src/quiver/record/*,src/quiver/storage/*,src/quiver/raft/*

# The first interpreter on the PATH that is new enough; set PYTHON to choose another.
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$name; break; }; done)

# Every interpreter that is new enough, each version once: on the PATH, the system's own, and pyenv's.
PYTHONS ?= $(shell for python in $$(which -a python3 python3.11 python3.12 python3.13 python3.14 2>/dev/null) $(HOME)/.pyenv/versions/*/bin/python3; do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && \
	echo "$$($$python -c 'import platform; print(platform.python_version())') $$python"; done | sort -u -k1,1 | cut -d' ' -f2)
# Seeded simulations give the same result on every Python, and Spark has its own; all else runs on each.
DIFFERS := tests/unit tests/scenarios tests/integration tests/e2e

.PHONY: help setup dist lock lint types unit audit check test test-pythons test-spark coverage bench fuzz sim chaos test-upgrade spark-cluster demo up docs console check-console clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv and install Quiver with everything its tests need

$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "error: Quiver needs Python 3.11 or newer; none of python3, python3.13, python3.12, python3.11 is one. Install it, or run: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; install it (on Debian and Ubuntu the package is called python3-venv)" >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $(STAMP)

dist: ## build the wheel, the source distribution and the bill of materials into dist/, and check them
	@[ -n "$(PYTHON)" ] || { echo "error: Quiver needs Python 3.11 or newer" >&2; exit 1; }
	rm -rf dist build/dist build/installed
	$(PYTHON) -m venv build/dist && build/dist/bin/python -m pip install --quiet $(DIST_TOOLS)
	build/dist/bin/python -m build --outdir dist .
	build/dist/bin/twine check --strict dist/*
	$(PYTHON) -m venv build/installed && build/installed/bin/python -m pip install --quiet -c constraints.txt dist/*.whl
	build/installed/bin/quiver --version
	build/dist/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
		--of JSON -o dist/quivermq.cdx.json build/installed/bin/python

.PHONY: release-check
release-check: ## build twice and compare, check, install and try on every Python from 3.11 that is found; PYTHONS="a b" chooses
	@[ -n "$(PYTHON)" ] || { echo "error: Quiver needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) .ci/release_check.py $(PYTHONS)

.PHONY: deploy-tools
deploy-tools: setup ## build helm, kubeconform and promtool, and fetch the schemas with which the tests check deploy/; needs Go
	$(BIN)/python .ci/deploy_tools.py build/tools

lock: ## pin in constraints.txt the newest versions that pyproject.toml allows
	@[ -n "$(PYTHON)" ] || { echo "error: Quiver needs Python 3.11 or newer" >&2; exit 1; }
	rm -rf build/lock && $(PYTHON) -m venv build/lock && build/lock/bin/python -m pip install --quiet '.[$(EXTRAS)]'
	{ sed -n '/^#/p' constraints.txt; build/lock/bin/python -m pip freeze | grep -iv '^quivermq'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt && rm -rf build/lock

test-pythons: ## run what depends on the interpreter on every Python from 3.11 that is found; PYTHONS="a b" chooses
	@for python in $(PYTHONS); do \
		name=$$($$python -c 'import platform; print(platform.python_version())') || exit 1; echo "== Python $$name ($$python)"; \
		[ -x build/python-$$name/bin/python ] || $$python -m venv build/python-$$name || exit 1; \
		build/python-$$name/bin/python -m pip install --quiet -e '.[$(EXTRAS)]' -c constraints.txt || exit 1; \
		build/python-$$name/bin/python -m pytest -n $(WORKERS) --dist worksteal $(DIFFERS) || exit 1; done

lint: setup ## check style and formatting
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: setup ## check types, strictly
	$(BIN)/mypy $(CODE)

unit: setup ## run the unit tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/unit

audit: ## compare the pinned versions with the index of known vulnerabilities, where it can be reached
	@[ -n "$(PYTHON)" ] || { echo "error: Quiver needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) .ci/audit.py

check: lint types unit audit ## what to run before every commit: style, types, unit tests, known vulnerabilities

CONSOLE_CHECKS := tests/console
check-console: ## check the files of the web console: style, types, unit tests; needs Node.js 20 and npm
	@if ! command -v node >/dev/null; then echo "console: its files are NOT checked: there is no node; install Node.js 20 or newer, with npm"; \
	else node --test $(CONSOLE_CHECKS)/unit/*.test.js && \
	if [ ! -d $(CONSOLE_CHECKS)/node_modules ] && ! (cd $(CONSOLE_CHECKS) && npm ci --no-audit --no-fund --silent); then \
	echo "console: style and types are NOT checked: npm cannot fetch eslint and typescript"; \
	else $(CONSOLE_CHECKS)/node_modules/.bin/eslint --config $(CONSOLE_CHECKS)/eslint.config.js --ignore-pattern '**/vendor-*.js' src/quiver/gateway/console/static $(CONSOLE_CHECKS)/unit && \
	$(CONSOLE_CHECKS)/node_modules/.bin/tsc --project $(CONSOLE_CHECKS)/tsconfig.json; fi; fi

test: lint types check-console ## everything: style, types, all tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/spark
	$(BIN)/python -m pytest tests/spark -m 'not slow'

test-spark: setup ## run all tests on Spark, one session for all of them
	$(BIN)/python -m pytest tests/spark

coverage: setup ## measure branch coverage; fails below 100 % of record/, storage/ and raft/
	rm -f .coverage .coverage.*
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --ignore=tests/spark
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --include='$(COVERED)' --fail-under=100

bench: setup ## measure, and print tables; BENCH="storage" runs only that one
	$(BIN)/python benches/run.py $(BENCH)

.PHONY: bench-peers
bench-peers: setup ## compare with Kafka, NATS, Redis, RabbitMQ, PostgreSQL and PySyncObj: takes an hour or two, on an idle machine; PEERS="--only redis --rounds 1 --share 0.1" does less
	$(BIN)/python benches/run_peers.py $(PEERS)

fuzz: setup ## feed each target in tests/fuzz FUZZ_RUNS random inputs, and a live node HTTP_CASES made-up requests and WIRE_CASES sequences of frames
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { echo "error: fuzzing needs atheris, which has wheels for Linux and Python up to 3.13 only" >&2; exit 1; }
	@set -e; found=0; for target in tests/fuzz/*.py; do [ -f "$$target" ] || continue; found=1; echo "== $$target"; \
		$(BIN)/python "$$target" -runs=$(FUZZ_RUNS) -verbosity=0 -print_final_stats=1; done; \
		[ $$found = 1 ] || { echo "error: there is no target in tests/fuzz" >&2; exit 1; }
	$(BIN)/python tests/fuzz/live/http_contract.py --cases $(HTTP_CASES)
	$(BIN)/python tests/fuzz/live/wire_sequences.py --cases $(WIRE_CASES)

sim: setup ## try to break SEEDS simulated consensus groups, CLUSTERS whole clusters and PROFILE_SEEDS groups of each profile
	$(BIN)/python -m quiver sim --seeds $(SEEDS)
	$(BIN)/python -m quiver sim --cluster --seeds $(CLUSTERS)
	QUIVER_PROFILE_SEEDS=$(PROFILE_SEEDS) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/simulation/test_ablations.py -k nothing_is_found

chaos: setup ## kill KILLS real nodes under load and judge what clients were told, then run the system test for longer
	$(BIN)/python tests/chaos/run_chaos.py --kills $(KILLS)
	$(BIN)/python tests/chaos/run_system.py

test-upgrade: setup ## upgrade, roll back and upgrade real nodes of the earlier program under load
	$(BIN)/python tests/chaos/run_upgrade.py

spark-cluster: setup ## run a Spark master and worker on this machine until Ctrl-C
	$(BIN)/python -m quiver.spark.standalone

demo: setup ## run three nodes, kill -9 the leader under load, show that nothing is lost; archive, audit and analyze it on Spark
	$(BIN)/python examples/demo.py

up: setup ## run a cluster of three nodes on this machine until Ctrl-C
	$(BIN)/quiver up

docs: setup ## write the pages that are made from the code
	@mkdir -p build
	$(BIN)/quiver config docs > build/configuration.md
	mv build/configuration.md docs/operations/configuration.md
	$(BIN)/quiver gateway docs > build/http.md
	mv build/http.md docs/protocol/http.md
	$(BIN)/quiver cli docs > build/cli.md
	mv build/cli.md docs/operations/cli.md

console: ## fetch the libraries of the web console again, in the versions that .ci/vendor_console.py names, and check them
	@command -v npm >/dev/null || { echo "error: npm is needed to fetch the console's libraries (they are in the repository: only a change of versions needs this)" >&2; exit 1; }
	$(PYTHON) .ci/vendor_console.py

.PHONY: screenshots
screenshots: setup ## take the pictures of the console for docs/, in seven minutes; needs Chromium; SCREENSHOTS="--only queue --minutes 1" takes one
	$(BIN)/python tests/browser/make_screenshots.py $(SCREENSHOTS)

clean: ## remove everything that the other targets made
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benches examples -name __pycache__ -type d -prune -exec rm -rf {} +
