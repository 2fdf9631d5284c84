# make test       checks and the fast tests            make demo      train a real small model, end to end
# make test-all   everything but the GPU tests         make wheel     a wheel in dist/
# make check-times   how long starting and planning take, on an idle machine
# The first call makes .venv. With PYTHON=/path/to/python its torch (2.11 or newer) is used; else TORCH is installed.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
BUILD_TOOLS := cmake ninja nanobind scikit-build-core
ENVIRONMENT := $(VENV)/.installed
BUILD := build/native

.PHONY: help test test-all check-times demo lint native try-native wheel clean

help:
	@sed -n '1,5s/^# *//p' Makefile

# Repeated only when the requirements change: the install is the source folder itself.
$(ENVIRONMENT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "MegaTrain needs Python 3.11 or newer; set PYTHON=/path/to/python")'
	@if $(PYTHON) -c 'import torch; v = torch.__version__.split("."); assert (int(v[0]), int(v[1])) >= (2, 11)' 2>/dev/null; then \
	  echo "using the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV) && \
	  $(PYTHON) -c 'import sys, sysconfig; print(sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else "")' \
	    > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/environment_of_the_caller.pth"; \
	else \
	  $(PYTHON) -m venv $(VENV) && $(PIP) install --quiet '$(TORCH)'; \
	fi
	$(PIP) install --quiet $(BUILD_TOOLS)
	$(PIP) install --quiet --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	@touch $@

# The compiled optimizer kernel, into the source folder. CMake rebuilds what changed.
native: $(ENVIRONMENT)
	@PATH="$(abspath $(VENV)/bin):$$PATH" && \
	  cmake -S . -B $(BUILD) -G Ninja --log-level=WARNING -DPython_EXECUTABLE="$(abspath $(PY))" \
	    -Dnanobind_ROOT="$$($(PY) -m nanobind --cmake_dir)" >/dev/null && \
	  cmake --build $(BUILD) && cmake --install $(BUILD) --prefix src >/dev/null

# Without a compiler the plain torch kernel does the work; where there is one, a test fails if this did.
try-native: $(ENVIRONMENT)
	@$(MAKE) --no-print-directory native || echo "the native kernel was not built: going on with the plain torch one"

lint: $(ENVIRONMENT)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# pytest ends with 5 where it finds no test.
test: lint try-native
	$(PY) -m pytest -m "not slow and not gpu and not times" -n $(WORKERS) --durations 15 || [ $$? -eq 5 ]

test-all: lint try-native
	$(PY) -m pytest -m "not gpu and not times" -n $(WORKERS) --durations 30 || [ $$? -eq 5 ]

check-times: try-native
	$(PY) -m pytest tests/times -m times

demo: try-native
	$(PY) examples/demo.py

wheel: $(ENVIRONMENT)
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist src/megatrain/kernels/_native*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
