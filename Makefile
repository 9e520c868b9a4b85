# Everything runs in ./.venv, made on first use. `make sweep` and `make test` need nothing but Python 3.11 to 3.13.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# One intra-op thread per device: results must not depend on the number of cores.
export OMP_NUM_THREADS := 1
# Tests start many processes; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: sweep test compat compat-integrations check lint types imports parity slow faults ray part all-tests models-table bench gpu gpu-tables docs links clean

.venv/.user: pyproject.toml
	@test -n "$(PYTHON)" || { echo "hydra-tune needs Python 3.11 to 3.13; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[optuna,examples]'
	@touch $@

.venv/.dev: .venv/.user
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]'
	@touch $@

sweep: .venv/.user          ## a real sweep: a ViT on handwritten digits, too large for the devices it runs on
	$(BIN)/hydra-tune sweep examples/digits/space.yaml

# xdist waits for ever where the process of the last tests has died; interrupted, it still prints what failed.
ENDS := timeout --signal=INT --kill-after=60 35m

# Files in their order: ordered by their number of tests, the long ones with few tests would come last, on one core.
test: .venv/.dev            ## the whole test suite
	$(ENDS) $(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/ray --ignore tests/docs
	$(ENDS) $(BIN)/python -m pytest -q -m "not slow" tests/ray  # by themselves: Ray takes a process's signals and loggers for its own

# The oldest supported torch; of another one, and another Python: make compat TORCH=2.12.1 PYTHON=python3.13
TORCH ?= 2.11.*
COMPAT ?= build/compat/torch-$(subst *,x,$(TORCH))-$(notdir $(PYTHON))
# In a process of its own: a CUDA build cannot train in a copy of a process that has trained.
FORKS := tests/integration/test_isolated.py
compat:                     ## the test suite in an environment of its own, with the oldest torch
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]' 'torch==$(TORCH)'
	$(COMPAT)/bin/python -m pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/ray --ignore $(FORKS)
	$(COMPAT)/bin/python -m pytest -q -m "not slow" $(FORKS)

# Others, each in quotes: make compat-integrations VERSIONS="'transformers==4.57.*' 'trl==1.16.* transformers==5.24.*'"
compat-integrations: .venv/.dev  ## the integrations' tests with the oldest and newest transformers and lightning; prints a table
	$(BIN)/python -m tests.support.library_versions $(VERSIONS)

parity: .venv/.dev          ## every model with all features, cuts and devices in pairs
	$(BIN)/python -m pytest -q -m slow tests/parity -n 2 --dist loadgroup

slow: .venv/.dev            ## what else takes too long for every run of the tests
	$(BIN)/python -m pytest -q -m slow tests --ignore tests/parity --ignore tests/faults --ignore tests/ray -n 2 --dist load

faults: .venv/.dev          ## kills, damaged files, locked databases, a clock that is set, a thousand trials: nothing is lost
	$(BIN)/python -m pytest -q -m slow tests/faults -n 2 --dist load

ray: .venv/.dev             ## searches by Ray Tune on one node and on several, with processes and nodes that die
	$(BIN)/python -m pytest -q -m slow tests/ray

# Of all slow tests another part at each turn, that of tests/turn or make part TURN=7; see tests/support/slow_part.py.
PART := $(BIN)/python -m pytest -q -p tests.support.slow_part $(if $(TURN),--turn $(TURN)) $(if $(MINUTES),--minutes $(MINUTES)) --durations 10

part: .venv/.dev            ## a part of all slow tests, with one of each kind
	$(ENDS) $(PART) -n 2 --dist loadgroup --ignore tests/ray --ignore tests/docs
	$(ENDS) $(PART) tests/ray

all-tests: .venv/.dev       ## every suite whole, hours of it; goes on where it was stopped, and prints when each last passed
	$(BIN)/python -m tests.support.every_suite

models-table: .venv/.dev    ## trains the whole registry and writes what was seen into docs/results/models.md
	$(BIN)/python -m tests.parity.table

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev           ## and names that tests for GPUs use of the package, as no machine of CI runs these tests
	$(BIN)/mypy
	$(BIN)/mypy -p tests.gpu --check-untyped-defs --allow-untyped-defs --allow-untyped-calls \
	  --disable-error-code arg-type --disable-error-code union-attr --disable-error-code var-annotated --disable-error-code has-type

imports: .venv/.dev
	$(BIN)/lint-imports --cache-dir .import_linter_cache

check: lint types imports test   ## what a commit has to pass; .ci/run is this on a clean clone, and `make part`

docs: .venv/.dev            ## the site in build/site, with warnings as errors; runs every block of code of the guides
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/site
	$(BIN)/python -m pytest -q tests/docs -n 2 --dist worksteal

links: .venv/.dev           ## follows the site's links to other sites
	$(BIN)/python -m sphinx -q -b linkcheck docs build/links

bench: .venv/.dev           ## the pool beside plain loops, in ratios within one run; docs/results/ has the others
	$(BIN)/python benchmarks/pool.py

# By whatever Python has torch: nothing is installed there.
GPU_PYTHON ?= python3
OUT ?= runs/gpu
gpu:                        ## all that needs a GPU; a call ends after 9 minutes, and the next one goes on; see docs/results/gpu.md
	$(GPU_PYTHON) benchmarks/gpu.py --out $(OUT) $(ARGS)

gpu-tables:                 ## the docs' tables of a GPU, from what `make gpu` has found
	$(GPU_PYTHON) benchmarks/gpu_tables.py $(OUT)/gpu.json

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
