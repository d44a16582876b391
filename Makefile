# `make help` lists what there is. Everything runs in .venv, which `setup` makes and keeps up to date.

PYTHON ?= python3
BIN := .venv/bin
SYSTEM := $(shell uname -s)
MACHINE := $(shell uname -m)

# On Linux MLX needs exactly one backend: `cpu` (the default) or, with DEVICE=cuda, `cuda`. macOS brings Metal.
ifeq ($(SYSTEM),Linux)
DEVICE ?= cpu
else
DEVICE ?= metal
endif
comma := ,
EXTRAS := $(if $(filter cpu cuda,$(DEVICE)),$(DEVICE)$(comma),)dev
STAMP := .venv/.setup-$(DEVICE)

# Names of the checks in bench/verify.py: `make verify-NAME` runs one, `make verify` all but VERIFY_LONG.
VERIFY := fresh-clone fresh-test paris stop-strings bad-stop lone-surrogate connections-256 stress-256-http \
  stress-256-zmq vanish-http vanish-zmq tokenize-itl kill-supervisor kill-engine stop-engine \
  kill-restore kill-tokenizers kill-streamer kill-http restart-engine poison kill-kinds \
  bad-machine malformed \
  vanish-1000 two-servers step-overhead joins mixed fairness behind-long same-tokens low-memory flood bare-256 \
  sampled-256 peers-256 peers-sampled-256 single-stream scaling lora prefix-ttft prefix-restore prefix-shared \
  prefix-hits prefix-chat prefix-cost prefix-itl prefix-same prefix-same-demo prefix-kill prefix-trouble \
  clients clients-at-once latency node fair-clients retries schemas mixed-options compiling texts fuzz fuzz-embed \
  fuzz-rerank check parity-256 engine-busy streams-512 harness compare rooms block-kills block-damage \
  block-disk dashboard dashboard-figures dashboard-cost metrics kv-events doctor models soak
VERIFY_LONG := soak compare

.PHONY: help setup blas serve chat test verify soak check format bench compare client-wheel clean FORCE
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

setup: $(STAMP) ## make .venv and install everything (DEVICE=cuda on Linux for NVIDIA)

# Two backends in one environment overwrite each other's library: another DEVICE starts a new one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Callboard needs Python 3.11 or newer: make PYTHON=python3.12 …"; exit 1; }
	@for other in .venv/.setup-*; do \
	  case "$$other" in $@|'.venv/.setup-*') ;; *) rm -rf .venv ;; esac; done
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'Installing into .venv …'
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$(EXTRAS)]'
	@$(MAKE) --no-print-directory blas
	@touch $@

# MLX's CPU backend multiplies with the system's BLAS; without OpenBLAS the reference one makes it 25 times slower.
blas:
ifeq ($(SYSTEM)-$(MACHINE)-$(DEVICE),Linux-x86_64-cpu)
	@for folder in /usr/lib/x86_64-linux-gnu /usr/lib64 /usr/lib /usr/local/lib; do \
	  set -- "$$folder"/libopenblas*.so*; if [ -e "$$1" ]; then exit 0; fi; done; \
	if ldconfig -p 2>/dev/null | grep -q libopenblas; then exit 0; fi; \
	sudo=none; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif sudo -n true 2>/dev/null; then sudo='sudo -n'; fi; \
	if [ "$$sudo" != none ] && command -v apt-get >/dev/null; then \
	  echo 'Installing OpenBLAS …'; \
	  install="$$sudo apt-get install -y libopenblas0-pthread"; \
	  { $$install || { $$sudo apt-get update && $$install; }; } </dev/null >/dev/null 2>&1 && exit 0; \
	fi; \
	echo 'No OpenBLAS here: the CPU backend will be slow. Debian has it as libopenblas0-pthread.'
endif

serve: setup ## serve the demo model (ARGS="…" goes to `callboard serve demo`)
	@$(BIN)/callboard serve demo $(ARGS)

chat: setup ## chat in the terminal (ARGS="…" goes to `callboard chat`)
	@$(BIN)/callboard chat $(ARGS)

test: setup ## the tests, at most 12 minutes (ARGS="…" goes to pytest)
	@$(BIN)/pytest -n 2 --dist loadfile --session-timeout=720 $(ARGS)

verify: setup ## every measurement and failure check but the long ones; see VERIFY
	@failed=; for name in $(filter-out $(VERIFY_LONG),$(VERIFY)); do \
	  echo "== verify-$$name"; $(BIN)/python bench/verify.py $$name || failed="$$failed $$name"; done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

soak: verify-soak ## 20 minutes of 128 streams with a fault every 10 s (SOAK_SECONDS=…)

verify-%: setup FORCE
	@$(BIN)/python bench/verify.py $*

check: setup ## format, lint and strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: setup ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

compare: setup ## other MLX servers beside ours, in 40 minutes: bench/results/compare/report.md (ARGS="…")
	@$(BIN)/python bench/compare.py $(ARGS)

bench: setup ## the stress harness against a running server (ARGS="…")
	@$(BIN)/python bench/stress.py $(ARGS)

client-wheel: setup ## build the distribution callboard-client into dist/
	@$(BIN)/python bench/client_wheel.py dist

clean: ## remove .venv, build outputs and tool caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
