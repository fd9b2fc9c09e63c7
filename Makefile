# `make demo` shows the main job on real input, `make test` proves the parts, `make check` is the
# gate for style. Each prepares what it needs with scripts/bootstrap, a no-op after the first time.

# rustup's default place; a login shell has it already.
export PATH := $(PATH):$(HOME)/.cargo/bin

CARGO ?= cargo
# `make LOCKED= test` lets cargo update Cargo.lock.
LOCKED ?= --locked
# Size of the demo's checkpoint in megabytes.
DEMO_MB ?= 1050
SCRIPTS := scripts/bootstrap scripts/demo scripts/kernels scripts/fuzz-smoke scripts/sanitize scripts/aarch64 scripts/check-service .ci/run \
    $(addprefix tests/kernel/,boot counters initramfs net on-peer run)

export DEMO_MB LOCKED

.PHONY: help demo test test-long check fmt-check clippy doc deny unused scripts-check service-check bench bench-full kernel-test fuzz-smoke sanitize aarch64 fixtures clean bootstrap

help:
	@echo "make demo         build, synthesise a checkpoint, serve it, fetch it, prove every byte (DEMO_MB=$(DEMO_MB))"
	@echo "make test         unit, property, contract and end-to-end tests"
	@echo "make test-long    a quarter of an hour: a million late readers, ten minutes of faults (SOAK_SEED=N repeats one)"
	@echo "make check        formatting, lints, documentation, licences, unused dependencies: warnings are errors"
	@echo "make bench        speed, side by side with what people would use instead; make bench-full: curves"
	@echo "make fixtures     generate the test checkpoints"
	@echo "make kernel-test  real verbs on soft-RoCE, in guest kernels 6.1 and 6.12 (KERNEL_TEST='--rig one' and the like)"
	@echo "make fuzz-smoke   a short run of every fuzz target (nightly toolchain)"
	@echo "make sanitize     arena and engine under the address and thread sanitizers (nightly toolchain)"
	@echo "make aarch64      unit tests as an aarch64 machine runs them, in QEMU (Debian, as root: it installs QEMU)"
	@echo "make clean        remove everything that was built"

bootstrap:
	@scripts/bootstrap

demo: bootstrap
	@scripts/demo

# End-to-end tests start the binaries, which `cargo test` alone does not build. No incremental
# state: it costs time and space on a cold run and helps only an edit-and-repeat loop.
test: bootstrap
	CARGO_INCREMENTAL=0 $(CARGO) build $(LOCKED) -p atlas-expert --bins
	CARGO_INCREMENTAL=0 $(CARGO) test $(LOCKED) --workspace

# Those that take minutes and need nothing but time; each says what it found.
test-long: bootstrap
	CARGO_INCREMENTAL=0 $(CARGO) test $(LOCKED) -p atlas-expert-tests --test 'streamer_*' -- \
	    --ignored --nocapture --test-threads 1 long_

check: fmt-check scripts-check service-check clippy doc deny unused

fmt-check:
	$(CARGO) fmt --all --check

clippy:
	$(CARGO) clippy $(LOCKED) --workspace --all-targets -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(LOCKED) --workspace --no-deps

scripts-check: bootstrap
	@for script in $(SCRIPTS); do \
	    case $$(head -n 1 $$script) in *bash*) bash -n $$script ;; *) sh -n $$script ;; esac || exit 1; \
	done
	@if command -v shellcheck >/dev/null 2>&1; then shellcheck $(SCRIPTS); \
	 else echo "check: shellcheck is not installed, the scripts' syntax alone was checked"; fi
	@python3 -m compileall -q scripts
	@cd scripts && python3 -c "import ast; ast.parse(open('bench').read())" && python3 -m unittest -q benchmarks.tests

service-check:
	@scripts/check-service

deny:
	@if $(CARGO) deny --version >/dev/null 2>&1; then $(CARGO) deny --all-features check; \
	 else echo "check: cargo-deny is not installed, licences and sources were NOT checked (cargo install --locked cargo-deny)"; fi

# A dependency that is used in a way it does not see is named in [package.metadata.cargo-machete].
unused:
	@if $(CARGO) machete --version >/dev/null 2>&1; then $(CARGO) machete --skip-target-dir; \
	 else echo "check: cargo-machete is not installed, unused dependencies were NOT looked for (cargo install --locked cargo-machete)"; fi

# Targets that a script fills once it exists; until then they fail, and say why.
define from_script
	@if [ -x scripts/$(1) ]; then exec scripts/$(1); \
	 else echo "make $(1): not there yet ($(2))" >&2; exit 2; fi
endef

bench: bootstrap
	@scripts/bench

bench-full: bootstrap
	@scripts/bench --full

# Installs QEMU and fetches kernels by itself, where it may.
kernel-test:
	@scripts/kernel-test $(KERNEL_TEST)

fuzz-smoke:
	@scripts/fuzz-smoke

sanitize:
	@scripts/sanitize

aarch64:
	@scripts/aarch64

fixtures: bootstrap
	$(call from_script,fixtures,test checkpoints written by other tools)

clean:
	$(CARGO) clean
