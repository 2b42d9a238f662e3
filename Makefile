# Every target makes the virtual environment it needs; all of them may be run again at any time.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.ready
PEERS := .venv-conformance
PEERS_STAMP := $(PEERS)/.ready
# Every file that is installed must have its hash in requirements*.lock; torch is the CPU build where pip finds one.
# `make LOCKED=no` goes by the versions of constraints.txt alone: for another build of torch, or a registry that packs
# files anew.
LOCKED ?= yes
LOCKED_INSTALL := $(BIN)/python -m pip install --quiet --no-deps --require-hashes

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test quick lint fuzz bench soak docs lock conformance coverage clean help
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt $(wildcard requirements*.lock)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "epimer needs Python 3.11 or newer; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv .venv
ifeq ($(LOCKED),yes)
	$(LOCKED_INSTALL) -r requirements.lock
	$(LOCKED_INSTALL) -r requirements-torch-cpu.lock 2>/dev/null || $(LOCKED_INSTALL) -r requirements-torch.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
else
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
endif
	@touch $@

demo: $(STAMP)  ## eight small models, made here, become one: every method compared, a report to open
	$(BIN)/epimer demo

test quick: AUDIT = --tell
test: $(STAMP) lint  ## lint, type-check and run all tests, on every core
	$(BIN)/python -m pytest -n auto --dist worksteal

quick: $(STAMP) lint  ## lint, type-check and run the fast tests: two minutes on two cores
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m "not slow"

lint: $(STAMP)  ## ruff, mypy, the import contracts, known vulnerabilities of what is installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/audit.py $(AUDIT)

coverage: $(STAMP)  ## run the tests and show which lines they miss
	$(BIN)/python -m pytest --cov --cov-report=term-missing

fuzz: $(STAMP)  ## 100,000 damaged files and mappings: refused in one line, or read well: a quarter of an hour
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases 100000

bench: $(STAMP) $(PEERS_STAMP)  ## speed on one page, beside FusionBench, mergekit and a plain copy: a quarter of an hour
	$(PEERS)/bin/python benchmarks/faster_than_fusionbench.py --no-difference
	$(BIN)/python benchmarks/faster_than_mergekit.py --mergekit $(PEERS)/bin/mergekit-yaml --repeats 1
	$(BIN)/python benchmarks/seven_billion.py --layers 1 --methods average ties
	$(BIN)/python benchmarks/growth.py --methods tsv epimer_free epimer_kron --project
	$(BIN)/python benchmarks/ray_overhead.py

soak: $(STAMP)  ## every writing command under random kills and faults, and a failing disk at every call: over an hour
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py

docs: $(STAMP)  ## rewrite the pages that are generated from the code
	$(BIN)/python docs/generate.py

lock:  ## write the lock files anew, after a change of pyproject.toml or constraints.txt (own environment)
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet -c constraints.txt uv
	.venv-lock/bin/python .ci/lock.py

$(PEERS_STAMP): tests/conformance/requirements.txt tests/conformance/requirements-no-deps.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -r tests/conformance/requirements.txt -e .
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r tests/conformance/requirements-no-deps.txt
	@touch $@

# The last two skip in `make test`: lm-eval is not in its environment, and llama.cpp is found by LLAMA_CPP=/path/to/it.
conformance: $(PEERS_STAMP)  ## compare with implementations that nobody here wrote, lm-eval and llama.cpp too (own environment)
	$(PEERS)/bin/python -m pytest tests/conformance tests/integration/test_eval_cli.py::test_lm_eval_scores_a_tiny_llama tests/integration/test_loads_elsewhere.py::test_llama_cpp_converts_it_to_gguf -o filterwarnings=default::epimer.errors.EpimerWarning

clean:  ## remove environments and caches
	rm -rf .venv .venv-lock $(PEERS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
