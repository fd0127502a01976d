# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make .venv first, once; it is made again when the build inputs change.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINT := $(VENV)/torch.txt
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard src/octavo/csrc/*)
PYTEST_ARGS ?= -m "not slow"
DEMO_ARGS ?=
# Waiting threads sleep instead of spinning: slower by a sixth alone, many times faster beside other work.
CALM := OMP_WAIT_POLICY=PASSIVE
BENCH_TEXT := benchmarks/data/moby-dick-300k.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench clean

help:
	@echo "make demo    serve 16 chats with one shared system prompt and print what it took"
	@echo "make test    run the tests"
	@echo "make check   lint, format, types, import contracts"
	@echo "make bench   measure attention, linear layers and throughput into benchmarks/results/"
	@echo "make clean   remove .venv, builds and caches (not the pulled models)"
	@echo "Every target makes .venv first. TORCH='torch==X' chooses another torch."

demo: $(READY)
	$(CALM) $(BIN)/python examples/shared_prompt.py $(DEMO_ARGS)

test: $(READY)
	$(CALM) $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/octavo bench attention
	$(BIN)/octavo bench linear
	$(BIN)/octavo bench throughput --text $(BENCH_TEXT)

# torch comes first and alone, so that its build is the one asked for; the constraint keeps the rest
# of the installation from replacing it.
$(READY): $(BUILD_INPUTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(CONSTRAINT)
	$(BIN)/python -m pip install --constraint $(CONSTRAINT) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
