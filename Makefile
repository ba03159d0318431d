# Every target makes .venv with what it needs, and does nothing twice.
#
# TORCH is what pip installs before everything else. The default is the release that the tests run on; on a machine with
# an NVIDIA GPU, `make TORCH=torch ...` takes the newest build with CUDA.
TORCH ?= torch==2.13.0
# The kernels' tests compile with this Triton where PyTorch's build brings none of its own.
TRITON ?= $(if $(filter torch==2.13.0,$(TORCH)),triton==3.6.0,triton)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The last line of `make install` and `make quickstart`: what to type next.
NEXT = @echo "source $(BIN)/activate    \# so that this shell finds isobit"

.PHONY: help install quickstart test lint docs bench gpu kernels clean

help:
	@echo "make quickstart   a small model learns to add, by GRPO under FP8, on the CPU; ends with a report"
	@echo "make test         the whole test suite"
	@echo "make lint         ruff and mypy"
	@echo "make docs         the documentation site, in build/site; open build/site/index.html"
	@echo "make bench        the benchmarks; results under benchmarks/results"
	@echo "make gpu          on a GPU (with TORCH=torch): the tests that need one, then its benchmarks"
	@echo "make kernels      the Triton kernels compiled for sm_90, without a GPU; the tables of docs/gpu.md"
	@echo "make install      only the environment, in $(VENV)"
	@echo "make clean        remove $(VENV), runs and caches"

install: $(VENV)/.installed
	$(NEXT)

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TRITON)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/isobit train configs/quickstart.yaml --redo
	$(NEXT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[bench]"
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --out benchmarks/results

$(VENV)/.gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pytest>=8" "pytest-xdist>=3.6"
	@touch $@

gpu: $(VENV)/.gpu
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu
	$(BIN)/python -m benchmarks.gpu.page

kernels: $(VENV)/.dev
	$(BIN)/python -m benchmarks.kernel_table --out benchmarks/results/gpu
	$(BIN)/python -m benchmarks.gpu.page

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
