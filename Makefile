# `make check` is what continuous integration runs; `make check-all` needs tools that are installed once.
CARGO ?= cargo
DENY ?= cargo deny

.PHONY: test-turbojpeg check check-all fmt clippy docs test bench compare demo

check: fmt clippy docs test

fmt:
	$(CARGO) fmt --all --check

clippy:
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked

# Unit tests, end-to-end tests, documentation tests; then every example is run.
test:
	$(CARGO) test --workspace --locked
	$(CARGO) run --quiet --locked -p dflop-costmodel --example annotate
	$(CARGO) run --quiet --locked -p dflop-balancer --example balance
	$(CARGO) run --quiet --locked -p dflop-loader --example stream
	$(CARGO) run --quiet --locked -p dflop-loader --example balanced

# The same codec tests through libjpeg-turbo; wants cmake and nasm.
test-turbojpeg:
	$(CARGO) test --locked -p dflop-loader -p dflop-tests --features dflop-loader/turbojpeg,dflop-tests/turbojpeg

# cargo install cargo-deny cargo-hack cargo-machete typos-cli
check-all: check
	$(DENY) check licenses bans sources
	$(CARGO) hack --workspace --each-feature check --locked
	$(CARGO) machete
	typos
	$(CARGO) bench -p dflop-benches --locked --no-run

bench:
	$(CARGO) bench -p dflop-benches --locked

# Ratios against the bare decode loop, and against webdataset where PEERS and PYTHON name it: see benches/README.md.
compare:
	$(CARGO) build --release --locked -p dflop-cli -p dflop-benches
	python3 benches/compare.py --corpus $(CORPUS) $(if $(PEERS),--peers $(PEERS) --python $(PYTHON))

demo:
	$(CARGO) run --release --locked -- demo
