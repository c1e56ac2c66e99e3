# Each target does everything it needs on a fresh Debian machine with Python 3.11 to 3.13: environment,
# dependencies, package, run. What the first run set up the next ones reuse, without the network.
#
#   PYTHON=python3.12   another interpreter, with an environment of its own (.venv-python3.12)
#   ARGS="-k causal"    further arguments of pytest, or of `attnscore demo`
#   FOR=masks           the tests that concern these packages or modules; FOR=changed: packages that differ from main
#   SLOW=1              the tests marked slow as well; SLOW=2/4: the second quarter of them
#   WORKERS=2           how many processes share the tests; 0: pytest itself runs them, as `ARGS=--pdb` wants it
#   ROWS="jax-oldest"   of the environments of `make versions` these
#   CASES=100           how many cases `make sanitize` and `make arm` draw
#   ATTNSCORE_TARGETS=all   compiles the native kernels for every CPU, not for this one alone; `make wheels` always does
#
# The tests have two environments: MXNet needs NumPy below 1.24, which no other framework takes any more, and Python 3.11,
# the last that such a NumPy was built for. One run of pytest in the first runs MXNet's tests in the second.

PYTHON ?=
VENV   ?= .venv$(if $(PYTHON),-$(notdir $(PYTHON)))
BIN    := $(VENV)/bin
# What is installed: for the demo, for NumPy and PyTorch alone, for everything.
DEMO_READY  := $(VENV)/.demo-ready
QUICK_READY := $(VENV)/.quick-ready
READY       := $(VENV)/.ready
FOR    ?=
SLOW   ?=
ARGS   ?=
CASES  ?= 100
ROWS   ?=
# Of two cores one process uses little more than one. More workers are more memory: each holds every framework.
WORKERS ?= 2

PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal
SLOW_TESTS = $(if $(findstring /,$(SLOW)),-m "" --slow-part $(SLOW),$(if $(filter 1 true yes,$(SLOW)),-m ""))

# Exactly this release: a range, here or in another package, would pass over a CPU build that the machine has ready and
# take the newest torch, with several GB of CUDA libraries.
TORCH := torch==2.13.0

# The GPU kernels are tested in its interpreter and compiled by it, which a CPU build of torch does not bring.
TRITON := triton==3.8.0

# Kept in the environment, not fetched anew for each build: what is compiled once stays compiled.
BUILD_TOOLS  := 'scikit-build-core>=1.1' 'nanobind>=2.9' 'cmake>=3.22' ninja
# With the headers of XLA's custom calls, without which JAX's programs call back into Python.
XLA_HEADERS  := 'jax>=0.10'
QUICK_TOOLS  := 'pytest>=8.2' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'ml_dtypes>=0.4'
NATIVE_FILES := CMakeLists.txt $(filter-out csrc/tests/%,$(wildcard csrc/*/*.*))
CPP_FILES    := $(filter %.h %.cc %.cpp,$(wildcard csrc/*/*.*))

WHEELS_VENV  := .venv-wheels
WHEELS_READY := $(WHEELS_VENV)/.ready

MXNET_VENV   := .venv-mxnet
MXNET_BIN    := $(MXNET_VENV)/bin
MXNET_READY  := $(MXNET_VENV)/.ready
MXNET_PIP    := $(MXNET_BIN)/python -m pip --disable-pip-version-check --no-input -qq
export ATTNSCORE_MXNET_PYTHON := $(abspath $(MXNET_BIN)/python)

INTERPRETERS := $(or $(PYTHON),python3 python3.11 python3.12 python3.13)
IN_RANGE     := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
# -qq: errors only. pip's --log would bring its warnings and progress bars back.
PIP          := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq
# Python compiles a module when it is first imported. Compiling all of them here took more than half of pip's time for the
# demo (42 s in place of 104 s on two busy cores, 2026-11-23), and most are never imported.
INSTALL      := $(PIP) install --no-compile
EDITABLE     := $(INSTALL) --no-build-isolation --editable
# The compiled module and a pointer to the sources, as a wheel.
WHEEL        := build/editable
BUILD_WHEEL  := $(BIN)/python -c 'from scikit_build_core import build; build.build_editable("$(WHEEL)")' >$(WHEEL)/log 2>&1

# The first import of a module leaves its bytecode for the next process, also where the caller's environment forbids it:
# the tests start many, and compiling the frameworks anew took each of them 9 seconds (2026-11-24).
export PYTHONDONTWRITEBYTECODE :=

# The model that the demo and the tests use lies in site-packages; nothing may ask a hub for it.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
# Plots go to files, on machines without a screen too.
export MPLBACKEND := Agg

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all test-gpu test-gpu-interpreted mutants mutants-drawn versions check sanitize arm docs wheels format clean distclean

help: ## this list
	@echo "make TARGET [PYTHON=python3.12] [ARGS=...] [SLOW=1]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	    while IFS='|' read -r name text; do printf '  %-10s %s\n' "$$name" "$$text"; done

demo: $(DEMO_READY) ## the tour, on a real model and real text; plots and numbers into attnscore-demo/
	@$(BIN)/attnscore demo $(ARGS)

quick: $(QUICK_READY) ## half of the default tests of NumPy, PyTorch and the native module: one minute
	@$(PYTEST) --quick $(ARGS)

test: $(READY) $(MXNET_READY) ## the tests, some minutes; FOR=masks for those of a package, SLOW=1 for the slow ones as well
	@$(PYTEST) $(SLOW_TESTS) $(if $(FOR),--for $(FOR)) $(ARGS)

test-all: $(READY) $(MXNET_READY) ## the slow tests too, and products of tables in place of pairs: hours, before a release
	@$(PYTEST) -m "" --products $(ARGS)

test-gpu: $(READY) ## the GPU kernels, on a GPU; with a torch built for CUDA in the environment
	@$(BIN)/pytest -m "" tests/gpu $(ARGS)

test-gpu-interpreted: $(READY) ## the GPU kernels without a GPU: on the CPU, and compiled for three architectures; ten minutes
	@TRITON_INTERPRET=1 $(PYTEST) -m "" tests/gpu $(ARGS)
	@$(PYTEST) -m "" tests/test_triton_compiled.py

mutants: $(READY) ## small faults in a copy of the package, each of which a test must find; ARGS="NAME --again"
	@$(BIN)/python tests/mutants/run.py $(ARGS)

mutants-drawn: $(READY) ## drawn changes of kernels, masks, plans, problem and scores: the share that the tests find; ARGS="masks --count 20"
	@$(INSTALL) 'cosmic-ray==8.7.*'
	@$(BIN)/python tests/mutants/drawn.py $(ARGS)

versions: $(READY) ## each framework's default tests with its newest and its oldest release; hours; ROWS="torch-newest"
	@$(build_wheel)
	@$(BIN)/python tests/versions.py --wheel $(WHEEL)/*.whl --pin '$(TORCH)' --pin '$(TRITON)' \
	    $(ROWS) --numprocesses=$(WORKERS) --dist=worksteal $(ARGS)

check: $(READY) ## lint, format, types, project file
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@$(BIN)/mypy
	@$(BIN)/validate-pyproject pyproject.toml

sanitize: $(READY) ## the native kernels and their threads under the address, undefined-behaviour and thread sanitizers
	@$(call sanitized,address$(COMMA)undefined,$(CASES))
	@$(call sanitized,thread,10)

arm: $(READY) ## the native kernels for Arm: cross-compiled, run in an emulator
	@$(call has_arm_tools)
	@$(BIN)/cmake -S . -B build/arm -G Ninja --log-level=WARNING -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(ARM_CXX) \
	    -DCMAKE_EXE_LINKER_FLAGS=-static -DATTNSCORE_MODULE=OFF -DATTNSCORE_DRIVER=ON
	@$(BIN)/cmake --build build/arm -- --quiet
	@$(ARM_RUN) build/arm/driver $(CASES)
	@echo "a CPU without BF16:" && $(ARM_RUN) -cpu neoverse-n1 build/arm/driver 10

docs: $(READY) ## the facts of docs/facts.toml into the pages, and the documentation as a site, into build/site
	@$(BIN)/python docs/facts.py
	@$(EDITABLE) '.[docs]' && TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/mkdocs build --strict

wheels: $(WHEELS_READY) ## an sdist and wheels for Linux, macOS and Windows, into dist/, tried where they can run
	@PATH="$(abspath $(WHEELS_VENV)/bin):$$PATH" nice $(WHEELS_VENV)/bin/python tools/wheels.py dist $(ARGS)

format: $(READY) ## format the code and mend what the linter can mend
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format
	@$(BIN)/clang-format -i $(CPP_FILES)

clean: ## remove caches, build output, the results of demo and bench
	@rm -rf build dist attnscore-demo attnscore-bench .benchmarks .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove the environments too
	@rm -rf .venv .venv-*

SET_UP_FILES := pyproject.toml Makefile $(NATIVE_FILES)

$(DEMO_READY): $(SET_UP_FILES)
	@$(call set_up,demo,)
	@touch $@

$(QUICK_READY): $(SET_UP_FILES)
	@$(call set_up,demo,$(QUICK_TOOLS))
	@touch $(DEMO_READY) $@

$(READY): $(SET_UP_FILES)
	@$(call set_up,test check,$(XLA_HEADERS))
	@$(INSTALL) --no-deps '$(TRITON)'
	@touch $(DEMO_READY) $(QUICK_READY) $@

# The module is the one that the first environment has compiled. It is an editable wheel: the Python files stay where they
# are edited.
$(MXNET_READY): $(READY) pyproject.toml
	@$(BIN)/python -c '$(HAS_OLD_NUMPY)' || { echo "MXNet's tests are left out: it needs Python 3.11" >&2; exit 0; }; \
	set -e; $(MXNET_BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m venv --clear $(MXNET_VENV); \
	echo "installing MXNet and its NumPy into $(MXNET_VENV)"; \
	$(build_wheel); \
	wheel=$$(echo $(WHEEL)/*.whl); \
	$(MXNET_PIP) install --force-reinstall --no-deps "$$wheel"; \
	$(MXNET_PIP) install "$$wheel[mxnet,plot]" 'pytest>=8.2' 'ipykernel>=6.29'; \
	$(MXNET_BIN)/python -W ignore -c 'import mxnet' || { \
	    echo "MXNet does not load here. Of the system it needs, on Debian: apt-get install libgomp1 libquadmath0" >&2; \
	    exit 1; }; \
	touch $@

# The compilers for all systems, and no framework.
$(WHEELS_READY): VENV := $(WHEELS_VENV)
$(WHEELS_READY): pyproject.toml Makefile
	@$(make_venv)
	@$(WHEELS_VENV)/bin/python -c "$$REQUIREMENTS" wheels >$(WHEELS_VENV)/requirements
	@$(WHEELS_VENV)/bin/python -m pip --disable-pip-version-check --no-input -qq install --requirement $(WHEELS_VENV)/requirements
	@touch $@

# The requirements of extras, a line each.
define REQUIREMENTS
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
found, extras = list(project["dependencies"]), sys.argv[1:]
for extra in extras:
    for line in project["optional-dependencies"][extra]:
        if line.startswith("attnscore["):
            extras += line[len("attnscore["):-1].split(",")
        else:
            found.append(line)
print(*dict.fromkeys(found), sep="\n")
endef
export REQUIREMENTS

build_wheel = rm -rf $(WHEEL) && mkdir -p $(WHEEL) && { $(BUILD_WHEEL) || { cat $(WHEEL)/log >&2; exit 1; }; }

# (extras, packages that come first): one run of pip, while the compiler runs beside it.
define set_up
set -e; start=$$(date +%s); says() { echo "[$$(( $$(date +%s) - start )) s] $$1"; }; \
$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(make_venv); }; \
says "installing into $(VENV): the tools that build the native kernels"; \
$(INSTALL) $(BUILD_TOOLS) $(2); \
says "compiling the native kernels for this CPU, and downloading torch and the rest (large): about three minutes"; \
( $(build_wheel) ) & compiler=$$!; \
$(BIN)/python -c "$$REQUIREMENTS" $(1) >$(VENV)/requirements; \
$(INSTALL) '$(TORCH)' --requirement $(VENV)/requirements || { kill $$compiler; exit 1; }; \
while kill -0 $$compiler 2>/dev/null; do \
    says "downloaded; compiled: $$(grep -o '^\[[0-9]*/[0-9]*\]' $(WHEEL)/log | tail -1)"; sleep 5; \
done; \
wait $$compiler; \
$(INSTALL) --force-reinstall --no-deps $(WHEEL)/*.whl; \
$(BIN)/python -c 'import attnscore._native' 2>/dev/null || \
    echo "The native kernels could not be built; what is missing: $(BIN)/pip install -v --no-build-isolation -e ." >&2; \
says "ready"
endef

HAS_OLD_NUMPY := import sys; sys.exit(sys.version_info[:2] != (3, 11))
COMMA := ,
# (sanitizers, cases): the C++ test driver, built for them in a folder of its own.
sanitized = $(BIN)/cmake -S . -B build/sanitize-$(firstword $(subst $(COMMA), ,$(1))) -G Ninja --log-level=WARNING \
    -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DATTNSCORE_MODULE=OFF -DATTNSCORE_DRIVER=ON \
    -DATTNSCORE_SANITIZE=$(1) && \
    $(BIN)/cmake --build build/sanitize-$(firstword $(subst $(COMMA), ,$(1))) -- --quiet && \
    echo "$(1):" && build/sanitize-$(firstword $(subst $(COMMA), ,$(1)))/driver $(2)

# Linked statically, so that the emulator needs no libraries of the other architecture. QEMU takes 3 to 12 s for 10 cases.
ARM_CXX := aarch64-linux-gnu-g++
ARM_RUN  = $(firstword $(shell command -v qemu-aarch64-static || command -v qemu-aarch64 || true))
define has_arm_tools
missing=; \
command -v $(ARM_CXX) >/dev/null || missing="$$missing g++-aarch64-linux-gnu"; \
test -n "$(ARM_RUN)" || missing="$$missing qemu-user-static"; \
if [ -n "$$missing" ]; then \
    echo "make arm needs a cross compiler and an emulator; on Debian: apt-get install$$missing" >&2; \
    exit 1; \
fi
endef

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
