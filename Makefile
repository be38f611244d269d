# Two commands do everything on a fresh machine:
#   make demo   sets up, trains all three workloads on this machine with 1 and 2 ranks, writes a report
#   make test   sets up, runs every check and test that this machine can run
# Others: make quick (fast tests), make nightly (test, over all engines, launchers and sizes), make bench [AREA=spine],
# make setup, make clean.

PYTHON ?= python3
VENV ?= .venv
# One exact version, because Horovod is compiled against it. With a GPU: make demo TORCH=torch
TORCH ?= torch==2.13.0
AREA ?=
# Not `?=`: that would ask for the time anew at every use.
ifndef DEMO_OUT
DEMO_OUT := runs/demo-$(shell date -u +%Y%m%d-%H%M%S)
endif
DEMO_RANKS ?= 1,2
DEMO_REPEATS ?= 3
# Processes that share the tests.
WORKERS ?= 2

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder

.PHONY: demo test quick nightly bench setup lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.ready-demo
	$(BIN)/dlbench data demo data/demo
	$(BIN)/dlbench run resnet50 --preset ci --ranks $(DEMO_RANKS) --repeats $(DEMO_REPEATS) --data data/demo/images --out "$(DEMO_OUT)"
	$(BIN)/dlbench run bert --preset ci --ranks $(DEMO_RANKS) --repeats $(DEMO_REPEATS) --data data/demo/text --out "$(DEMO_OUT)"
	$(BIN)/dlbench run cosmoflow --preset ci --ranks $(DEMO_RANKS) --repeats $(DEMO_REPEATS) --data data/demo/density --out "$(DEMO_OUT)"
	$(BIN)/dlbench report "$(DEMO_OUT)"
	$(BIN)/dlbench report "$(DEMO_OUT)" -o "$(DEMO_OUT)/report.html"
	@echo "The report: $(DEMO_OUT)/report.html"

test: lint
	$(PYTEST)

quick: $(VENV)/.ready-dev
	$(PYTEST) -m "not slow and not slurm and not browser and not horovod"

nightly: lint
	$(PYTEST) --nightly --hypothesis-profile nightly

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready-dev
	$(BIN)/python -m tests.bench $(AREA)

setup: $(VENV)/.ready-dev

$(VENV)/bin/python:
	@echo "making the virtual environment $(VENV)"
	$(PYTHON) -m venv "$(VENV)"

# torch first and by itself: what follows must not bring another one.
$(VENV)/.ready-demo: $(VENV)/bin/python pyproject.toml dlbench/setup/horovod.py
	@echo "installing $(TORCH)"
	$(PIP) "$(TORCH)"
	@echo "installing dlbench with what training, data and reports need"
	$(PIP) --editable ".[node,analysis,demo]"
	$(BIN)/dlbench setup horovod
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready-demo
	@echo "installing what tests need"
	$(PIP) --editable ".[node,analysis,demo,dev]"
	touch $@

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
