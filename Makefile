# Each target does everything it needs on a fresh Debian machine with Python 3.11 to 3.13: environment,
# dependencies, package, run. What the first run set up the next ones reuse, without the network.
#
#   PYTHON=python3.12   another interpreter, with an environment of its own (.venv-python3.12)
#   ARGS="-k causal"    further arguments of pytest, or of `attnscore demo`
#   SLOW=1              the tests marked slow as well (always when CI=true)

PYTHON ?=
VENV   ?= .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SLOW   ?= $(CI)
ARGS   ?=

# Exactly this release, and before all else: a range, here or in another package, would pass over a CPU build
# that the machine has ready and take the newest torch, with several GB of CUDA libraries.
TORCH := torch==2.13.0

INTERPRETERS := $(or $(PYTHON),python3 python3.11 python3.12 python3.13)
IN_RANGE     := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# -qq: errors only. pip's --log would bring its warnings and progress bars back.
PIP          := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq

# The model that the demo and the tests use lies in site-packages; nothing may ask a hub for it.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
# Plots go to files, on machines without a screen too.
export MPLBACKEND := Agg

.DEFAULT_GOAL := help
.PHONY: help demo test check docs format clean distclean

help: ## this list
	@echo "make TARGET [PYTHON=python3.12] [ARGS=...] [SLOW=1]"
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	    while IFS='|' read -r name text; do printf '  %-10s %s\n' "$$name" "$$text"; done

demo: $(READY) ## the tour, on a real model and real text; plots and numbers into attnscore-demo/
	@$(BIN)/attnscore demo $(ARGS)

test: $(READY) ## the tests; SLOW=1 for all of them
	@$(BIN)/pytest $(if $(filter 1 true yes,$(SLOW)),-m "") $(ARGS)

check: $(READY) ## lint, format, types, project file
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/validate-pyproject pyproject.toml

docs: $(READY) ## the documentation as a site, into build/site
	@$(PIP) install -e ".[docs]" && $(BIN)/mkdocs build --strict

format: $(READY) ## format the code and mend what the linter can mend
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

clean: ## remove caches, build output and the demo's results
	@rm -rf build dist attnscore-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	@rm -rf .venv .venv-*

$(READY): pyproject.toml Makefile
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(make_venv); }
	@echo "installing into $(VENV): torch (large), then the rest; a few minutes the first time"
	@$(PIP) install '$(TORCH)'
	@$(PIP) install --editable '.[test,check]'
	@touch $@

# --clear: what an interrupted run left behind is no base to build on.
define make_venv
for python in $(INTERPRETERS); do \
    "$$python" -c '$(IN_RANGE)' 2>/dev/null && break; \
    python=; \
done; \
if [ -z "$$python" ]; then \
    echo "attnscore needs Python 3.11 to 3.13; tried: $(INTERPRETERS)." >&2; \
    echo "Name one with make ... PYTHON=/path/to/python3.11, or on Debian: apt-get install python3 python3-venv" >&2; \
    exit 1; \
fi; \
if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
    echo "$$python cannot create virtual environments (its ensurepip module is missing)." >&2; \
    echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; \
    exit 1; \
fi; \
"$$python" -m venv --clear $(VENV)
endef
