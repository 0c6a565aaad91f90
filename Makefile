# make demo   make a virtual environment, install, run a small search, print its ranked table
# make test   the same with the development tools: lint, types, docs, tests
# make docs   build the site into build/site, warnings being errors
# make clean  remove what these made
#
# PYTHON: the interpreter to start from. TORCH: the torch requirement, for example
# TORCH=torch==2.13.0; changing it reinstalls.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.9
DEMO ?= --problem deepseek-v4-flash --tokens 512 --space demo --out build/demo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One stamp for each torch requirement: a file name may hold neither > nor =.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH)' | cksum | cut -d ' ' -f 1)

.PHONY: demo test lint types docs unit clean

demo: $(VENV)/.installed
	$(BIN)/tl-megamoe search $(DEMO)

test: lint types docs unit

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The installed tree is checked: only there do the mapped folders lie inside the package.
types: $(VENV)/.installed-dev
	rm -rf build/check build/lib build/bdist*
	$(PIP) install --quiet --no-deps --no-build-isolation --target build/check .
	cd build/check && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml \
	    --cache-dir ../mypy_cache -p tl_megamoe

docs: $(VENV)/.installed-dev
	$(BIN)/mkdocs build --strict

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q

clean:
	rm -rf $(VENV) build tl_megamoe.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: with a pinned requirement the later installs find it in place and keep it.
$(TORCH_STAMP): | $(BIN)/python
	rm -f $(VENV)/.torch-*
	$(PIP) install '$(TORCH)'
	touch $@

$(VENV)/.installed: $(TORCH_STAMP) pyproject.toml
	$(PIP) install --editable .
	touch $@

$(VENV)/.installed-dev: $(TORCH_STAMP) pyproject.toml
	$(PIP) install --editable '.[dev]'
	touch $@ $(VENV)/.installed
