# `make help` lists the targets. Each sets up its packages and extensions first, in a virtual environment.
#
#   make TARGET PYTHON=python3.12       another interpreter; if it has a torch in range, that torch is used
#   make TARGET TORCH="torch==2.11.0"   another torch; pip options such as --index-url may follow in the same string
#   make TARGET VENV=.venv-other        another environment
#   make TARGET V=1                     every command and all that it prints
#
# HPO_CORE_CUDA and the other variables of setup.py can be set, too: a target only chooses their defaults.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# This is a bound, because a torch for CUDA requires its own Triton; a torch for CPUs requires none.
TRITON ?= triton<=3.9.0
# The transformers that every trainer here accepts: the demo runs with the versions that the tests run with.
TRL ?= trl==1.16.0 transformers==5.10.4
# The trainers and kernels of tests and benchmarks.
PEERS ?= $(TRL) "jmespath==1.1.0" "liger-kernel==0.8.5" "verl[verl-core]==0.9.1; python_version < '3.13'" $(VIRTUALENV)
# Of verl's requirements. Later ones want a packaging that others exclude, and pip would download twenty to find out.
VIRTUALENV := "virtualenv<21.14.6; python_version < '3.13'"
TOOLS ?= clang-format==23.1.5 mypy==2.4.1 ruff==0.17.6
# Engines with an environment of their own: transformers and accelerate import DeepSpeed if it is installed.
ENGINES ?= deepspeed==0.19.8
# Trainers that contradict each other and those of TRL and verl: each goes into a folder of its own, with what its loss
# imports and without the rest of its requirements; torch, transformers, Ray and the others come from $(VENV).
AREAL ?= areal==1.0.4 aiofiles==25.1.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 blinker==1.9.0 colorlog==6.12.0 \
	distro==1.9.0 einops==0.8.2 flask==3.1.3 frozenlist==1.8.0 itsdangerous==2.2.0 jiter==0.19.0 lark==1.3.1 llvmlite==0.50.0 \
	multidict==7.2.1 numba==0.68.1 openai==2.20.0 orjson==3.13.0 propcache==0.5.4 sniffio==1.3.1 tenacity==9.2.1 \
	uvloop==0.23.0 werkzeug==3.1.9 yarl==1.25.1
AXOLOTL ?= axolotl==0.21.0 trl==1.14.1 addict==2.4.0 colorama==0.4.6 llvmlite==0.50.0 numba==0.68.1
MS_SWIFT ?= ms-swift==4.6.0 trl==0.29.1 dacite==1.9.2 einops==0.8.2 json-repair==0.64.6 modelscope==1.40.2 \
	modelscope-hub==0.5.1 peft==0.21.2 simplejson==4.3.0 sortedcontainers==2.4.0
OPENRLHF ?= openrlhf==0.11.2
SKYRL ?= skyrl==0.4.0 skyrl-gym==0.4.0 cloudpathlib==0.26.0 jaxtyping==0.3.11 loguru==0.7.3
TORCHRL ?= torchrl==0.14.1 tensordict==0.14.3 hoptorch==0.1.4 pyvers==0.2.3
TRINITY ?= trinity-rft==0.6.0
# The site of the manual is built from the source alone, in an environment of its own without torch.
DOCS ?= mkdocs==1.6.1 mkdocs-material==9.8.2 mkdocs-autorefs==1.4.5 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11 griffelib==2.4.1 \
	pymdown-extensions==13.1.2 ruff==0.17.6
SINCE ?= HEAD
PYTHONS ?= $(PYTHON)

BIN := $(VENV)/bin
TORCH_FOLDER := import importlib.metadata as m; print(m.distribution('torch').locate_file(''))
TORCH_IN_RANGE := import importlib.metadata as m; v = m.version('torch'); print(v * ([*map(int, v.split('.')[:2])] >= [2, 10]))
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))
ifeq ($(origin TORCH),file)
FOUND := $(shell $(PYTHON) -c "$(TORCH_IN_RANGE)" 2>/dev/null)
endif

# A missing backend fails the run; it is never skipped. Each core has one worker with threads of its own, and waiting
# threads must not spin.
TESTING := HPO_CORE_TEST_BACKENDS=cpu,triton,cuda_emulated OMP_WAIT_POLICY=passive
WORKERS := --numprocesses auto --dist worksteal
PYTEST := $(TESTING) $(BIN)/pytest $(WORKERS)

# The extensions that setup.py builds in place. Without a GPU the CUDA extension, minutes of nvcc, is left out.
FOR_TESTS := HPO_CORE_EMULATED=$${HPO_CORE_EMULATED-1} HPO_CORE_CUDA=$${HPO_CORE_CUDA-$$(nvidia-smi -L 2>/dev/null | grep -q GPU || echo 0)}
WITH_CUDA := HPO_CORE_CUDA=$${HPO_CORE_CUDA-}
WITHOUT_CUDA := HPO_CORE_CUDA=$${HPO_CORE_CUDA-0}
CPU_ALONE := HPO_CORE_EMULATED=$${HPO_CORE_EMULATED-0} $(WITHOUT_CUDA)
# $(call trainer,NAME,PACKAGES) runs the tests of one. Some ask for Python 3.12, but their losses run on 3.11, too.
trainer = $(PIP_INSTALL) --quiet --no-deps --ignore-requires-python --upgrade --target build/trainers/$(1) $(2) \
	&& PYTHONPATH=$(CURDIR)/build/trainers/$(1) HPO_CORE_TEST_BACKENDS=cpu OMP_WAIT_POLICY=passive CUDA_VISIBLE_DEVICES= \
	$(BIN)/pytest tests/test_$(1).py
SANITIZED := HPO_CORE_SANITIZE=address,undefined HPO_CORE_EMULATED=1 HPO_CORE_CUDA=0

# Python compiles a module at its first import; most are never imported, and compiling all takes longer than unpacking.
PIP_INSTALL := $(BIN)/pip install --no-compile
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call stage,NAME,COMMANDS) prints the time of the commands, and their output if one fails.
ifdef V
stage = $(2)
else
stage = @began=$$(date +%s); if log=$$({ $(2); } 2>&1); then echo "hpo_core: $(1) ... $$(($$(date +%s) - began)) s"; \
	else printf '%s\n' "$$log" 'hpo_core: $(1) ... failed' >&2; exit 1; fi
endif

# $(call set-up,PACKAGES,SETTINGS) runs pip and the compilers at once, because these need no package that pip downloads.
# A number of jobs would limit ninja, too.
set-up = +@$(2) $(MAKE) $(if $(V),,--silent) --no-print-directory --jobs build $(VENV)/$(1)

.PHONY: help setup build test test-changed test-long coverage sanitize test-matrix test-trainers demo demo-agent bench gpu-check docs lint format wheel wheels clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s%s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## the packages and the extensions of the tests
	$(call set-up,for-tests)

build: $(VENV)/for-building ## the extensions of the tests, in place; under a second if nothing has changed
	$(call stage,native code,$(FOR_TESTS) $(BIN)/python setup.py -q build_ext --inplace)

$(VENV)/for-building: pyproject.toml
	$(call stage,$(VENV) with build tools (5 MB to download),$(PYTHON) -m venv $(VENV) \
	&& $(PIP_INSTALL) --upgrade pip "setuptools>=77" "pybind11>=3" ninja \
	&& $(if $(FOUND),$(PYTHON) -c "$(TORCH_FOLDER)" >$$($(BIN)/python -c "$(SITE_PACKAGES)")/torch.pth,:))
	@touch $@

# Options such as --index-url apply to torch alone: with them torch is installed first, by itself.
TORCH_FIRST = $(if $(findstring --,$(TORCH)),$(PIP_INSTALL) $(TORCH),:)
THIS_TORCH = "$(if $(FOUND),torch==$(FOUND),$(firstword $(TORCH)))"
TORCH_SIZE = $(if $(FOUND),torch $(FOUND) as $(PYTHON) has it,$(TORCH): 0.2 GB to download if built for CPUs, 3 GB for CUDA, which Linux gets by default)
# Registers the checkout and builds the C++ backend, which is compiled once: a second build waits for it and finds it.
# It comes last, because what pip installs after it would wait, too.
EDITABLE := HPO_CORE_EMULATED=0 HPO_CORE_CUDA=0 $(PIP_INSTALL) --no-build-isolation --no-deps --editable .
REQUIRED := from setuptools.compat.py310 import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
	extras = [project['optional-dependencies'][name] for name in ('testing', 'bench')]; \
	print(*project['dependencies'], *sum(extras, []), sep='\n')
# Packages that PYTHON already has beside its torch put no commands into BIN, so these are installed again.
COMMANDS = $(if $(FOUND),$(PIP_INSTALL) --ignore-installed --no-deps $(TOOLS) "pytest>=9",:)

$(VENV)/for-tests: $(VENV)/for-building $(VENV)/asked Makefile
	@echo 'hpo_core: $(VENV) gets'
	@echo '  $(TORCH_SIZE)'
	@echo '  $(TRITON) if torch brings none: 0.3 GB'
	@echo '  $(subst ",,$(PEERS)) $(TOOLS) and their dependencies: 0.3 GB'
	$(call stage,packages,$(TORCH_FIRST) && $(COMMANDS) && $(BIN)/python -c "$(REQUIRED)" >$(VENV)/required.txt \
	&& $(PIP_INSTALL) --requirement $(VENV)/required.txt $(THIS_TORCH) "$(TRITON)" $(PEERS) $(TOOLS) && $(EDITABLE))
	@touch $(VENV)/for-demo $@

# The demo uses Triton only if torch brings it.
$(VENV)/for-demo: $(VENV)/for-building $(VENV)/asked Makefile
	@echo 'hpo_core: $(VENV) gets'
	@echo '  $(TORCH_SIZE)'
	@echo '  $(TRL) matplotlib and their dependencies: 0.15 GB'
	$(call stage,packages,$(TORCH_FIRST) && $(PIP_INSTALL) $(THIS_TORCH) $(TRL) matplotlib && $(EDITABLE))
	@touch $@

# A call that names another TORCH or PEERS than the last one installs it; a call that names none keeps the packages.
export ASKED = $(strip $(foreach name,TORCH TRITON TRL PEERS TOOLS,$(if $(filter file,$(origin $(name))),,$(name)=$($(name)))))
$(VENV)/asked: $(VENV)/for-building always
	@[ -f $@ ] && { [ -z "$$ASKED" ] || echo "$$ASKED" | cmp -s - $@; } || echo "$$ASKED" >$@
always:

# The targets call plain pytest, because `python -m pytest` would put this folder first on the path.
test: ## every test except the long ones
	$(call set-up,for-tests)
	$(PYTEST) -m "not long"

test-changed: ## the tests that changes since SINCE can reach; SINCE=HEAD by default
	$(call set-up,for-tests)
	$(TESTING) $(BIN)/python tests/changed.py $(SINCE) $(WORKERS)

test-long: ## every test with 1000 examples, and the CUDA extension built; no time limit
	$(call set-up,for-tests,$(WITH_CUDA))
	$(PYTEST) --examples 1000

coverage: ## the lines of Python that tests reach
	$(call set-up,for-tests)
	$(PYTEST) -m "not long" --examples 3 --cov=hpo_core --cov-report=term-missing:skip-covered --cov-fail-under=95

sanitize: $(VENV)/for-tests ## C++ and emulated CUDA under AddressSanitizer and UBSan, on each instruction set of this machine
	$(call stage,instrumented native code,$(SANITIZED) $(BIN)/python setup.py -q build --build-lib build/sanitized)
	$(BIN)/python tests/sanitized.py build/sanitized --numprocesses auto

# What was the newest once is installed anew. Each environment takes 7 GB of disk with a torch for CUDA.
test-matrix: ## the oldest and the newest torch and Triton that we promise to work with
	$(MAKE) test VENV=.venv-oldest TORCH="torch==2.10.*" TRITON="triton==3.6.*" PEERS=
	rm -f .venv-newest/asked
	$(MAKE) test VENV=.venv-newest TORCH="torch --upgrade triton" TRITON="triton" PEERS=

# pytest fails if it skips every test that it is given.
test-trainers: ## the integrations of docs/trainers.md, and the recipes of docs/distributed.md under DeepSpeed
	$(call set-up,for-tests,$(CPU_ALONE))
	$(call trainer,areal,$(AREAL))
	$(call trainer,axolotl,$(AXOLOTL))
	$(call trainer,ms_swift,$(MS_SWIFT))
	$(call trainer,openrlhf,$(OPENRLHF))
	$(call trainer,skyrl,$(SKYRL))
	$(call trainer,torchrl,$(TORCHRL))
	$(call trainer,trinity,$(TRINITY))
	HPO_CORE_EMULATED=0 HPO_CORE_CUDA=0 $(MAKE) setup VENV=.venv-trainers PEERS='$(ENGINES) $(TRL)'
	HPO_CORE_TEST_BACKENDS=cpu OMP_WAIT_POLICY=passive .venv-trainers/bin/pytest -k "deepspeed or zero" \
		tests/test_deepspeed.py tests/test_trl_over_ranks.py

demo: ## a small language model trained by TRL with these losses
	$(call set-up,for-demo,$(CPU_ALONE))
	$(BIN)/python examples/demo.py

demo-agent: ## grpo, gigpo and hgpo compared on an agent with many turns
	$(call set-up,for-demo,$(CPU_ALONE))
	$(BIN)/python examples/demo_agent.py

bench: ## the benchmarks on this machine
	$(call set-up,for-tests,$(WITHOUT_CUDA))
	$(BIN)/python bench/run.py

gpu-check: $(VENV)/for-tests ## build, tests and benchmarks on an NVIDIA GPU
	PATH="$(abspath $(BIN)):$$PATH" bash bench/gpu_check.sh

docs: .venv-docs/for-docs ## the manual as a site, in build/site; warnings and other hosts are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@! grep -rnoE '<(script|link|img|iframe)[^>]*(src|href)="?(https?:)?//[^" >]+' build/site --include='*.html'
	@echo 'hpo_core: open build/site/index.html'

.venv-docs/for-docs: Makefile
	$(call stage,.venv-docs with MkDocs (25 MB to download),$(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install --quiet $(DOCS))
	@touch $@

NATIVE_SOURCES := git ls-files '*.cpp' '*.cu' '*.cuh' '*.h'
lint: $(VENV)/for-tests ## ruff, mypy and clang-format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(NATIVE_SOURCES) | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/for-tests ## what ruff and clang-format can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(NATIVE_SOURCES) | xargs $(BIN)/clang-format -i

# A wheel has no test extensions and no files of an earlier build.
wheel: $(VENV)/for-building ## the wheel for users, in dist/
	rm -rf build/lib.* build/bdist.*
	HPO_CORE_EMULATED=0 $(BIN)/pip wheel --no-deps --wheel-dir dist .

wheels: ## manylinux wheels of the CPU backend in dist/, of each PYTHONS, audited and tried without a compiler
	$(PYTHON) tests/wheels.py --packages "$(TORCH) $(TRITON)" $(PYTHONS)

clean: ## removes everything that these targets made
	rm -rf build dist *.egg-info hpo_core/*.so hpo_core/_build_info.json .venv .venv-docs .venv-oldest .venv-newest .venv-trainers
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
