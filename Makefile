# make demo    build a spec, import the operator, run it forward and backward, print errors and speed
# make test    lint, types, import order, generated code up to date, all tests
# make bench   the benchmarks that fill benchmarks/README.md
# make gallery draws the pictures of the README's gallery
# make figures draws the paper's figures as measured here
# make clean   remove what these made
#
# A fresh machine needs Python 3.11 or newer, a C++ compiler and make. Everything else goes into .venv.

PYTHON ?= python3
JOBS   ?= 2

BIN  := .venv/bin
DEMO := specs/causal.attn

# A team of threads that waits asleep leaves the cores to the other test process.
export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint types imports generated units bench gallery figures clean
.DEFAULT_GOAL := demo

demo: .venv/.installed
	$(BIN)/flashgen build $(DEMO)
	$(BIN)/python examples/demo.py

# What takes one core for a minute runs beside what takes all of them for ten.
test: lint imports generated
	$(MAKE) --jobs=2 types units

units: .venv/.installed-dev
	$(BIN)/pytest -n $(JOBS)

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/.installed-dev
	$(BIN)/mypy

imports: .venv/.installed-dev
	$(BIN)/lint-imports

# The committed output is what the compiler writes today.
PACKAGES := $(patsubst generated/%/manifest.json,%,$(wildcard generated/*/manifest.json))
generated: .venv/.installed
	$(if $(PACKAGES),$(BIN)/flashgen build --check $(PACKAGES:%=specs/%.attn))

bench: .venv/.installed-dev
	$(BIN)/python -m benchmarks.build_time
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.speed
	$(BIN)/python -m benchmarks.masks

gallery: .venv/.installed-dev
	$(BIN)/python examples/gallery.py

# The paper's figures, measured here in about 11 minutes, on a machine that does nothing else; docs/figures/README.md
# shows them. `$(BIN)/python -m benchmarks.figures --draw` draws again what was measured elsewhere.
figures: .venv/.installed-dev
	$(BIN)/python -m benchmarks.figures

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment, made once and again when its versions change -----------------------------------------------------

.venv/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "flashgen needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: pyproject.toml constraints.txt .venv/.created
	$(BIN)/pip install --quiet -c constraints.txt hatchling
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@
