# Two commands are all there is to know: `make serve` and `make test`. Needs python3 (3.11 or later) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
TPU_VENV := .venv-tpu
TPU_STAMP := $(TPU_VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv serve test test-aot lint proto demo-model clean

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

serve: $(RUN_STAMP) ## serve the built-in demo model (ARGS="--port 50052" adds flags)
	@exec $(BIN)/jaxserve serve $(ARGS)

test: $(DEV_STAMP) ## run the test suite (ARGS="-k sampler" selects)
	$(BIN)/python -m pytest $(ARGS)

# The compilers for TPUs come with libtpu, in an environment of their own: its plugin would be loaded by every start.
$(TPU_STAMP): requirements-dev.txt
	test -x $(TPU_VENV)/bin/python || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(TPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "jax[tpu]==$$(sed -n 's/^jax==//p' requirements-dev.txt)"
	touch $@

test-aot: $(TPU_STAMP) ## compile for accelerators that are not there (ARGS="-k v5e" selects)
	$(TPU_VENV)/bin/python -m pytest tests/aot/test_tpu.py $(ARGS)

lint: $(DEV_STAMP) ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

proto: $(DEV_STAMP) ## regenerate the gRPC code from its .proto
	$(BIN)/python -m server.proto.generate

demo-model: $(DEV_STAMP) ## train the demo model again
	$(BIN)/python -m jaxserve.demo.train

clean: ## remove the environment and build products
	rm -rf $(VENV) $(TPU_VENV) build dist *.egg-info
