# Every target makes .venv with what it needs, and does nothing twice.
#
# What isobit runs with is installed from requirements.lock, with hashes; only PyTorch, Triton and NVIDIA's libraries are
# not in it, because each machine needs its own build. TORCH is the default release, which the tests run on, and
# `make TORCH=torch ...` takes the newest. Without NVIDIA's driver the build for the CPU is preferred, 0.2 GB in the place
# of 3 GB, from TORCH_INDEX, if that answers within seconds; `make TORCH_INDEX= ...` leaves the choice to pip.
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH_OPTIONS = $$($(BIN)/python .ci/torch_index.py "$(TORCH_INDEX)" $(if $(filter file,$(origin TORCH_INDEX)),,given))
# The kernels' tests compile with this Triton where PyTorch's build brings none of its own.
TRITON ?= $(if $(filter torch==2.13.0,$(TORCH)),triton==3.6.0,triton)
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# After the lock, nothing may move what it pinned: pip stops and names the conflict.
LOCKED = $(PIP) --constraint $(VENV)/.locked
# The last line of `make install` and `make quickstart`: what to type next.
NEXT = @echo "source $(BIN)/activate    \# so that this shell finds isobit"

# What is compiled of tests and sources is kept, whatever the shell says: a second start has ten seconds less to do.
test test-full test-rest: export PYTHONDONTWRITEBYTECODE =

.PHONY: help install resolve quickstart test test-full test-rest sanitize lint docs pictures bench gpu kernels wheel relock floor ceiling clean

help:
	@echo "make quickstart   a small model learns to add, by GRPO under FP8, on the CPU; ends with a report"
	@echo "make test         the test suite, in ten minutes; make test-full: all of it; make test-rest: what test leaves out"
	@echo "make sanitize     the C++ operators under sanitizers: address, undefined behaviour, races"
	@echo "make lint         ruff and mypy"
	@echo "make docs         the documentation site, in build/site; open build/site/index.html"
	@echo "make pictures     the quickstart anew, and the pictures of README and docs from it (needs Chromium)"
	@echo "make bench        the benchmarks; results under benchmarks/results"
	@echo "make gpu          on a GPU (with TORCH=torch): the tests that need one, then its benchmarks"
	@echo "make kernels      the Triton kernels compiled for sm_90, without a GPU; the tables of docs/gpu.md"
	@echo "make wheel        a source distribution, and a wheel with the compiled operators, in dist"
	@echo "make install      only the environment, in $(VENV)"
	@echo "make relock       requirements.lock anew, with the newest versions before LOCKED_AS_OF"
	@echo "make floor        tests with the oldest versions that pyproject.toml allows; make ceiling: with the newest"
	@echo "make resolve      whether every extra has a solution, for each Python, by uv and by pip"
	@echo "make clean        remove $(VENV), runs and caches"
	@echo "with TORCH=torch (its newest release; $(TORCH)), TORCH_INDEX=URL (of its builds for this machine; empty: pip's"
	@echo "own choice; without NVIDIA's driver $(TORCH_INDEX)), PYTHON=python3.12, VENV=.venv"

install: $(VENV)/.installed
	$(NEXT)

# Wheels only: a source would be built with tools that nothing pins. The marker is the lock without its hashes, which pip
# does not take in constraints.
$(VENV)/.locked: requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP) --only-binary :all: --require-hashes --requirement $<
	sed -e '/^ *--hash/d' -e 's/ \\$$//' $< > $@

$(VENV)/.torch: $(VENV)/.locked
	$(LOCKED) $(TORCH_OPTIONS) "$(TORCH)"
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -c "import triton" 2> /dev/null || $(LOCKED) "$(TRITON)"
	$(LOCKED) --no-build-isolation --editable ".[dev]"
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/isobit quickstart
	$(NEXT)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

test-full: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal --full

# All of it, or what the changes since a revision concern (tests/rooms.py): make test-rest SINCE=origin/main
test-rest: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal --rest $(if $(SINCE),--since $(SINCE))

sanitize: $(VENV)/.dev
	$(BIN)/python -m tests.kernels.sanitizers

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

pictures: $(VENV)/.dev
	$(BIN)/python -m benchmarks.pictures

$(VENV)/.bench: $(VENV)/.dev
	$(LOCKED) --no-build-isolation --editable ".[bench]"
	@touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --out benchmarks/results

$(VENV)/.gpu: $(VENV)/.installed
	$(LOCKED) "pytest>=8" "pytest-xdist>=3.6"
	@touch $@

# The exit status is 1 where anything failed; the page says what was measured all the same.
gpu: $(VENV)/.gpu
	$(BIN)/python -m benchmarks.gpu first --out benchmarks/results/gpu; status=$$?; \
		$(BIN)/python -m benchmarks.gpu.page && exit $$status

kernels: $(VENV)/.dev
	$(BIN)/python -m benchmarks.kernel_table --out benchmarks/results/gpu
	$(BIN)/python -m benchmarks.orientation --out benchmarks/results/gpu
	$(BIN)/python -m benchmarks.attention_loop --out benchmarks/results/gpu
	$(BIN)/python -m benchmarks.layer_bytes --out benchmarks/results/gpu
	$(BIN)/python -m benchmarks.gpu.page

wheel: $(VENV)/.dev
	ISOBIT_PREBUILT=1 $(BIN)/python -m build --no-isolation

# For every Python and platform at once, of what was published before a moment some weeks ago: a bad release has had time
# to be found, and the same moment gives the same lock. What is PyTorch's binaries is left out again.
LOCKED_AS_OF ?= 2026-10-01T12:00:00Z
relock floor ceiling: BIN = build/$@/bin
relock:
	$(PYTHON) -m venv build/$@
	$(PIP) --upgrade uv
	printf '%s\n' setuptools "$(TORCH)" | $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
		--exclude-newer $(LOCKED_AS_OF) \
		--generate-hashes --custom-compile-command "make relock" --output-file build/$@/all.lock pyproject.toml -
	awk '/^[a-z]/ { out = /^(torch|triton)==|^(nvidia|cuda)-/ } !out' build/$@/all.lock > requirements.lock

# Whether every extra has a solution: for all Pythons and all extras at once, as `uv sync` asks; for each Python in wheels
# alone; and by pip, for the Python that is here, with what is installed. Only metadata is read.
PYTHONS = 3.11 3.12 3.13 3.14
resolve: $(VENV)/.dev
	test -x build/resolve/bin/uv || { $(PYTHON) -m venv build/resolve && build/resolve/bin/python -m pip install \
		--quiet --disable-pip-version-check uv; }
	build/resolve/bin/uv lock --quiet --dry-run
	for version in $(PYTHONS); do build/resolve/bin/uv pip compile --quiet --python-version $$version --all-extras \
		--only-binary :all: --output-file build/resolve/$$version.txt pyproject.toml || exit 1; done
	$(LOCKED) --dry-run --no-build-isolation --editable ".[dev,bench]"
	$(BIN)/python -m pip check

# Tests that need nothing but isobit's own dependencies, and those of the extras that users install.
RUNTIME_TESTS = tests/test_config.py tests/test_cli_bad_input.py tests/test_completion.py tests/test_resume.py \
	tests/test_stories.py tests/commands tests/data tests/evaluation tests/precision tests/rewards tests/run tests/serve \
	tests/tasks tests/trackers tests/training tests/view

# The oldest and the newest versions that pyproject.toml allows. The oldest numpy has wheels up to Python 3.12.
floor: TAKE = ==
ceiling: TAKE = >=
floor ceiling:
	rm -rf build/$@
	$(PYTHON) -m venv build/$@
	sed -n -e '/^requires = /p' -e '/^dependencies = /,/^]/p' -e '/^track = /,/^]/p' -e '/^tinker = /,/^]/p' \
		-e '/^\(data\|images\|math\|text\|trackio\|serve\) = /p' pyproject.toml \
		| grep -o '[A-Za-z0-9_-]*>=[0-9.]*' | sed 's/>=/$(TAKE)/' > build/$@/requirements.txt
	$(PIP) $(TORCH_OPTIONS) --requirement build/$@/requirements.txt pytest pytest-xdist hypothesis httpx "openai>=2"
	$(PIP) --no-build-isolation --editable .
	$(BIN)/python -m pytest -n 2 -m "not slow" $(RUNTIME_TESTS)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
