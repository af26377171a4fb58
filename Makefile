# One entry point for people and CI. `check` never modifies; `fix` says what it changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTEST_ARGS ?=
QUICKSTART_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install quickstart services check fix test study-movielens bench-store

help: ## Show these verbs
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

install: $(INSTALLED) ## Make .venv with the packages (editable) and the tools

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

quickstart: $(VENV)/.quickstart ## The tour: train on a generated stream for a minute, see what comes of it
	$(BIN)/streamtrain quickstart --picture build/quickstart.svg $(QUICKSTART_ARGS)

$(VENV)/.quickstart: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test $(INSTALLED) -nt pyproject.toml || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable .
	@touch $@

services: install ## Get what tests need beside Python: redis-server, and Kafka by Maven
	scripts/services $(BIN)/python

check: install ## Format, lint, types and layers; modifies nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: install ## Format, and apply ruff's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: install services ## The whole suite, on a real Kafka and a real Redis (PYTEST_ARGS="-k word")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

study-movielens: install services ## MovieLens-100K in time order through a real Kafka: AUC of the zoo
	$(BIN)/python -m benchmarks.study_movielens

bench-consume: install ## Bytes to columns against fastavro and pyruhvro (QUICK=1: under a minute)
	$(BIN)/python -m benchmarks.bench_consume

bench-store: install ## The sparse store beside np.take, torch and tf.Variable (QUICK=1: under a minute)
	$(BIN)/python -m benchmarks.bench_store
