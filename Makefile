# Set up, try, test, check and measure FOSI. `make` alone lists the targets.
#
# Needs make and a Python of at least 3.11; choose another one with `make test PYTHON=python3.12`.

PYTHON ?= python3
PYTEST_ARGS ?=
QUICKSTART_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The tests check eigenvalues against curvlinops. It asks for torchvision without using it, and a torchvision built for
# CUDA fails to load beside a torch built without, and lightning with it. So it comes without what it asks for; the
# rest of that is in .[dev] already.
CURVLINOPS := curvlinops-for-pytorch backpack-for-pytorch einconv einops linear_operator unfoldNd

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make the environment in .venv (the other targets do it by themselves)

# The stamp is newer than both files exactly when the environment matches them.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	sys.exit(0 if sys.version_info >= (3, 11) else f"PYTHON=$(PYTHON) is Python {v}; FOSI needs 3.11 or newer")'
	@test -x $(BIN)/pip || { echo "Creating the environment $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing FOSI and the tested versions of what it needs into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps $(CURVLINOPS)
	@touch $@

quickstart: $(STAMP)  ## train four optimizers on the digits, with and without FOSI
	@$(BIN)/fosi quickstart $(QUICKSTART_ARGS)

test: $(STAMP)  ## run the tests (PYTEST_ARGS="-k lanczos" to choose)
	@echo "Running the tests ..."
	@$(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure speed and memory, as ratios (BENCH_ARGS to choose)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:  ## remove the environment and everything built or cached; results stay
	rm -rf $(VENV) build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
