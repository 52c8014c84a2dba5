# Every recipe makes what it needs in .venv; a second run finds it there at once.
# EKIDEN_TORCH chooses the torch build: see scripts/install.py.

PYTHON ?= python3
BIN := .venv/bin
PATHS := ekiden kv_transfer prefill_svc decode_svc gateway tests examples scripts compose

.PHONY: help demo up test test-full check proto compose-test install install-dev clean
.PHONY: chaos soak
.PHONY: quality bench bench-engine bench-streams bench-tp bench-interference bench-overhead bench-pipeline
.PHONY: bench-transfer bench-sim

help:
	@echo "make demo          install, fetch the model, one question answered across two pools"
	@echo "make up            a deployment on this machine, until Ctrl-C (ARGS=... for ekiden up)"
	@echo "make test          the quick test suite"
	@echo "make test-full     all of it, the slow tests too"
	@echo "make check         lint, format, types, import rules, stubs, CUDA kernels compiled, command line"
	@echo "make proto         generate the gRPC stubs"
	@echo "make bench         times of the whole stack on this machine (ARGS=... for ekiden up)"
	@echo "make quality       what quantised weights and KV cost in accuracy (docs/quantisation.md)"
	@echo "make bench-NAME    other benches (ARGS=--help tells more):"
	@echo "     engine        our engine beside its peers, with floors"
	@echo "     streams       tokens/s at 1 to 32 streams, a chart"
	@echo "     tp            two ranks of one thread against one rank of two"
	@echo "     interference  running streams while long prompts arrive, a chart"
	@echo "     overhead      the whole stack against the bare engine"
	@echo "     pipeline      how busy the stages of a pipeline are"
	@echo "     transfer      KV between two processes, beside memcpy, TCP sockets and NIXL, a chart"
	@echo "     sim           simulated seconds a second at 1,000 replicas (ARGS=\"--trace FILE\")"
	@echo "make chaos         kill, stop and cut a deployment in every state of a hand-off, then audit it"
	@echo "make soak          5,000 requests through one hand-off pair: same answers, flat memory"
	@echo "make compose-test  build and run compose/ on a Docker engine"
	@echo "make clean         remove .venv and caches"

install:
	@$(PYTHON) scripts/install.py --extra local

install-dev:
	@$(PYTHON) scripts/install.py --extra dev

demo:
	@$(PYTHON) scripts/demo.py

up: install
	@$(BIN)/ekiden up $(ARGS)

test: install-dev
	@$(BIN)/pytest -q -m "not slow and not gpu" $(ARGS)

test-full: install-dev
	@$(BIN)/pytest -q -m "not gpu" $(ARGS)

check: install-dev
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/proto.py --check
	$(BIN)/python scripts/aot_triton.py
	$(BIN)/pytest -q tests/unit/cli/test_frozen.py

proto: install-dev
	$(BIN)/python scripts/proto.py

bench: install
	@$(BIN)/python scripts/bench.py $(ARGS)

quality: install
	@$(BIN)/python scripts/quality.py $(ARGS)

bench-engine bench-streams bench-tp bench-interference bench-overhead bench-pipeline bench-transfer bench-sim: bench-%: install-dev
	@$(BIN)/python scripts/bench_$*.py $(ARGS)

chaos soak: install-dev
	@$(BIN)/python scripts/$@.py $(ARGS)

compose-test:
	@compose/test.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
