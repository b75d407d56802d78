# `make demo` and `make test` work as the first command in a fresh clone: they need Python 3.11 or newer and make.
PYTHON ?= python3.11
BACKEND ?= xla
DEMO := .venv-demo
TEST := .venv-test
PIP := -m pip --disable-pip-version-check install -qq -c constraints.txt
# What an installed environment depends on: `benchmarks` becomes a package once it exists.
INPUTS := setup.py constraints.txt $(wildcard benchmarks/__init__.py)
SOURCES := $(wildcard portable benchmarks examples tests setup.py)
TYPED := $(wildcard portable benchmarks examples)

export HF_HUB_OFFLINE := 1

.PHONY: help demo test lint clean

help:
	@echo "make demo   three examples on the '$(BACKEND)' backend, checked against eager, and the quick benchmarks with"
	@echo "            their report (BACKEND=… for another)"
	@echo "make test   ruff, mypy and the tests that are not marked slow"
	@echo "make clean  remove both environments and every cache"

demo: $(DEMO)/.installed
	PORTABLE_BACKEND=$(BACKEND) $(DEMO)/bin/python examples/sentence_search.py --check
	PORTABLE_BACKEND=$(BACKEND) $(DEMO)/bin/python examples/train_digits.py --check
	PORTABLE_BACKEND=$(BACKEND) $(DEMO)/bin/python examples/generate.py --check
	$(DEMO)/bin/portable bench --backend $(BACKEND) --suite quick || [ $$? -eq 1 ]  # 1: an SLO is missed

# One OpenMP thread a worker: two pools on the same cores stall each other.
test: lint
	OMP_NUM_THREADS=1 $(TEST)/bin/python -m pytest -q -n 2 --portable-tier 1

lint: $(TEST)/.installed
	$(TEST)/bin/python -m ruff check $(SOURCES)
	$(TEST)/bin/python -m mypy $(TYPED)

$(DEMO)/.installed: $(INPUTS)
	@echo "installing portable[demo] into $(DEMO); the first time takes a few minutes"
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python $(PIP) -e '.[demo]'
	@touch $@

$(TEST)/.installed: $(INPUTS)
	@echo "installing portable[test] into $(TEST); the first time takes a few minutes"
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python $(PIP) -e '.[test]'
	@touch $@

clean:
	rm -rf $(DEMO) $(TEST) .mypy_cache .ruff_cache .pytest_cache portable.egg-info
