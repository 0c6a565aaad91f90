# make demo   make a virtual environment, install, run a small search, print its ranked table
# make test   the same with the development tools: lint, types, docs, tests (a process a core)
# make docs   build the site into build/site, warnings being errors
# make audit  ask pip-audit (PyPI's advisories) about what is installed; needs the network
# make lock   renew requirements.lock: every dependency, for Python 3.10 and newer
# make clean  remove what these made
#
# PYTHON: the interpreter to start from. TORCH: the torch requirement, for example
# TORCH=torch==2.13.0; changing it reinstalls. LOCK: a file of exact versions to install, for
# example LOCK=requirements.lock; none by default.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.9,<3
LOCK ?=
LOCKED_TORCH ?= torch==2.13.0
DEMO ?= --problem deepseek-v4-flash --tokens 512 --space demo --out build/demo

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINT := $(if $(LOCK),--constraint '$(LOCK)')
# One stamp for each torch requirement and lock: a file name may hold neither > nor =.
TORCH_STAMP := $(VENV)/.torch-$(shell printf '%s' '$(TORCH) $(LOCK)' | cksum | cut -d ' ' -f 1)

.PHONY: demo test lint types docs unit audit lock clean

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
	$(BIN)/python -m pytest -q -n auto --dist worksteal

# In an environment of its own, which leaves the versions of the other as they are.
audit: $(VENV)/.installed-dev
	$(BIN)/python -m venv build/audit
	build/audit/bin/python -m pip install --quiet 'pip-audit>=2.7,<3'
	build/audit/bin/pip-audit --path \
	    "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Versions that the file has stay where they can; delete it for the newest ones.
lock: | $(BIN)/python
	$(BIN)/python -m venv build/lock
	build/lock/bin/python -m pip install --quiet 'uv>=0.9,<1'
	printf '%s\n' '$(LOCKED_TORCH)' > build/lock/torch.txt
	build/lock/bin/uv pip compile --quiet --universal --python-version 3.10 --no-annotate \
	    --custom-compile-command 'make lock' --extra dev --extra gpu \
	    --constraint build/lock/torch.txt --output-file requirements.lock pyproject.toml

clean:
	rm -rf $(VENV) build tl_megamoe.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: with a pinned requirement the later installs find it in place and keep it.
$(TORCH_STAMP): | $(BIN)/python
	rm -f $(VENV)/.torch-*
	$(PIP) install $(CONSTRAINT) '$(TORCH)'
	touch $@

$(VENV)/.installed: $(TORCH_STAMP) pyproject.toml $(LOCK)
	$(PIP) install $(CONSTRAINT) --editable .
	touch $@

$(VENV)/.installed-dev: $(TORCH_STAMP) pyproject.toml $(LOCK)
	$(PIP) install $(CONSTRAINT) --editable '.[dev]'
	touch $@ $(VENV)/.installed
