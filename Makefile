# What people do with this repository. Every target does its own set-up.

CARGO ?= cargo
export CARGO_TERM_COLOR ?= auto

# What a job runs on; the other programs look after these.
PRODUCT = -p steadfast-cli -p steadfast-master -p steadfast-pserver -p steadfast-trainer

# A workspace of its own, at which cargo does not look from here.
FUZZ = --edition 2024 fuzz/src/lib.rs $(wildcard fuzz/targets/*.rs)

.PHONY: help setup build demo test test-compose chaos sim sim-deep mutants bench bench-compare verify verify-deep fix

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: ## Install what building and testing need (apt, as root or by sudo)
	@scripts/setup

build: setup ## Build all programs
	$(CARGO) build --release --workspace --bins

demo: setup ## Train a model on a cluster of processes on this machine
	$(CARGO) build --release --bins $(PRODUCT)
	target/release/steadfast local examples/digits.toml

test: build ## Run all tests
	@scripts/setup --tests
	$(CARGO) test --release --workspace

test-compose: build ## Run a job in containers and disturb it (part of `test` too; needs a Docker engine)
	$(CARGO) test --release --workspace --test compose -- --nocapture

chaos: build ## Run seeded schedules of faults: SEED=1 MINUTES=5 MODE=sync|async
	target/release/chaos --seed $(or $(SEED),1) --minutes $(or $(MINUTES),5) --mode $(or $(MODE),sync)

sim: build ## Run seeds in simulation: SEEDS=10000 SEED=1 MODE=both|sync|async
	target/release/steadfast-sim --seed $(or $(SEED),1) --seeds $(or $(SEEDS),10000) --mode $(or $(MODE),both)

sim-deep: build ## Try every single detour of a small job in simulation, and every two faults
	target/release/steadfast-sim --explore
	target/release/steadfast-sim --explore --pairs

mutants: build ## Put deliberate faults into our protocol and see the simulator find them
	target/release/steadfast-mutants $(ONLY)

bench: build ## Measure beside this machine's limits: ONLY="push pull" ROUNDS=5
	target/release/steadfast-bench $(ONLY) --rounds $(or $(ROUNDS),5) --json target/bench.json

bench-compare: build ## Measure beside another revision: BASE=main~5 ONLY="push pull" ROUNDS=5
	scripts/bench-compare "$(BASE)" $(ONLY) --rounds $(or $(ROUNDS),5)

verify: setup ## Check form and lints; changes nothing
	$(CARGO) fmt --all --check
	rustfmt --check $(FUZZ)
	$(CARGO) clippy --release --workspace --all-targets -- -D warnings
	$(CARGO) test --release --workspace --test layers

verify-deep: setup ## Feed hostile bytes to every decoder: SECONDS=60 each, ONLY="shard text"
	scripts/fuzz --seconds $(or $(SECONDS),60) $(ONLY)

fix: setup ## Format and apply what clippy can mend
	$(CARGO) clippy --release --workspace --all-targets --fix --allow-dirty --allow-staged
	$(CARGO) fmt --all
	rustfmt $(FUZZ)
