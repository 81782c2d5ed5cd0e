# Everything a fresh machine needs: Python 3.11 or newer, make, and a package index.
#   make quickstart   text -> shards -> a small MPT on 1 rank, then on 2 -> proof of equal bits, tables, texts, a plot (4 minutes, no GPU)
#   make test         the tests (8 minutes on 2 cores)
#   make test-core    those of the core, without companions (6 minutes)

SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# uv of this machine if there is one, else our own, installed by pip into .tools
UV := $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
SOURCES := llmfoundry_lite companions benchmarks scripts tests

export PATH := $(CURDIR)/$(BIN):$(PATH)
export TOKENIZERS_PARALLELISM ?= false
# What is imported is compiled once, and not by every process that a test starts: that takes 8 s of each.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test test-core test-slow test-long docs lint format requirements gpu-check clean
.PHONY: gpu-check-device gpu-check-runs

install: $(READY)

.tools/bin/uv:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check "uv>=0.9"

$(READY): pyproject.toml | $(UV)
	$(UV) sync --quiet
	@touch $@
	@echo "installed into $(VENV); activate it with: source $(BIN)/activate"

# Interrupted and repeated, it carries on: `stop_at` ends the first half at batch 210, whatever is there already.
# A rank's last digits on a CPU depend on its threads, and the second launch has two ranks on the same cores.
ONE_THREAD := OMP_NUM_THREADS=1

quickstart: install
	llmfoundry-lite data prepare --source python-stdlib --out data/python-stdlib --tokenizer train:1024 --max-seq-len 256
	$(ONE_THREAD) llmfoundry-lite train mpt-quickstart stop_at=210ba fsdp_config.sharding_strategy=NO_SHARD
	$(ONE_THREAD) composer -n 2 scripts/train.py yamls/pretrain/mpt-quickstart.yaml
	@echo "batches 211 to 213 again, on 1 rank:"
	$(ONE_THREAD) llmfoundry-lite replay runs/mpt-quickstart ba210..ba213
	python scripts/make_tasks.py
	python scripts/eval.py yamls/eval/quickstart.yaml models.quickstart=runs/mpt-quickstart \
	    results_folder=runs/mpt-quickstart/results redo=true
	llmfoundry-lite report runs/mpt-quickstart
	@echo
	@echo "next: llmfoundry-lite generate runs/mpt-quickstart --prompt 'import'"
	@echo "      your own text: docs/getting-started.md"

test: install
	pytest -n 2 --dist loadfile -m "not slow and not long and not gpu" --durations=20

test-slow: install
	pytest -n 2 --dist loadfile -m "slow and not long and not gpu" --durations=20

# The core needs no companion: its own tests, in a copy without them and an environment that has never seen them. TESTS
# chooses some: make test-core TESTS="tests/cli tests/test_preflight.py"
TESTS ?= tests

test-core: install
	rm -rf build/core && mkdir -p build/core
	git ls-files -z -- . ':!companions' | tar --create --null --files-from - | tar --extract --directory build/core
	cd build/core && env --unset VIRTUAL_ENV $(abspath $(UV)) sync --quiet
	cd build/core && PATH=$$PWD/.venv/bin:$$PATH pytest -n 2 --dist loadfile -m "not slow and not long and not gpu" $(TESTS)

test-long: install
	pytest -m "long and not gpu" --durations=20

# What only a GPU can show, in two parts of at most 4 minutes on one device: its tests, memory and speed; whole runs
# (exact sums, switching between CPU and GPU, a save and a restore, energy, evaluation). Each leaves
# runs/gpu-check/PART.json. Nothing is installed where Python has what they need, as on a machine with its own torch.
gpu-check: gpu-check-device gpu-check-runs

gpu-check-device gpu-check-runs:
	@$(PYTHON) scripts/gpu_check.py ready || $(MAKE) install
	$(PYTHON) scripts/gpu_check.py $(@:gpu-check-%=%)

# The site, from docs/ into site/. A broken link is an error. Its generator has an environment of its own.
docs: | $(UV)
	$(UV) run --quiet --isolated --only-group docs zensical build --strict

lint: install
	ruff format --check $(SOURCES)
	ruff check $(SOURCES)
	pyright
	lint-imports
	$(RESOLVE) | $(PINS) | diff - <($(PINS) requirements.txt) || (echo "out of date: make requirements"; exit 1)
	! grep -vxFf requirements.txt requirements-without-torch.txt
	codespell $(SOURCES) yamls docs README.md CONTRIBUTING.md Makefile pyproject.toml

format: install
	ruff format $(SOURCES)
	ruff check --fix $(SOURCES)

# For pip and containers: with torch, and without it for images that bring their own (the only way on ROCm).
EXPORT = $(UV) export --quiet --no-default-groups --group composer --extra train --no-emit-project --no-hashes --no-annotate --no-header
# Lint asks whether the committed versions still answer pyproject.toml, not whether they are today's newest: an index
# that has caught up is no reason to fail. Names and versions alone: how conditions are spelled changes with uv's version.
RESOLVE = $(UV) pip compile --quiet --universal --no-annotate --no-header --constraint requirements.txt --extra train --group composer pyproject.toml
PINS = sed 's/ *;.*//'

requirements: install
	$(UV) lock --quiet --upgrade
	$(EXPORT) -o requirements.txt
	$(EXPORT) --prune torch --prune torchvision -o requirements-without-torch.txt

clean:
	rm -rf $(VENV) .tools data runs results site .cache
