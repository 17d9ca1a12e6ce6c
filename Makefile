# make demo    build a spec, import the operator, run it forward and backward, print errors and speed
# make test    lint, types, import order, generated code up to date, the tests
# make test-all  the same with the tests that are marked slow: every kind of CPU by every compiler
# make test-random  the tests of make test, with other numbers, masks and specs; SEED=... draws those of a run again
# make test-integrations  models of other libraries with flashgen's kernels, in an environment that has them
# make bench   the benchmarks that fill tools/benchmarks/README.md
# make gallery draws the pictures of the gallery and writes its page, docs/gallery.md
# make docs    the documentation's site, in build/docs; a warning or a dead link is an error
# make figures draws the paper's figures as measured here
# make clean   remove what these made
#
# A fresh machine needs Python 3.11 or newer, a C++ compiler and make. Everything else goes into .venv.

PYTHON ?= python3
JOBS   ?= 2
# Tests compile kernels for GPUs by NVRTC, which needs no GPU: 160 MB to load. cuda12 where a driver knows no CUDA 13.
CUDA   ?= cuda13

BIN  := .venv/bin
DEMO := specs/causal.attn

# A team of threads that waits asleep leaves the cores to the other test process.
export OMP_WAIT_POLICY := passive
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-all test-random test-integrations lint types imports generated units all-units bench gallery docs figures clean
.DEFAULT_GOAL := demo

demo: .venv/.installed
	$(BIN)/flashgen build $(DEMO)
	$(BIN)/python examples/demo.py

# What takes one core for a minute runs beside what takes all of them for ten.
test: lint imports generated
	$(MAKE) --jobs=2 types units

test-all: lint imports generated
	$(MAKE) --jobs=2 types all-units

units: .venv/.installed-dev
	$(BIN)/pytest -n $(JOBS) -m "not slow"

all-units: .venv/.installed-dev
	$(BIN)/pytest -n $(JOBS)

# What tests draw by chance is the same in every run of the others.
test-random: SEED := $(or $(SEED),$(shell date +%s))
test-random: .venv/.installed-dev
	FLASHGEN_TEST_SEED=$(SEED) $(BIN)/pytest -n $(JOBS) -m "not slow" --hypothesis-seed=$(SEED)

test-integrations: .venv-integrations/.installed
	HF_HUB_OFFLINE=1 .venv-integrations/bin/python -m pytest -n $(JOBS) -m "not slow" tests/integrations tests/peers/test_transformers.py

lint: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/.installed-dev
	$(BIN)/mypy

imports: .venv/.installed-dev
	$(BIN)/lint-imports

# The committed output is what the compiler writes today, but for headers, which stand in templates/include.
generated: .venv/.installed
	rm -rf build/generated
	$(BIN)/flashgen build generated/*/*.attn -o build/generated
	diff -r -x include -x __pycache__ build/generated generated

bench: .venv/.installed-dev
	$(BIN)/python -m tools.benchmarks.build_time
	$(BIN)/python -m tools.benchmarks.memory
	$(BIN)/python -m tools.benchmarks.speed
	$(BIN)/python -m tools.benchmarks.masks

gallery: .venv/.installed-dev
	$(BIN)/python examples/gallery.py
	$(BIN)/python examples/gallery_page.py

docs: .venv/.installed-docs
	$(BIN)/mkdocs build --strict

# The paper's figures, measured here in about 11 minutes, on a machine that does nothing else; docs/figures/README.md
# shows them. `$(BIN)/python -m tools.benchmarks.figures --draw` draws again what was measured elsewhere.
figures: .venv/.installed-dev
	$(BIN)/python -m tools.benchmarks.figures

clean:
	rm -rf .venv .venv-integrations build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
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
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev,$(CUDA)]'
	touch $@

.venv/.installed-docs: .venv/.installed
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[docs]'
	touch $@

# Other libraries on top of what .venv has, which stays as it is.
.venv-integrations/.installed: .venv/.installed-dev
	$(BIN)/python -m venv .venv-integrations
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
		"$$(.venv-integrations/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
	.venv-integrations/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[transformers]'
	touch $@
