# Development tasks. Every target runs its own setup.

CARGO ?= cargo
export CARGO
export CARGO_TERM_COLOR ?= auto

# The programs that a job runs; the others test and measure them.
PRODUCT = -p steadfast-cli -p steadfast-master -p steadfast-pserver -p steadfast-trainer

# Cargo with RocksDB, for all programs but those of the demo.
ALL = scripts/cargo-rocksdb

# A separate workspace, which cargo does not include from here.
FUZZ = --edition 2024 fuzz/src/lib.rs $(wildcard fuzz/targets/*.rs)

.PHONY: help setup build demo wheel test test-python test-compose chaos sim sim-deep mutants bench bench-large-table bench-python bench-peers bench-compare verify lint verify-deep fix

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## Install build and test dependencies (apt, as root or with sudo)
	@scripts/setup --rocksdb

build: setup ## Build all programs
	$(ALL) build --release --workspace --bins

demo: ## Train a model on a cluster of processes on this machine
	@scripts/setup
	$(CARGO) build --release --bins $(PRODUCT)
	target/release/steadfast local examples/digits.toml

# Packages of Python are fetched while programs are compiled. Python tests run after failed tests of Rust too, whose
# failures are printed once more at the end.
test: setup ## Run all tests, and print the ten slowest
	@scripts/setup --tests
	@scripts/python-environment & environment=$$!; trap "kill $$environment 2>/dev/null" EXIT; \
		$(MAKE) --no-print-directory build && wait $$environment
	@status=0; scripts/test || status=$$?; scripts/test-python || status=$$?; cat target/failed-tests; exit $$status

wheel: setup ## Build the Python wheel in dist/: the extension and the programs
	$(ALL) build --release --bins $(PRODUCT)
	scripts/wheel

test-python: build ## Run the Python tests with PyTorch, TensorFlow and JAX (part of `test` too; fetches 4.5 GB once)
	scripts/test-python

test-compose: build ## Run a job in containers and inject faults (part of `test` too; needs a Docker engine)
	$(ALL) test --release --workspace --test compose -- --nocapture

chaos: build ## Run seeded schedules of faults: SEED=1 MINUTES=5 MODE=sync|async|elastic (elastic: after test-python) JOB=digits|table|stream WARM_SPARES=2 HOSTS=1 FAULTS=100000 KINDS=kill
	target/release/chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),5) --mode $(or $(MODE),sync) --job $(or $(JOB),digits) $(if $(WARM_SPARES),--spares $(WARM_SPARES) --warm-spares $(WARM_SPARES)) $(if $(HOSTS),--hosts) $(if $(FAULTS),--faults $(FAULTS)) $(if $(KINDS),--kinds $(KINDS))

sim: build ## Simulate seeds: SEEDS=10000 SEED=1 MODE=both|sync|async|elastic|closures|pushes
	target/release/steadfast-sim --seed $(or $(SEED),1) --seeds $(or $(SEEDS),10000) --mode $(or $(MODE),both)

sim-deep: build ## Simulate a small job with every single deviation, with each death of a pserver, while slots move, and with every pair of faults
	target/release/steadfast-sim --explore
	target/release/steadfast-sim --explore --deaths
	target/release/steadfast-sim --explore --moves
	target/release/steadfast-sim --explore --pairs

mutants: build ## Check that the simulator detects deliberate protocol bugs
	target/release/steadfast-mutants $(ONLY)

bench: build ## Run benchmarks and compare with this machine's limits: ONLY="push pull" ROUNDS=5
	target/release/steadfast-bench $(ONLY) --rounds $(or $(ROUNDS),5) --json target/bench.json

bench-large-table: build ## Train a table that is larger than memory, and kill its pserver (40 minutes, 60 GB of disk): ARGS="--rows 10000000 --memory 200MiB"
	target/release/steadfast-bench large-table $(ARGS)

bench-python: build ## Compare trainers in PyTorch with DistributedDataParallel, recoveries with torchrun: ARGS="--rounds 3 --only elastic"
	scripts/test-python --collect-only --quiet >/dev/null
	PATH="$(CURDIR)/target/python-tests/bin:$(PATH)" target/python-tests/bin/python benches/python/bench.py $(ARGS)

bench-peers: build ## Compare with the systems that are used instead (fetches 5 GB once): ARGS="--rounds 3 --only ddp,steadfast --size small"
	scripts/bench-peers $(ARGS)

bench-compare: build ## Run benchmarks of this tree and of another revision: BASE=main~5 ONLY="push pull" ROUNDS=5
	scripts/bench-compare "$(BASE)" $(ONLY) --rounds $(or $(ROUNDS),5)

verify: lint ## Check formatting, lints and documentation; changes no source (builds the programs for their --help)
	$(ALL) build --release --workspace --bins
	$(ALL) test --release --workspace --test layers --test documentation

# In a build directory of its own: cargo builds nothing in a directory in which another cargo builds.
lint: setup ## Check formatting and lints (part of `verify`)
	$(CARGO) fmt --all --check
	rustfmt --check $(FUZZ)
	$(ALL) clippy --release --workspace --all-targets --target-dir target/lint -- -D warnings
	cp Cargo.lock fuzz/Cargo.lock
	$(CARGO) clippy --release --manifest-path fuzz/Cargo.toml --target-dir target/lint -- -D warnings
	scripts/lint-python

verify-deep: setup ## Fuzz every decoder: SECONDS=60 each, ONLY="shard text"
	scripts/fuzz --seconds $(or $(SECONDS),60) $(ONLY)

fix: setup ## Format, and apply clippy's fixes
	$(ALL) clippy --release --workspace --all-targets --fix --allow-dirty --allow-staged
	$(CARGO) fmt --all
	rustfmt $(FUZZ)
	scripts/lint-python --fix
