# `make serve` and `make test` are the two commands to know. Needs python3 (3.11 or later) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
TPU_VENV := .venv-tpu
TPU_STAMP := $(TPU_VENV)/.installed
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/.installed
SCHEMAS := .venv-schemas
RAY_VENV := .venv-ray
RAY_STAMP := $(RAY_VENV)/.installed
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed
# Wheels that compile for GPUs are for Python 3.12 and later; a pyenv shim may stand for a version that is not active.
PYTHON312 = $(firstword $(foreach python,$(shell command -v python3.12) $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),\
  $(shell $(python) -c "print('$(python)')" 2>/dev/null)))

.DEFAULT_GOAL := help
.PHONY: help venv wheel serve test test-groups test-alone test-all test-weekly test-aot test-aot-tpu test-aot-tpu-plans test-aot-gpu test-deploy test-clients test-pythons test-scale test-scale-one bench-guard lint proto docs docs-tables demo-model clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(RUN_STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jaxserve needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) -V). Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(DEV_STAMP): requirements-dev.txt $(RUN_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

venv: $(RUN_STAMP) ## make .venv with the pinned dependencies and .venv/bin/jaxserve

MACHINE ?=
wheel: $(RUN_STAMP) ## build a wheel into dist/, with the CPU kernels compiled (MACHINE=aarch64: for another kind of machine)
	$(BIN)/python -c 'from pallas_kernels.cpu import build; build.ship("$(MACHINE)")'
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . \
	  -C--build-option=--plat-name=$(or $(MACHINE:%=linux_%),$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_platform())'))
	rm -r pallas_kernels/cpu/prebuilt

serve: $(RUN_STAMP) ## serve the built-in demo model (ARGS="--port 50052" adds flags)
	@exec $(BIN)/jaxserve serve $(ARGS)

test: $(DEV_STAMP) ## run the test suite (ARGS="-k sampler" selects)
	CHECK_SHAPES=1 $(BIN)/python -m pytest $(ARGS)

# The markers of pyproject.toml: every test is in `make test`, here, in test-aot, in test-deploy or in test-weekly.
GROUPS := not (smoke or weekly or aot or schemas or alone) and (exhaustive or interpret or processes or clients or bench or long)
test-groups: $(DEV_STAMP) ## run the groups of tests that `make test` leaves out
	$(BIN)/python -m pytest -n 2 -m "$(GROUPS)" -rs $(ARGS)

test-alone: $(DEV_STAMP) ## run the tests that nothing may run beside
	$(BIN)/python -m pytest -n 0 -m 'alone and not weekly' $(ARGS)

test-clients: $(DEV_STAMP) ## run other people's clients, each in an environment of its own
	$(BIN)/python -m tests.clients.run $(ARGS)

test-pythons: ## run a part of the tests on the other supported Pythons that are here (ARGS="--whole 3.13": all, on one)
	$(PYTHON) -m tests.pythons $(ARGS)

# Ray in an environment of its own: it is large, and warns where ours makes warnings errors.
$(RAY_STAMP): requirements-dev.txt
	test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt "ray[serve]==2.60.0"
	touch $@

# Serve gives its proxy three times 5 s to start, which is too little where packages are installed beside it.
SCALE := RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=20 $(RAY_VENV)/bin/python -m pytest -n 0 -W ignore -m scale tests/ray tests/server/http
test-scale: $(RAY_STAMP) ## serve on a local cluster of Ray
	$(SCALE) $(ARGS)

test-scale-one: $(RAY_STAMP)
	$(SCALE) -k killed_replica

test-all: test-aot test-deploy test-clients test-pythons test-scale-one test-groups test-alone test ## run every test but for the weekly ones

MINUTES ?= 120
test-weekly: $(DEV_STAMP) $(TPU_STAMP) ## run what takes hours, and `make test` with XLA's optimizations (MINUTES=8: of the soak)
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(BIN)/python -m pytest $(ARGS)
	$(BIN)/python -m pytest -m 'weekly and not (aot or alone)' $(ARGS)
	$(BIN)/python -m pytest -n 0 -m 'weekly and alone' $(ARGS)
	$(BIN)/python -m benchmarks faults --minutes $(MINUTES)
	$(MAKE) test-aot AOT="-n 0 -m 'aot and weekly'"
	$(MAKE) test-scale

ACCELERATORS := tests/jaxserve/planning/test_compiled_for_accelerators.py tests/jaxserve/planning/test_drawn_specs.py
# One test after another, for the tables that they print; three such runs beside each other.
AOT = -n 0 -m 'aot and not weekly'
test-aot: ## compile kernels and steps for accelerators that are not there
	@$(MAKE) -j3 --output-sync=target test-aot-tpu test-aot-tpu-plans test-aot-gpu

# The compilers for TPUs come with libtpu, in an environment of their own: its plugin would be loaded by every start.
$(TPU_STAMP): requirements-dev.txt
	test -x $(TPU_VENV)/bin/python || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(TPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "jax[tpu]==$$(sed -n 's/^jax==//p' requirements-dev.txt)"
	touch $@

test-aot-tpu: $(TPU_STAMP)
	$(TPU_VENV)/bin/python -m pytest $(AOT) tests/aot/test_tpu.py tests/aot/test_tpu_experts.py tests/aot/test_tpu_steps.py tests/aot/test_block_copies.py $(ARGS)

test-aot-tpu-plans: $(TPU_STAMP)
	$(TPU_VENV)/bin/python -m pytest $(AOT) $(ACCELERATORS) $(filter-out --write-ceilings,$(ARGS))

# The compiler logs stack traces; where llvm-symbolizer is installed, naming their functions takes most of the time.
ifneq ($(PYTHON312),)
test-aot-gpu: $(GPU_STAMP)
	LLVM_DISABLE_SYMBOLIZATION=1 JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest $(AOT) tests/aot/test_gpu.py tests/aot/test_gpu_products.py tests/aot/test_gpu_steps.py tests/aot/test_block_copies.py $(ACCELERATORS) $(ARGS)
	TRITON_INTERPRET=1 JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest $(AOT) tests/pallas_kernels/test_gpu_hopper.py $(filter-out --write-ceilings,$(ARGS))
else
test-aot-gpu:
	@echo "WARNING: nothing is compiled for GPUs: that takes Python 3.12, and there is no python3.12 here" >&2
endif

$(GPU_STAMP): requirements-aot-gpu.txt requirements-newest.txt
	test -x $(GPU_VENV)/bin/python || $(PYTHON312) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-aot-gpu.txt
	touch $@

test-deploy: $(SCHEMAS) ## render deploy/ and hold it to Kubernetes' own schemas
	PYTHONPATH=$(SCHEMAS) $(BIN)/python -m pytest -n 0 -m schemas tests/deploy -rs $(ARGS)

# Beside .venv rather than in it: 120 MB that nothing else takes. Where they cannot be had the rest is held all the same.
$(SCHEMAS): $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ kubernetes-validate==1.37.0 || mkdir -p $@

bench-guard: $(RUN_STAMP) ## see whether something has become slower (ARGS=--write keeps what it measures)
	$(BIN)/python -m benchmarks regression $(ARGS)

lint: $(DEV_STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

proto: $(DEV_STAMP) ## regenerate the gRPC code from its .proto
	$(BIN)/python -m server.proto.generate

# In an environment of its own: the site's tools read the code and import nothing of it.
$(DOCS_STAMP): requirements-docs.txt
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

docs: $(DOCS_STAMP) ## build the documentation site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

docs-tables: $(DEV_STAMP) ## write the table of sampling parameters in docs/features.md anew
	$(BIN)/python -m tests.docs.sampling_table

demo-model: $(DEV_STAMP) ## train the demo model again
	$(BIN)/python -m examples.train_demo.train

clean: ## remove the environment and build products
	rm -rf $(VENV) $(TPU_VENV) $(GPU_VENV) $(SCHEMAS) $(RAY_VENV) $(DOCS_VENV) .venv-3.* .venv-clients site build dist *.egg-info
