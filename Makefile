# The words of this checkout; `make help` lists them. Everything they set up lies in .venv and .make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := .make

PLUGINS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard plugins/*/pyproject.toml)))
EXAMPLES := $(patsubst %/pyproject.toml,%,$(sort $(wildcard examples/*/pyproject.toml)))
SUITES := tests $(wildcard $(addsuffix /tests,$(PLUGINS) $(EXAMPLES)))
HOOKS := $(wildcard plugins/*/luce_*/hooks.py)
# Examples are tested where they lie and never installed here: they would show up in `make serve`.
EXAMPLE_PATH := $(subst $() $(),:,$(abspath $(EXAMPLES)))
METADATA := pyproject.toml constraints.txt $(addsuffix /pyproject.toml,$(PLUGINS))

PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# What we build needs one builder, not an environment of its own for each package. The core comes first: pip has
# to know its extras when a plugin asks for it.
EDITABLE := --no-build-isolation --editable
EDITABLE_PLUGINS := $(addprefix --editable ./,$(PLUGINS))
THREADS ?= 2
export OMP_NUM_THREADS ?= $(THREADS)
# Tests run side by side; many of them wait for programs they started.
WORKERS ?= 2

TRITON_TESTS := plugins/luce-backend-triton/tests
KERNEL_TARGETS ?= cuda:61 cuda:70 cuda:75 cuda:80 cuda:86 cuda:89 cuda:90 cuda:100 cuda:110 cuda:120 cuda:121 \
	hip:gfx1100 hip:gfx1151 hip:gfx1201

.DEFAULT_GOAL := help
.PHONY: help setup serve test check lint types imports proof kernels bench new-plugin clean

help:
	@echo "make serve       set up, fetch the default model if need be, and serve it"
	@echo "                 MODEL=file.gguf for another model, ARGS='--port 9000' for more flags"
	@echo "make test        set up and run every test; ARGS='-k name' goes to pytest, WORKERS=8 runs more at a time"
	@echo "make check       lint, types, imports, wheels, installs into a clean environment"
	@echo "make kernels     compile every GPU kernel for every chip, without a GPU; minutes"
	@echo "make bench       measure against the peers; see benchmarks/"
	@echo "make new-plugin  NAME=glimmer KIND=arch (or scheduler, drafter): a plugin to start from"
	@echo "make clean       remove everything that was set up here"

setup: $(STAMPS)/installed

serve: $(STAMPS)/installed
	$(BIN)/luce-core serve $(MODEL) $(ARGS)

test: $(STAMPS)/tools
	$(BIN)/luce-core pull smollm2-135m
	OMP_NUM_THREADS=1 PYTHONPATH=$(EXAMPLE_PATH) $(BIN)/pytest -n $(WORKERS) $(SUITES) $(ARGS)

check: lint types imports proof

lint: $(STAMPS)/tools
	$(BIN)/ruff check .

types: $(STAMPS)/tools
	$(BIN)/mypy
	$(BIN)/mypy $(HOOKS)

imports: $(STAMPS)/tools
	$(BIN)/lint-imports

proof: $(STAMPS)/tools
	$(BIN)/python tools/clean_install.py

kernels: $(STAMPS)/compilers
	cd $(TRITON_TESTS) && $(abspath $(BIN))/python compile_cuda.py
	cd $(TRITON_TESTS) && $(abspath $(BIN))/python compile_kernels.py $(KERNEL_TARGETS)
	cd $(TRITON_TESTS) && $(abspath $(BIN))/python compile_sequences.py $(KERNEL_TARGETS) --wide

bench: $(STAMPS)/tools
	$(BIN)/python benchmarks/cpu/compare.py $(ARGS)

new-plugin: $(STAMPS)/tools
	@test -n "$(NAME)" || { echo "Say which: make new-plugin NAME=something" >&2; exit 2; }
	$(BIN)/python tools/new_plugin.py $(NAME) $(addprefix --kind ,$(KIND)) $(ARGS)

clean:
	rm -rf $(VENV) $(STAMPS) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# --- what the words stand on

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is older. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/builder: $(STAMPS)/venv
	$(PIP_INSTALL) 'hatchling>=1.26' editables
	@touch $@

$(STAMPS)/installed: $(STAMPS)/builder $(METADATA)
	$(PIP_INSTALL) $(EDITABLE) . $(EDITABLE_PLUGINS)
	@touch $@

$(STAMPS)/tools: $(STAMPS)/builder $(METADATA)
	$(PIP_INSTALL) $(EDITABLE) '.[test,check]' $(EDITABLE_PLUGINS)
	@touch $(STAMPS)/installed $@

$(STAMPS)/compilers: $(STAMPS)/tools
	$(PIP_INSTALL) $(EDITABLE) '.[kernels]'
	@touch $@
