# Set up, try, test, check and measure FOSI. `make` alone lists the targets.
#
# Needs make and a Python of at least 3.11; choose another one with `make test PYTHON=python3.12`.

PYTHON ?= python3
PYTEST_ARGS ?=
QUICKSTART_ARGS ?=
QUADRATIC_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PIP_ARGS := --quiet --disable-pip-version-check -c constraints.txt

# The tests check eigenvalues against curvlinops. It asks for torchvision without using it, and a torchvision built for
# CUDA fails to load beside a torch built without, and lightning with it. So it comes without what it asks for; the
# rest of that is in .[dev] already.
CURVLINOPS := curvlinops-for-pytorch backpack-for-pytorch einconv einops linear_operator unfoldNd

.DEFAULT_GOAL := help
.PHONY: help setup quickstart quadratic test test-backends mutations lint bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## make the environment in .venv (the other targets do it by themselves)

# Makes the environment $(1), if it is not there, and installs FOSI with the extra $(2) into it.
define install
@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
sys.exit(0 if sys.version_info >= (3, 11) else f"PYTHON=$(PYTHON) is Python {v}; FOSI needs 3.11 or newer")'
@test -x $(1)/bin/pip || { echo "Creating the environment $(1) ..."; $(PYTHON) -m venv $(1); }
@echo "Installing FOSI and the tested versions of what it needs into $(1) (a few minutes the first time) ..."
@$(1)/bin/pip install $(PIP_ARGS) -e '.[$(2)]'
endef

# A stamp is newer than both files exactly when its environment matches them.
$(STAMP): pyproject.toml constraints.txt
	$(call install,$(VENV),dev)
	@$(BIN)/pip install $(PIP_ARGS) --no-deps $(CURVLINOPS)
	@touch $@

$(VENV)-%/.installed: pyproject.toml constraints.txt
	$(call install,$(VENV)-$*,$*)
	@touch $@

# The quickstart needs neither PyTorch nor the tools of development: a fresh machine is spared their download.
$(VENV)/.quickstart: pyproject.toml constraints.txt
	$(call install,$(VENV),experiments)
	@touch $@

quickstart: $(VENV)/.quickstart  ## train four optimizers on the digits, with and without FOSI
	@$(BIN)/fosi quickstart $(QUICKSTART_ARGS)

quadratic: $(VENV)/.quickstart  ## the paper's studies on quadratic functions (QUADRATIC_ARGS=--quick for small ones)
	@$(BIN)/fosi quadratic all $(QUADRATIC_ARGS)

test: $(STAMP)  ## run the tests (PYTEST_ARGS="-k lanczos" to choose)
	@echo "Running the tests ..."
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

# Each environment has one backend and lacks the other; the scripts make sure of it.
test-backends: $(VENV)-jax/.installed $(VENV)-torch/.installed  ## train with each backend where the other is not installed
	@$(VENV)-jax/bin/python -W error tests/alone/jax_alone.py
	@$(VENV)-torch/bin/python -W error tests/alone/torch_alone.py

mutations: $(STAMP)  ## break the algorithm in a dozen places, one at a time, and see tests fail
	@$(BIN)/python tests/mutations.py

lint: $(STAMP)  ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure speed and memory, as ratios (BENCH_ARGS to choose)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:  ## remove the environments and everything built or cached; results stay
	rm -rf $(VENV) $(VENV)-jax $(VENV)-torch build dist site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
