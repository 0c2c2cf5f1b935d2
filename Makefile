# `make test`, `make demo` and `make bench` set up what they need first, in a virtual environment.
#
#   make TARGET PYTHON=python3.12       another interpreter; a torch in range that it has already is used as it is
#   make TARGET TORCH="torch==2.11.0"   another torch; pip options such as --index-url may follow in the same string
#   make TARGET VENV=.venv-other        another environment

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# For a torch that brings no Triton, as the builds for CPUs do not.
TRITON ?= triton==3.9.0
# The trainers and kernels that tests, demo and benchmarks meet.
PEERS ?= "trl==1.16.0" "liger-kernel==0.8.5" "verl[verl-core]==0.9.1; python_version < '3.13'"
TOOLS ?= clang-format==23.1.5 mypy==2.4.1 ruff==0.17.6

BIN := $(VENV)/bin
TORCH_VERSION := import importlib.metadata as m; print(m.version('torch'))
TORCH_FOLDER := import importlib.metadata as m; print(m.distribution('torch').locate_file(''))
TORCH_IN_RANGE := import importlib.metadata as m; v = m.version('torch'); print(v * ([*map(int, v.split('.')[:2])] >= [2, 10]))
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))
ifeq ($(origin TORCH),file)
FOUND := $(shell $(PYTHON) -c "$(TORCH_IN_RANGE)" 2>/dev/null)
endif

# A backend that is missing fails the run; it is never skipped. One worker for each core, each with threads of its own:
# those that wait must not spin.
PYTEST := HPO_CORE_TEST_BACKENDS=cpu,triton,cuda_emulated OMP_WAIT_POLICY=passive $(BIN)/pytest --numprocesses auto --dist worksteal

export HPO_CORE_EMULATED ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup build test test-long coverage sanitize test-matrix demo demo-agent bench lint wheel gpu-check clean

setup: build

# The extensions, in place; under a second where nothing has changed.
build: $(VENV)/installed
	@$(BIN)/python setup.py -q build_ext --inplace

$(VENV)/installed: Makefile pyproject.toml
	@echo 'hpo_core: setting up $(VENV) with'
	@echo '  $(if $(FOUND),torch $(FOUND) as $(PYTHON) has it,$(TORCH): 0.2 GB to download if built for CPUs, 3 GB for CUDA, which Linux gets by default)'
	@echo '  $(TRITON) where torch brings none: 0.3 GB'
	@echo '  $(subst ",,$(PEERS)) and what they need: 0.3 GB'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --upgrade pip
	$(if $(FOUND),$(PYTHON) -c "$(TORCH_FOLDER)" > $$($(BIN)/python -c "$(SITE_PACKAGES)")/torch.pth,$(BIN)/pip install $(TORCH))
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install "$(TRITON)"
	$(BIN)/pip install "torch==$$($(BIN)/python -c "$(TORCH_VERSION)")" "setuptools>=77" "pybind11>=3" ninja $(PEERS) $(TOOLS)
	$(BIN)/pip install --no-build-isolation --editable ".[testing,bench]"
	@touch $@

# Plain pytest: `python -m pytest` would put this folder first on the path.
test: build
	$(PYTEST) -m "not long"

test-long: build
	$(PYTEST) --examples 1000

# Of Python's lines, which one native backend and few examples reach; minutes instead of the whole run.
coverage: build
	$(PYTEST) -m "not long" -k "not triton and not cuda_emulated" --examples 3 --cov=hpo_core --cov-report=term-missing:skip-covered --cov-fail-under=95

# The C++ code and the emulated CUDA under AddressSanitizer and UBSan, on each instruction set of this machine.
sanitize: $(VENV)/installed
	HPO_CORE_SANITIZE=address,undefined HPO_CORE_EMULATED=1 HPO_CORE_CUDA=0 $(BIN)/python setup.py -q build --build-lib build/sanitized
	$(BIN)/python tests/sanitized.py build/sanitized --numprocesses auto

# The oldest and the newest torch and Triton that we promise to work with.
test-matrix:
	$(MAKE) test VENV=.venv-oldest TORCH="torch==2.10.*" TRITON="triton==3.6.*" PEERS=
	$(MAKE) test VENV=.venv-newest TORCH="torch" TRITON="triton" PEERS=

demo: build
	$(BIN)/python examples/demo.py

demo-agent: build
	$(BIN)/python examples/demo_agent.py

bench: build
	$(BIN)/python bench/run.py

gpu-check: build
	PATH="$(abspath $(BIN)):$$PATH" bash bench/gpu_check.sh

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files '*.cpp' '*.cu' '*.cuh' '*.h' | xargs $(BIN)/clang-format --dry-run -Werror

# What users get: no test extensions, and no file of an earlier build.
wheel: $(VENV)/installed
	rm -rf build/lib.* build/bdist.*
	HPO_CORE_EMULATED=0 $(BIN)/pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info hpo_core/*.so hpo_core/_build_info.json .venv .venv-oldest .venv-newest
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
