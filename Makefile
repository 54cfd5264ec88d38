.DEFAULT_GOAL := help
.PHONY: help quickstart grounding test test-ci test-all fuzz chaos check site gpu lock check-lock dist

PYTHON ?= python3
# Test processes, with one torch thread each: the models of the tests are too small to gain from more threads.
# Files start in alphabetical order: by number of tests, the longest runs would come last, one process alone.
WORKERS ?= 2
# Keep bytecode, even if the environment says otherwise: a process that compiles torch and transformers anew starts in
# 38 s instead of 15, and the tests start hundreds.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
INSTALLED := .venv/.quickstart
# The tests' packages are added to the quickstart's.
INSTALLED_DEV := .venv/.dev
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=60 --durations-min=4

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

quickstart: $(INSTALLED)  ## Set up and teach a small model to read digits, on a CPU
	$(BIN)/rl-vlm train configs/digits.yaml

grounding: $(INSTALLED)  ## Set up and teach a small model to find objects, on a CPU
	$(BIN)/rl-vlm train configs/grounding.yaml

test: $(INSTALLED_DEV)  ## Set up and run the tests that take minutes (TESTS=path, WORKERS=n)
	$(PYTEST) -m "not ci and not slow" $(TESTS)

test-ci: $(INSTALLED_DEV)  ## Run the longer ones: whole runs, several processes, vLLM, every family
	$(PYTEST) -m "ci and not slow" $(TESTS)

test-all: $(INSTALLED_DEV)  ## Run all tests
	$(PYTEST) $(TESTS)

fuzz: $(INSTALLED_DEV)  ## Fuzz the reward functions for up to 50 minutes; run it again to go on
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.campaign

chaos: $(INSTALLED_DEV)  ## Kill, stop and resume runs on two processes for up to 50 minutes; run it again to go on
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.campaign

check: $(INSTALLED_DEV)  ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

site: $(INSTALLED_DEV)  ## Build the site of the documentation into build/site, with strict links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

gpu: .venv-gpu/.installed  ## Set up .venv-gpu for GPUs, with vLLM and DeepSpeed

COMPILE := uv pip compile --quiet --universal --python-version 3.11 --custom-compile-command "make lock" \
	pyproject.toml --extra quickstart --extra rewards --extra trl
# A later file is compiled with the versions of an earlier one, so that the environments agree.
COMPILE_DEV := $(COMPILE) --extra bitsandbytes --extra dev --override requirements/overrides.txt requirements/dev.in
COMPILE_QUICKSTART := $(COMPILE) --constraint requirements/dev.txt requirements/quickstart.in
COMPILE_GPU := $(COMPILE) --extra bitsandbytes --extra deepspeed --extra vllm --constraint requirements/quickstart.txt \
	requirements/gpu.in

lock: $(INSTALLED)  ## Recompile the requirements: quickstart.txt, dev.txt and gpu.txt
	$(BIN)/$(COMPILE_DEV) --output-file requirements/dev.txt
	$(BIN)/$(COMPILE_QUICKSTART) --output-file requirements/quickstart.txt
	$(BIN)/$(COMPILE_GPU) --output-file requirements/gpu.txt

LOCKED := dev.txt quickstart.txt gpu.txt

check-lock: $(INSTALLED)  ## Fail if the compiled requirements do not fit pyproject.toml and the .in files
	mkdir -p build && cp $(LOCKED:%=requirements/%) build
	$(BIN)/$(COMPILE_DEV) --output-file build/dev.txt
	$(BIN)/$(COMPILE_QUICKSTART) --output-file build/quickstart.txt
	$(BIN)/$(COMPILE_GPU) --output-file build/gpu.txt
	for name in $(LOCKED); do diff requirements/$$name build/$$name || exit 1; done

dist: $(INSTALLED)  ## Build the release in dist/: the source distribution, and the wheel from it
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	ls -sh dist

$(INSTALLED): requirements/quickstart.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv==0.13.9
	$(BIN)/uv pip install --python $(BIN)/python --requirement requirements/quickstart.txt
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --editable .
	touch $@

$(INSTALLED_DEV): $(INSTALLED) requirements/dev.txt requirements/overrides.txt
	$(BIN)/uv pip install --python $(BIN)/python --override requirements/overrides.txt --requirement requirements/dev.txt
	touch $@

.venv-gpu/.installed: requirements/gpu.txt pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet uv==0.13.9
	.venv-gpu/bin/uv pip install --python .venv-gpu/bin/python --requirement requirements/gpu.txt
	.venv-gpu/bin/uv pip install --python .venv-gpu/bin/python --no-deps --editable .
	touch $@
