# Two commands do everything on a fresh machine:
#   make demo   sets up, trains all three workloads on this machine with 1 and 2 ranks, writes a report
#   make test   sets up, runs every check and test that this machine can run
# Both hide GPUs from what runs on CPUs; `make test` then runs the tests marked gpu, where there is one.
# Others: make quick (fast tests), make nightly (test, over all engines, launchers and sizes), make bench [AREA=spine],
# make setup, make clean.

PYTHON ?= python3
VENV ?= .venv
# One exact version, because Horovod is compiled against it. PyPI's is for CUDA 13 on x86, which needs driver 580 or newer;
# for older ones: make setup TORCH=torch==2.13.0+cu126, with PIP_EXTRA_INDEX_URL set to PyTorch's index for cu126.
TORCH ?= torch==2.13.0
AREA ?=
# Not `?=`: that would ask for the time anew at every use.
ifndef DEMO_OUT
DEMO_OUT := runs/demo-$(shell date -u +%Y%m%d-%H%M%S)
endif
DEMO_RANKS ?= 1,2
DEMO_REPEATS ?= 3
# Processes that share the tests: on two cores a third one works while others wait.
WORKERS ?= 3

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --progress-bar off
BIN := $(VENV)/bin
# A stage prints its name and time when it is done; a quiet one puts pip's output into a log, warnings excepted.
STAGE := .ci/stage
QUIET := .ci/stage --log $(VENV)/pip.log
SERIES = --preset ci --ranks $(DEMO_RANKS) --repeats $(DEMO_REPEATS) --out "$(DEMO_OUT)"
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadgroup --no-loadscope-reorder
# Files of the drivers of NVIDIA, on WSL2 too, and AMD: empty without a GPU.
GPU := $(wildcard /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1 /dev/kfd)
CPU_ONLY := env CUDA_VISIBLE_DEVICES=
DEMO_HIDES := demo: it shows the presets for CPUs, so the GPU here is hidden; with it: dlbench run resnet50 --preset gpu

.PHONY: demo demo-stages demo-data test test-stages quick nightly bench gpu-check setup set-up horovod images lint format clean
.DELETE_ON_ERROR:

demo:
	@.ci/stage --all $(MAKE) --no-print-directory demo-stages DEMO_OUT="$(DEMO_OUT)"
	@echo "The report: $(DEMO_OUT)/report.html"
	@echo "Next: . $(VENV)/bin/activate; dlbench diagnose $(DEMO_OUT); docs/tour.md has the rest"

demo-stages:
	@$(if $(GPU),echo "$(DEMO_HIDES)")
	@$(MAKE) --no-print-directory --jobs 3 set-up demo-data
	@$(STAGE) "demo: ResNet-50" $(CPU_ONLY) $(BIN)/dlbench run resnet50 $(SERIES) --data data/demo/images
	@$(STAGE) "demo: BERT" $(CPU_ONLY) $(BIN)/dlbench run bert $(SERIES) --data data/demo/text
	@$(STAGE) "demo: CosmoFlow" $(CPU_ONLY) $(BIN)/dlbench run cosmoflow $(SERIES) --data data/demo/density
	@$(STAGE) "demo: tables" $(BIN)/dlbench report "$(DEMO_OUT)"
	@$(STAGE) "demo: report" $(BIN)/dlbench report "$(DEMO_OUT)" -o "$(DEMO_OUT)/report.html"

demo-data: $(VENV)/.ready-demo
	@$(STAGE) "demo: data" $(BIN)/dlbench data demo data/demo

test:
	@.ci/stage --all $(MAKE) --no-print-directory test-stages

test-stages:
	@$(MAKE) --no-print-directory --jobs 3 set-up
	@$(MAKE) --no-print-directory lint
	@$(STAGE) "test: pytest" $(PYTEST)
	@$(if $(GPU),$(STAGE) "test: pytest with the GPU" $(BIN)/python -m pytest -m gpu tests/gpu)

quick: $(VENV)/.ready-dev
	@$(STAGE) "test: pytest" $(PYTEST) --ignore tests/real -m "not slow and not slurm and not browser and not horovod"

nightly: set-up lint
	@$(STAGE) "test: pytest" $(PYTEST) --nightly --hypothesis-profile nightly

lint: $(VENV)/.ready-dev
	@$(STAGE) "lint: ruff check" $(BIN)/ruff check .
	@$(STAGE) "lint: ruff format" $(BIN)/ruff format --check .
	@$(STAGE) "lint: mypy" $(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks $(AREA)

# The first check on a machine with GPUs, which ends with build/gpu-check.html; FIGURES=1 also measures every axis there.
# MINUTES=12 stops after so many; CONTINUE=1 goes on with what has not been reached.
# It builds Horovod itself, so that a build that fails is on the page. Where there is no network, call `python -m
# tests.gpu` with a Python that has what pyproject.toml asks for.
gpu-check: $(VENV)/.ready-dev
	$(BIN)/python -m tests.gpu $(if $(FIGURES),--figures) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CONTINUE),--continue)

setup:
	@.ci/stage --all $(MAKE) --no-print-directory --jobs 3 set-up $(VENV)/.ready-dev

$(VENV)/bin/python:
	@$(QUIET) "set-up: virtual environment" $(PYTHON) -m venv "$(VENV)"

# First and alone: torch, as what follows must not bring another one, and all that Horovod's build uses, as it runs beside
# the next pip. Most of what pip takes for torch is bytecode, which is made beside that build, too.
$(VENV)/.ready-torch: $(VENV)/bin/python pyproject.toml
	@$(QUIET) "set-up: torch" $(PIP) --no-compile "$(TORCH)" "numpy>=1.26" --editable ".[horovod]"
	@touch $@

$(VENV)/.ready-demo: $(VENV)/.ready-torch
	@$(QUIET) "set-up: dlbench's packages" $(PIP) --no-compile --editable ".[node,analysis,demo]"
	@touch $@

# Ranks write none. Packages bring some files that are no Python of today, which is no failure. A fifth of all text is
# the packages' own tests, which nobody imports.
$(VENV)/.ready-bytecode: $(VENV)/.ready-demo
	@$(QUIET) "set-up: bytecode" sh -c '"$(BIN)/python" -m compileall -qq -j 0 -x "site-packages/.*/tests?/" "$(VENV)/lib" dlbench || :'
	@touch $@

# Asked each time, for no file of this folder changes when MPI, CUDA or a compiler comes, goes or is another: what is
# built for all that is here now stays, and a build of this toolchain is kept for the next time.
horovod: $(VENV)/.ready-torch
	@$(STAGE) "set-up: Horovod" $(BIN)/dlbench setup horovod

images: $(VENV)/.ready-demo
	-@$(STAGE) "set-up: crops of JPEGs (optional)" $(BIN)/dlbench setup images

set-up: horovod images $(VENV)/.ready-bytecode

$(VENV)/.ready-dev: $(VENV)/.ready-demo $(VENV)/.ready-bytecode
	@$(QUIET) "set-up: packages for tests" $(PIP) --editable ".[node,analysis,demo,dev]"
	@touch $@

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
