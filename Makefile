# `make demo` and `make test` do all the set-up themselves. `make help` lists everything.
SHELL := /bin/bash
PYTHON_IN_ENV := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help env demo demo-stack test test-fast test-matrix bench soak fuzz lint binaries collector-sources clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

env: ## the tested environment in .venv
	@tests/testbed/setup.sh .venv

demo: env ## a real verl run, recorded; prints where its page is
	@$(PYTHON_IN_ENV) tests/testbed/demo.py $(DEMO)

demo-stack: env ## the same run through a Collector to Jaeger, Prometheus and MLflow on this machine
	@$(PYTHON_IN_ENV) tests/testbed/demo.py --stack $(DEMO)

test: env ## every test; the cheap ones first
	@$(PYTHON_IN_ENV) -m pytest tests/unit tests/contract -m "not matrix"
	@$(PYTHON_IN_ENV) -m verl_otel.stack.binaries
	@$(PYTHON_IN_ENV) -m pytest tests/integration tests/e2e -m "not matrix"
	@$(PYTHON_IN_ENV) -m pytest tests/matrix -m "not matrix"

test-fast: env ## only the tests that need neither a run nor the stack
	@$(PYTHON_IN_ENV) -m pytest tests/unit tests/contract -m "not matrix"

test-matrix: env ## every version of verl, Python, Ray and OpenTelemetry, for the tables of docs/support.md and the README; then two nodes, and the wheels of vLLM and SGLang
	@$(PYTHON_IN_ENV) tests/matrix/support.py
	@$(PYTHON_IN_ENV) -m pytest tests/contract -m matrix
	@$(PYTHON_IN_ENV) -m pytest tests/e2e -m matrix

bench: env ## what telemetry costs a training thread, also with bad endpoints; how long a value takes to Prometheus
	@$(PYTHON_IN_ENV) tests/bench/hooks.py
	@$(PYTHON_IN_ENV) tests/bench/latency.py
	@$(PYTHON_IN_ENV) tests/bench/faults.py

soak: env ## half an hour of steps with a Collector that comes and goes: memory, threads, files
	@$(PYTHON_IN_ENV) tests/bench/soak.py

fuzz: env ## a minute of coverage-guided fuzzing of each thing that reads what others have written
	@.venv/bin/uv pip install -q --python $(PYTHON_IN_ENV) 'atheris>=3,<4'
	@$(PYTHON_IN_ENV) tests/bench/fuzz.py

lint: env ## ruff and pyright
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/pyright

binaries: env ## build the Collector, Jaeger, Prometheus and Alertmanager (once)
	@$(PYTHON_IN_ENV) -m verl_otel.stack.binaries

collector-sources: ## generate collector/distribution from collector/builder.yaml
	GOFLAGS=-buildvcs=false go run go.opentelemetry.io/collector/cmd/builder@v0.155.0 --config collector/builder.yaml --skip-compilation || true
	cd collector/distribution && go mod tidy -e

clean: ## remove the environment and what runs left
	rm -rf .venv .venv-* demo-output verl-otel
