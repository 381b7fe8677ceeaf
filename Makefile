# Every target works on a fresh clone with Python 3.11 or newer and make.

PYTHON ?= python3
# Test processes at a time: a number, or auto for one per core.
JOBS ?= auto
SLOW ?=
# A version of torch other than that of constraints.txt; it gets an environment of its own.
TORCH ?=
# 0 installs nothing: test-gpu runs with the packages that PYTHON has.
SETUP ?= 1

VENV := .venv$(TORCH:%=-%)
BIN := $(VENV)/bin
# What is installed: for the lab, and for development beside it.
LAB := $(VENV)/.lab
DEV := $(VENV)/.dev
LOG := $(VENV)/setup.log
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
# torch names its triton and setuptools itself; the interpreter of an older triton fails with numpy 2.4.
OTHER_TORCH := -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^numpy==.*/numpy==2.2.6/' -e '/^triton==/d' -e '/^setuptools==/d'
# Python compiles what it imports; to compile all 20,000 modules would take more than a minute.
# pip's pages go into a log, which is shown where pip fails.
PIP := $(BIN)/pip install --no-compile -c $(CONSTRAINTS)
QUIETLY = >> $(LOG) 2>&1 || { tail -n 40 $(LOG) >&2; echo "The set-up failed; all of it: $(LOG)" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup demo arena test test-all checked tested test-gpu lint docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(DEV) ## make .venv and install all of it, for development, when something changed

demo: $(LAB) ## train a small language model with five optimizers, and report: minutes
	$(BIN)/merit demo

arena: $(LAB) ## tune five optimizers alike on a small model, and rank them: under an hour on two cores
	test -e data/embedded/dataset.json || $(BIN)/merit prepare embedded --tokenizer bytes --out data/embedded
	$(BIN)/merit arena tiny --data data/embedded --batch 128 --jobs 2

# Lint and documentation, which use one core, beside the tests; types are those of one version of torch.
test: $(DEV) ## run lint, build the documentation and run every test but slow ones, with ten cases of each
	@$(MAKE) -j2 tested $(if $(TORCH),,checked)

test-all: ## the same with the slow tests and all cases: an hour on two cores
	@$(MAKE) test SLOW=--slow

checked: lint docs

# One thread per process: more would wait for one another's cores.
tested: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) $(SLOW)

test-gpu: $(if $(filter 0,$(SETUP)),,$(DEV)) ## run the tests that need a CUDA GPU
	PYTHONPATH=src OMP_NUM_THREADS=1 $(if $(filter 0,$(SETUP)),$(PYTHON),$(BIN)/python) \
		-m pytest -m gpu --slow -n $(JOBS) tests

lint: $(DEV) ## check style, types and import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(DEV) ## build the documentation into build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(LAB) ## time an optimizer step against other implementations
	$(BIN)/merit bench

clean: ## remove .venv, caches and build outputs
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: see constraints.txt. A constraints file without that
# version stops here, before anything large is downloaded.
$(LAB): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "merit-optim needs Python 3.11 or newer, but '$(PYTHON)' is" \
			"$$($(PYTHON) --version 2>/dev/null || echo 'not there')." >&2; \
		echo "Name a newer one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@echo "Setting up $(VENV): PyTorch and the lab, 1.5 GB, two minutes or so (once)"
	@$(PYTHON) -m venv $(VENV)
	@: > $(LOG)
	@$(if $(TORCH),sed $(OTHER_TORCH) constraints.txt > $(CONSTRAINTS))
	@torch=$$(grep '^torch==' $(CONSTRAINTS)) && $(PIP) "$$torch" $(QUIETLY)
	@$(PIP) -e '.[lab]' $(QUIETLY)
	@touch $@

# torchtitan last and alone: it pins an older datasets, and only its trainer needs the nightly torch it
# asks for.
$(DEV): $(LAB)
	@echo "Setting up $(VENV): tools, integrations and all that tests need, two more minutes (once)"
	@$(PIP) -e '.[dev,lab]' $(QUIETLY)
	@$(PIP) --no-deps torchtitan $(QUIETLY)
	@touch $@
