# Every verb does its own set-up: `make demo` on a bare clone is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SIZE   ?= commit
# A file of pinned packages and their digests (.ci/requirements.lock); empty: the newest that fit.
LOCK   ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-engines test-rdma test-pod-arm64 test-deploy test-deploy-arm64 test-container dist proof bench lint generate clean

help: ## Show the verbs
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml proto/build_kernel.py $(wildcard proto/entresol_proto/native/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Entresol needs Python 3.11 or newer; try: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing the distribution's python3-venv" >&2; \
	    apt-get update -qq >&2 && apt-get install -y -qq python3-venv >&2 && \
	    $(PYTHON) -m venv --clear $(VENV); \
	  else \
	    echo "python cannot make virtual environments here; as root: apt-get install python3-venv"; exit 1; \
	  fi
	@echo "installing Entresol and its tools into $(VENV) (about a minute)" >&2
	@if [ -n "$(LOCK)" ]; then \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes --no-deps -r $(LOCK) >&2 && \
	  $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . >&2; \
	else \
	  $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test,bench]' >&2; \
	fi
	@touch $@

venv: $(READY) ## Only the environment in .venv, which every other verb makes too

demo: $(READY) ## The whole story on real KV, in about a minute
	@$(BIN)/entresol demo $(ARGS)

test: $(READY) ## All tests at commit size; ends with what did not run here
	@$(BIN)/python -m pytest $(ARGS)

test-engines: $(READY) ## Real vLLM, KVBM, LMCache, SGLang, Dynamo's indexer, in environments built here
	@$(BIN)/python -m tests.engines run $(ARGS)

test-rdma: $(READY) ## RDMA suites on soft-RoCE, in an emulated machine built here from Debian packages
	@$(BIN)/python -m tests.rdma suites $(ARGS)

test-pod-arm64: $(READY) ## An emulated ARM64 DPU serves an emulated x86 host over RoCE
	@$(BIN)/python -m tests.rdma pod --dpu arm64 --host x86 $(ARGS) \
	  --dpu-command "python3 -m tests.rdma.podtier dpu" -- python3 -m tests.rdma.podtier host

test-deploy: $(READY) ## The package's whole life under a real systemd, in namespaces (root)
	@$(BIN)/python -m tests.deploy $(ARGS)

test-deploy-arm64: $(READY) ## The arm64 package by apt in an emulated Debian, without systemd (root)
	@$(BIN)/python -m tests.deploy.emulated $(ARGS)

test-container: $(READY) ## The container file, built by a real builder and run (root); ARGS="--arch arm64"
	@$(BIN)/python -m tests.deploy.containers $(ARGS)

dist: $(READY) ## Wheels and .deb for amd64 and arm64, in dist/
	@$(BIN)/python arm64/build.py --arch amd64 $(ARGS)
	@$(BIN)/python arm64/build.py --arch arm64 $(ARGS)

proof: $(READY) ## The scorecard of faults and attacks; SIZE=commit|nightly|release
	@$(BIN)/python -m tests.proof run --size $(SIZE) $(ARGS)

bench: $(READY) ## Budgets as ratios within one run, beside peers; SIZE=commit|full
	@$(BIN)/python -m bench --size $(SIZE) $(ARGS)

lint: $(READY) ## Style and types
	@$(BIN)/ruff format --check -q . && $(BIN)/ruff check -q . && $(BIN)/mypy

generate: $(READY) ## Rewrite generated files: protobuf code, CONFIG.md
	@test -x $(VENV)/generator/bin/python || { $(PYTHON) -m venv $(VENV)/generator && \
	  $(VENV)/generator/bin/python -m pip install -q grpcio-tools==1.62.3 "setuptools<80"; }
	@$(VENV)/generator/bin/python proto/generate.py
	@$(BIN)/python -m entresol_daemon.config_reference

clean: ## Remove what the verbs made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/results*.json tests/proof.json .proof
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
