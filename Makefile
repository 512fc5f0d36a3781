# A fresh checkout needs python3 and make; every target makes its own .venv first.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
SOURCES := fsdp_flat tests $(wildcard examples benchmarks docs setup.py)

.PHONY: demo test test-cover test-all test-unguarded test-hosts test-clients test-versions test-newest
.PHONY: gpu fuzz mutations soak trace check fix docs bench bench-gpu bench-scale clean

demo: $(INSTALLED)
	$(BIN)/python examples/train_gpt.py --demo

# One thread per process, since multi-rank tests run several processes on few cores.
# One combination of the parameters of each test.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests --size quick

# Every value of every parameter at least once.
test-cover: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests --size cover

# Every combination.
test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests --size all

# The quick tests of steps without guards: a right program does the same.
STEPS := accumulation activation_checkpointing changed_weights clipping collectives compile forwards frozen_parameters \
	full_parameters gradients guards loss_scaling memory meta_device mixed_precision optimizers original_parameters \
	prefetching strategies tensor_classes tensor_parallel training wrapping

test-unguarded: $(INSTALLED)
	FSDP_FLAT_TESTS_WITHOUT_GUARDS=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests --size quick $(addprefix tests/,$(STEPS))

# Ranks on two hosts: network namespaces joined by a link of 1 and 10 Gbit/s. Skipped without root, ip and tc.
test-hosts: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/hosts

# Released accelerate, transformers, lightning, peft, torchtitan and torchtnt on fsdp_flat, in a separate environment.
test-clients: .venv-clients/.installed
	OMP_NUM_THREADS=1 .venv-clients/bin/python -m pytest -q tests/clients

# A selection of the tests (tests/versions/selection.py) on each torch of docs/versions.md, in .venv-versions.
# Downloads up to 5 GB per version. To select versions and the Python: make test-versions VERSIONS=2.8 PYTHON=python3.12.
VERSIONS ?= 2.8,2.11,2.13,newest

test-versions:
	$(PYTHON) -m tests.versions --versions $(VERSIONS)

# A minute of tests on the newest torch; prints a message if it cannot be installed within 15 minutes.
test-newest:
	$(PYTHON) -m tests.versions --versions newest --short --if-possible --remove --limit 900

# A machine with a GPU often has a torch of its own: where python3 has it, nothing is installed.
WITH_TORCH := if $(PYTHON) -c 'import torch' 2>/dev/null; then python=$(PYTHON); \
	else $(MAKE) $(INSTALLED) && python=$(BIN)/python; fi; $$python

# Everything that needs an accelerator, in less than 10 minutes: the stream sanitizer, tests marked gpu (faults,
# examples), and tests of parity and clients over NCCL on ranks that share one GPU. Without one, CPU substitutes.
# To select parts, or with the benchmark: make gpu GPU="--only parity", make gpu GPU="--all --minutes 14".
gpu:
	$(WITH_TORCH) -m tests.gpu $(GPU)

# Random programs compared with a plain replica; failing ones are shrunk, printed, and appended to a file.
SEEDS ?= 1000
RANKS ?= 2,3,4
FAILURES ?= fuzz-failures.txt

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/fuzz
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seeds $(SEEDS) --ranks $(RANKS) --failures $(FAILURES) $(FUZZ)

# Random mistakes, each made in a copy of the project: which the quick suite finds of those that the cover finds.
mutations: $(INSTALLED)
	$(BIN)/python -m tests.mutations $(MUTATIONS)

# Ten minutes of training through kills, stopped and slow ranks, full disks and other numbers of ranks.
soak: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/soak
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(SOAK)

# What a fixed set of programs does (events, collectives, bytes, weights), here and at another revision.
AGAINST ?= HEAD

trace: $(INSTALLED)
	$(BIN)/python -m tests.trace --against $(AGAINST)

check: $(INSTALLED)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy fsdp_flat
	$(BIN)/python -m pytest -q tests/test_layers.py
	! grep -rnP "$$(paste -sd'|' .ci/banned_words.txt)" fsdp_flat --include='*.py'

fix: $(INSTALLED)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# The documentation site, in site/; a warning is an error. It is read by opening site/index.html.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# To select sizes, ranks and implementations: make bench BENCH="--preset communication --rounds 3".
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(BENCH)
	$(BIN)/python -m benchmarks --states $(BENCH)

# One GPU, communication emulated. What fits into a time, or rows and the link that are selected:
# make bench-gpu BENCH="--minutes 8", make bench-gpu BENCH="--rows 1.2B-60 --gbps 100".
bench-gpu:
	$(WITH_TORCH) -m benchmarks.gpu $(BENCH)

bench-scale: $(INSTALLED)
	$(BIN)/python -m benchmarks.scale $(BENCH)

$(INSTALLED): setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,demo]'
	touch $@

.venv/.docs: $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	touch $@

.venv-clients/.installed: setup.py constraints.txt constraints-clients.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q -c constraints.txt torch numpy
	.venv-clients/bin/python -m pip install -q -c constraints.txt -c constraints-clients.txt -e '.[test,clients]'
	# Without all dependencies: of torchtitan the test imports one file; torchtnt uses these where it trains.
	.venv-clients/bin/python -m pip install -q --no-deps -c constraints-clients.txt torchtitan torchtnt torchao \
		bitsandbytes mypy-extensions pyre-extensions setuptools==79.0.1 tabulate typing-inspect
	touch $@

clean:
	rm -rf .venv .venv-clients .venv-versions build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fsdp_flat tests $(wildcard examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
