# Everything runs in ./.venv, made on first use. `make sweep` and `make test` need nothing but Python 3.11 or newer.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BIN := .venv/bin
# One intra-op thread per device: results must not depend on the number of cores.
export OMP_NUM_THREADS := 1
# Tests start many processes; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: sweep test check lint types imports parity slow faults ray models-table bench clean

.venv/.user: pyproject.toml
	@test -n "$(PYTHON)" || { echo "hydra-tune needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all]'
	@touch $@

.venv/.dev: .venv/.user
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[all,dev]'
	@touch $@

sweep: .venv/.user          ## a real sweep: a ViT on handwritten digits, too large for the devices it runs on
	$(BIN)/hydra-tune sweep examples/digits/space.yaml

# Files in their order: ordered by their number of tests, the long ones with few tests would come last, on one core.
test: .venv/.dev            ## the whole test suite
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/ray
	$(BIN)/python -m pytest -q -m "not slow" tests/ray  # by themselves: Ray takes a process's signals and loggers for its own

parity: .venv/.dev          ## the full product of models, cuts and devices
	$(BIN)/python -m pytest -q -m slow tests/parity -n 2 --dist loadgroup

slow: .venv/.dev            ## what else takes too long for every run of the tests
	$(BIN)/python -m pytest -q -m slow tests --ignore tests/parity --ignore tests/faults --ignore tests/ray -n 2 --dist load

faults: .venv/.dev          ## kills, damaged files, locked databases, a clock that is set, a thousand trials: nothing is lost
	$(BIN)/python -m pytest -q -m slow tests/faults -n 2 --dist load

ray: .venv/.dev             ## searches by Ray Tune on one node and on several, with processes and nodes that die
	$(BIN)/python -m pytest -q -m slow tests/ray

models-table: .venv/.dev    ## trains the whole registry and writes what was seen into docs/models.md
	$(BIN)/python -m tests.parity.table

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

imports: .venv/.dev
	$(BIN)/lint-imports --cache-dir .import_linter_cache

check: lint types imports test   ## what every commit passes

bench: .venv/.dev           ## ratios within one run; see docs/benchmarks.md
	$(BIN)/python benchmarks/pool.py

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
