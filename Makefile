# `make check` is what continuous integration runs; `make check-all` needs tools that are installed once.
CARGO ?= cargo
DENY ?= cargo deny
PYTHON ?= python3
# `--timings` keeps how long each crate compiles, in $(BUILD)/cargo-timings.
TIMINGS ?=
# Where everything that is built lies.
BUILD := $(or $(CARGO_TARGET_DIR),target)

.PHONY: minutes data-cases describe-models describe-types site test-site test-checkpoints test-conversions test-report test-mpi test-launchers test-manifests test-deferred test-kernels test-cudnn test-cuda test-cuda-short test-cuda-faults test-heavy test-losses advisories check check-all spelling fmt clippy docs docs-update test test-rust test-python test-integrations test-interop test-models test-pixels test-stores test-avif test-turbojpeg test-video test-wheels test-wheel-checks sdist bench bench-remote bench-s3 chaos compare demo evaluation fuzz record-model-inputs record-executor-parity record-flops record-llm-flops record-models record-processors record-tokens record-videos interleavings miri sanitize-address sanitize-address-cuda sanitize-thread determinism soak planner-brute planner-grid planner-random wheels

check: fmt clippy docs test

fmt:
	$(CARGO) fmt --all --check

# The whole workspace joins the features of all crates; the command alone has the fewest, and has to compile.
clippy:
	$(CARGO) clippy $(TIMINGS) --workspace --all-targets --locked -- -D warnings
	$(CARGO) check --package dflop-cli --locked

docs:
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(TIMINGS) --workspace --no-deps --locked

test: test-rust test-python

# Runs `.ci/run` with nothing built and prints where its minutes go: steps, crates, test binaries.
minutes:
	$(PYTHON) tests/python/minutes.py

# Suites of the executor on the test device that computes late, in all of its orders.
test-deferred:
	set -e; for order in 0 1 2 3 4; do \
		DFLOP_DEFERRED_ORDER=$$order $(CARGO) test --locked -p dflop-testing --test suites -- deferred::; done

# Kernels of the CUDA device, compiled for four architectures without a device: registers, spills, shared memory.
# A CUDA 13.0 driver loads what this version of the compiler makes.
NVRTC_VENV ?= $(BUILD)/nvrtc-venv
test-kernels:
	test -x $(NVRTC_VENV)/bin/pip || $(PYTHON) -m venv $(NVRTC_VENV)
	$(NVRTC_VENV)/bin/pip install --quiet --disable-pip-version-check nvidia-cuda-nvrtc==13.0.88
	$(NVRTC_VENV)/bin/python tests/python/kernel_budgets.py

# Attention plans of cuDNN, built for devices that this machine does not have, by two versions: the one that PyTorch
# 2.11 brings, and the first whose backward pass is one operation. The wheels take 2.5 GB.
CUDNN_VENV ?= $(BUILD)/cudnn-venv
CUDNN_VERSIONS ?= 9.19.0.56 9.28.0.42
test-cudnn:
	test -x $(CUDNN_VENV)/bin/pip || $(PYTHON) -m venv $(CUDNN_VENV)
	test -d $(CUDNN_VENV)/nvidia/cu13 || $(CUDNN_VENV)/bin/pip install --quiet --no-deps --target $(CUDNN_VENV) \
		nvidia-cublas==13.10.0.20 nvidia-cuda-nvrtc==13.5.37
	set -e; for version in $(CUDNN_VERSIONS); do folder=$(abspath $(CUDNN_VENV))/$$version/nvidia; \
		test -d $$folder/cudnn || $(CUDNN_VENV)/bin/pip install --quiet --no-deps \
			--target $(CUDNN_VENV)/$$version nvidia-cudnn-cu13==$$version; \
		ln -sfn ../../nvidia/cu13 $$folder/cu13; \
		DFLOP_CUDNN_LIBRARY_DIR=$$folder/cudnn/lib $(CARGO) test $(ON_STAND_INS) --test cudnn; done

# The transport over MPI, a crate outside of the workspace: its conformance and a training job under `mpirun`. Installs
# nothing.
MPI_MANIFEST := executor/mpi/Cargo.toml
test-mpi:
	@command -v mpirun > /dev/null && command -v mpicc > /dev/null || { \
		echo "no MPI: on Debian, apt-get install libopenmpi-dev openmpi-bin" >&2; exit 1; }
	@test -n "$$LIBCLANG_PATH" || ls /usr/lib/llvm-*/lib/libclang*.so* /usr/lib/*/libclang*.so* 2> /dev/null | grep -q . || { \
		echo "no libclang: on Debian, apt-get install libclang-dev; or set LIBCLANG_PATH" >&2; exit 1; }
	$(CARGO) fmt --check --manifest-path $(MPI_MANIFEST)
	$(CARGO) clippy --manifest-path $(MPI_MANIFEST) --all-targets --locked --target-dir $(BUILD)/mpi -- -D warnings
	$(CARGO) test --manifest-path $(MPI_MANIFEST) --locked --target-dir $(BUILD)/mpi

# Faults on the host's side of the CUDA device, one at a time: its tests must find each. Takes about 15 minutes.
test-cuda-faults:
	$(PYTHON) tests/python/cuda_faults.py

# The CUDA device, the command and `gpu-check` on the stand-ins for the libraries of CUDA: a workspace of its own, which uses
# registry crates that this one has built. Wants g++.
STAND_INS := tests/cuda-stand-in/Cargo.toml
ON_STAND_INS = --manifest-path $(STAND_INS) --target-dir $(BUILD) --workspace --locked
test-cuda:
	$(CARGO) fmt --all --check --manifest-path $(STAND_INS)
	$(CARGO) clippy $(ON_STAND_INS) --all-targets -- -D warnings
	$(CARGO) test $(ON_STAND_INS)

# Of these the two ranks over NCCL: the cases of communicators, and a pipeline.
test-cuda-short:
	$(CARGO) test $(ON_STAND_INS) --test short

# Unit tests, end-to-end tests, documentation tests; then examples are run, which the tests have built.
EXAMPLES = $(BUILD)/debug/examples
test-rust:
	$(CARGO) test $(TIMINGS) --workspace --locked
	$(EXAMPLES)/predict_cost
	$(EXAMPLES)/balance
	$(EXAMPLES)/stream
	$(EXAMPLES)/balanced
	$(EXAMPLES)/model_inputs
	$(EXAMPLES)/comm_speed
	$(EXAMPLES)/own_stage

# The package as users install it, in a virtual environment with NumPy and pyarrow; then the example that takes no more.
# PYTHON_PROFILE=dev shares what `make test-rust` has built; `dist` installs what a wheel holds, after a build of its own.
PYTHON_VENV ?= $(BUILD)/python-venv
PYTHON_PROFILE ?= dev
PYTHON_EXAMPLES = $(wildcard bindings/python/examples/*.py)
test-python:
	$(call install-package,$(PYTHON_VENV),--requirement bindings/python/tests/requirements.txt)
	$(PYTHON_VENV)/bin/python -m unittest discover -s bindings/python/tests
	$(PYTHON_VENV)/bin/python bindings/python/examples/first_steps.py

# What became of recorded odd archives, images, clips and documents: make data-cases CASES=DIRECTORY, with its cases.json.
data-cases:
	@test -f "$(CASES)/cases.json" || { echo "CASES=DIRECTORY names a directory with cases.json" >&2; exit 1; }
	$(call install-package,$(PYTHON_VENV),--requirement bindings/python/tests/requirements.txt)
	$(PYTHON_VENV)/bin/python tests/python/data_cases.py "$(CASES)"

# The package beside PyTorch and other tools, which pip brings; its stubs against what it is; all examples.
INTEGRATIONS_VENV ?= $(BUILD)/integrations-venv
test-integrations:
	$(call install-package,$(INTEGRATIONS_VENV),--requirement bindings/python/tests/integrations/requirements.txt)
	$(INTEGRATIONS_VENV)/bin/stubtest dflop
	$(INTEGRATIONS_VENV)/bin/python -m unittest discover -s bindings/python/tests/integrations
	set -e; for example in $(PYTHON_EXAMPLES); do $(INTEGRATIONS_VENV)/bin/python $$example; done

# Losses and gradients of every family in every trainer, balanced, data-blind and in one pass. LOSSES="plain qwen3-vl-8b"
# selects loops and families. Needs what `make test-integrations` installs.
test-losses:
	$(call install-package,$(INTEGRATIONS_VENV),--requirement bindings/python/tests/integrations/requirements.txt)
	$(INTEGRATIONS_VENV)/bin/python tests/python/trainer_losses.py $(LOSSES)

define require-python
@$(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' || { \
	echo "$(PYTHON) is no Python 3.11 or newer with venv: PYTHON=PROGRAM names another; make test-rust needs none" >&2; exit 1; }
endef

# $(call install-package,ENVIRONMENT,REQUIREMENTS)
define install-package
$(require-python)
test -x $(1)/bin/pip || $(PYTHON) -m venv $(1)
$(1)/bin/pip install --quiet --disable-pip-version-check $(2)
MATURIN_PEP517_ARGS="--locked --profile $(PYTHON_PROFILE)" \
	$(1)/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall ./bindings/python
endef

# Wheels for Linux, with the profile `dist` and the licenses of all crates inside, checked; pip brings maturin and the compiler
# of Zig. `rustup target add aarch64-unknown-linux-gnu` is needed once, or WHEEL_TARGETS without it.
WHEELS ?= $(BUILD)/wheels
WHEELS_VENV ?= $(BUILD)/wheels-venv
WHEEL_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
define install-maturin
$(require-python)
test -x $(WHEELS_VENV)/bin/pip || $(PYTHON) -m venv $(WHEELS_VENV)
$(WHEELS_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement bindings/python/wheels/requirements.txt
endef
wheels:
	$(install-maturin)
	$(WHEELS_VENV)/bin/python bindings/python/wheels/build.py --out $(WHEELS) $(WHEEL_TARGETS)

# The checks of `make wheels` refuse wheels that it did not build like this.
test-wheel-checks:
	set -e; for wheel in $(abspath $(WHEELS))/dflop-*manylinux*.whl; do \
		DFLOP_WHEEL=$$wheel $(abspath $(WHEELS_VENV))/bin/python -m unittest discover -s bindings/python/wheels; done

# The source distribution: the workspace as far as the package needs it, with Cargo.lock.
sdist:
	$(install-maturin)
	$(WHEELS_VENV)/bin/maturin sdist --quiet --manifest-path bindings/python/Cargo.toml --out $(WHEELS)

# The wheel of this machine in a clean environment of every Python of WHEEL_PYTHONS that is here, then that of aarch64 in
# QEMU, where it is installed. WHEEL_TESTS=--all fails if a Python is missing.
WHEEL_PYTHONS ?= 3.11 3.12 3.13 3.14
test-wheels:
	$(PYTHON) bindings/python/wheels/environments.py --pythons "$(WHEEL_PYTHONS)" --work $(BUILD)/wheel-tests $(WHEEL_TESTS) \
		$(WHEELS)/dflop-*manylinux*_$(shell uname -m).whl
ifneq ($(shell uname -m),aarch64)
	$(PYTHON) bindings/python/wheels/emulated.py --work $(BUILD)/wheel-tests/emulated $(WHEELS)/dflop-*manylinux*_aarch64.whl
endif

# Shards in an S3 bucket of a local server, behind a proxy that misbehaves. Indexes go to a cache of their own.
STORES_VENV ?= target/stores-venv
S3_SERVER ?= 127.0.0.1:5561
test-stores:
	test -x $(STORES_VENV)/bin/moto_server || (python3 -m venv $(STORES_VENV) && $(STORES_VENV)/bin/pip install --quiet 'moto[server]')
	$(CARGO) test -p dflop-tests --locked --no-run
	$(STORES_VENV)/bin/moto_server -H $(word 1,$(subst :, ,$(S3_SERVER))) -p $(word 2,$(subst :, ,$(S3_SERVER))) \
		> target/moto.log 2>&1 & server=$$!; trap "kill $$server" EXIT; sleep 3; \
	DFLOP_S3_SERVER=$(S3_SERVER) AWS_ENDPOINT_URL=http://127.0.0.1:5562 AWS_ALLOW_HTTP=true AWS_REGION=us-east-1 \
	AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=test XDG_CACHE_HOME=$(CURDIR)/target/stores-cache \
	$(CARGO) test -p dflop-tests --locked -- --ignored --test-threads 1 store::s3::

# Digests of a state of 7B parameters, of sparse files: reads a hundred gigabytes of zeros, which takes a minute.
test-heavy:
	$(CARGO) test -p dflop-executor --lib --release --locked -- --ignored checkpoint::verify

# Pixels against Pillow's, of random images, whole and damaged; pip brings Pillow.
test-pixels: test-python
	$(PYTHON_VENV)/bin/pip install --quiet --disable-pip-version-check pillow
	$(PYTHON_VENV)/bin/python tests/python/pixels_pillow.py

# Known advisories against dependencies; RUSTSEC_DB is a clone of the RustSec database, at most 90 days old.
advisories:
	@$(PYTHON) tests/python/advisories.py --deny "$(DENY)" $(RUSTSEC_DB)

# Needs Python and pip: other readers open the index.
test-interop:
	$(CARGO) build --locked -p dflop-cli --features dflop-cli/full
	python3 -m venv venv
	venv/bin/pip install --quiet --requirement tests/python/requirements.txt
	DFLOP=$${CARGO_TARGET_DIR:-target}/debug/dflop venv/bin/python tests/python/index_interop.py
	$(CARGO) test --locked -p dflop-loader --features arrow2 index::arrow2

# Conversions of files that the original libraries write, which pip brings, with PyTorch: 3 GB.
CONVERSIONS_VENV ?= $(BUILD)/conversions-venv
test-conversions:
	$(call install-package,$(CONVERSIONS_VENV),--requirement tests/python/conversion_requirements.txt)
	$(CONVERSIONS_VENV)/bin/python tests/python/conversions.py
	$(CONVERSIONS_VENV)/bin/python -m unittest discover -s bindings/python/tests -p 'test_stored_*.py'
	$(CONVERSIONS_VENV)/bin/python -m unittest discover -s bindings/python/tests/integrations -p test_docstrings.py

# Two ranks under every launcher that is installed; PYTHON may have torchrun and Ray.
test-launchers:
	$(CARGO) build --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/python/launchers.py --dflop $(BUILD)/debug/dflop

# Kubernetes manifests of the documents; pip brings the client, whose version has models with types and required fields.
MANIFESTS_VENV ?= $(BUILD)/manifests-venv
test-manifests:
	test -x $(MANIFESTS_VENV)/bin/pip || $(PYTHON) -m venv $(MANIFESTS_VENV)
	$(MANIFESTS_VENV)/bin/pip install --quiet --disable-pip-version-check kubernetes==31.0.0
	$(MANIFESTS_VENV)/bin/python tests/python/manifests.py docs/multi-node

# Reports and `dflop view` in Chromium, headless: two widths, both themes, clicks, wheel and keys. Needs Chromium; pip
# brings its driver.
# SCREENSHOTS=DIRECTORY keeps images of the pages.
REPORT_VENV ?= $(BUILD)/report-venv
test-report:
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || { \
		echo "no Chromium: on Debian, apt-get install chromium" >&2; exit 1; }
	test -x $(REPORT_VENV)/bin/pip || $(PYTHON) -m venv $(REPORT_VENV)
	$(REPORT_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement tests/report/requirements.txt
	$(CARGO) build --locked -p dflop-cli --features dflop-cli/full
	$(REPORT_VENV)/bin/python tests/report/report_page.py --dflop $(BUILD)/debug/dflop \
		$(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS))
	$(REPORT_VENV)/bin/python tests/report/view_page.py --dflop $(BUILD)/debug/dflop \
		$(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS))

# The documentation site, in $(BUILD)/site, and tests of its generator: docs/site/README.md. RUSTDOC=1 includes the Rust
# documentation; NATIVE=FILE is the compiled part of an installed package, which is built otherwise.
SITE_VENV ?= $(BUILD)/site-venv
site:
	test -x $(SITE_VENV)/bin/pip || $(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement docs/site/requirements.txt
	$(if $(NATIVE),,$(CARGO) build --locked -p dflop-python)
	$(if $(RUSTDOC),RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked)
	$(SITE_VENV)/bin/python docs/site/build.py --native $(or $(NATIVE),$(BUILD)/debug/lib_native.so) --out $(BUILD)/site \
		$(if $(RUSTDOC),--rustdoc $(BUILD)/doc)
	PYTHONPATH=docs/site:$(BUILD)/site-work/package $(SITE_VENV)/bin/python -m unittest discover -s tests/site

# The site in Chromium, headless: search, themes, tabs, links, two widths.
# SCREENSHOTS=DIRECTORY keeps images of the pages.
test-site: site
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || { \
		echo "no Chromium: on Debian, apt-get install chromium" >&2; exit 1; }
	$(SITE_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement tests/report/requirements.txt
	$(SITE_VENV)/bin/python tests/site/site_page.py --site $(BUILD)/site $(if $(SCREENSHOTS),--screenshots $(SCREENSHOTS))

# Small random models of every family take what `batches` writes; needs Python and pip, which brings PyTorch.
# MODELS_TRANSFORMERS=4.57.1 runs another version of transformers.
MODELS_VENV ?= $(BUILD)/models-venv
MODELS_TRANSFORMERS ?= 5.24.0
define install-models
test -x $(MODELS_VENV)/bin/pip || $(PYTHON) -m venv $(MODELS_VENV)
$(MODELS_VENV)/bin/pip install --quiet --disable-pip-version-check --requirement tests/python/model_requirements.txt \
	transformers==$(MODELS_TRANSFORMERS)
$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
endef
test-models:
	$(install-models)
	DFLOP=$(BUILD)/release/dflop $(MODELS_VENV)/bin/python tests/python/model_runs.py
	DFLOP=$(BUILD)/release/dflop $(MODELS_VENV)/bin/python tests/python/model_runs_omni.py

# Types that transformers has, described by themselves, against dflop's own numbers where it reads them. TYPES="qwen3_vl llava"
# selects types. Needs what `make test-integrations` installs.
describe-models:
	$(call install-package,$(INTEGRATIONS_VENV),--requirement bindings/python/tests/integrations/requirements.txt)
	$(INTEGRATIONS_VENV)/bin/python tests/python/describe_models.py $(TYPES)

# All types that transformers generates from text, images or audio with: small models are described and trained, and what
# differs from tests/golden/described_types.json is printed; UPDATE=1 takes it over, and writes the table in docs/models.md.
describe-types:
	$(call install-package,$(INTEGRATIONS_VENV),--requirement bindings/python/tests/integrations/requirements.txt)
	rm -f $(BUILD)/described_types.jsonl
	RECORDS=$(BUILD)/described_types.jsonl $(INTEGRATIONS_VENV)/bin/python tests/python/describe_types.py $(TYPES)
	$(INTEGRATIONS_VENV)/bin/python tests/python/types_table.py $(BUILD)/described_types.jsonl $(if $(UPDATE),update)

# Mixtures of experts, and Gemma 3 with crops of images: transformers' random weights train with `dflop train`, and
# transformers loads what that saves; losses of both must be equal.
test-checkpoints:
	$(install-models)
	DFLOP=$(BUILD)/release/dflop $(MODELS_VENV)/bin/python tests/python/trained_checkpoints.py

# The same codec tests through libjpeg-turbo; wants cmake and nasm.
test-turbojpeg:
	$(CARGO) test --locked -p dflop-samples -p dflop-loader -p dflop-tests \
		--features dflop-samples/turbojpeg,dflop-loader/turbojpeg,dflop-tests/turbojpeg

# AVIF images, off by default.
test-avif:
	$(CARGO) test --locked -p dflop-samples --features avif

# Videos against the commands of FFmpeg; wants its development files, its commands and clang.
test-video:
	$(CARGO) test --locked -p dflop-samples --lib --features video video
	$(CARGO) test --locked -p dflop-tests --features video video
	$(CARGO) test --locked -p dflop-cli --features video video

# Spelling, American, by the rules of `_typos.toml`; pip brings the program.
SPELLING_VENV ?= $(BUILD)/spelling-venv
spelling:
	test -x $(SPELLING_VENV)/bin/typos || { $(PYTHON) -m venv $(SPELLING_VENV) && \
		$(SPELLING_VENV)/bin/pip install --quiet --disable-pip-version-check typos; }
	$(SPELLING_VENV)/bin/typos

# cargo install cargo-deny cargo-hack cargo-machete
check-all: check spelling interleavings test-deferred test-cuda
	$(DENY) check licenses bans sources
	$(CARGO) hack --workspace --each-feature check --locked
	$(CARGO) machete
	$(CARGO) bench -p dflop-benches --locked --no-run

bench:
	$(CARGO) bench -p dflop-benches --locked

# Ratios against the bare decode loop, and against webdataset where PEERS and PYTHON name it: see benches/README.md.
compare:
	$(CARGO) build --profile dist --locked -p dflop-cli --features dflop-cli/full -p dflop-benches
	python3 benches/compare.py --corpus $(CORPUS) $(if $(PEERS),--peers $(PEERS) --python $(PYTHON))

# The evaluation of the DFLOP paper, simulated: docs/evaluation.md, docs/evaluation/ and benches/results. DFLOP=PROGRAM is
# used in place of a release build; EVALUATION="--only partitions" runs some studies, EVALUATION=--quick few steps. pip brings
# matplotlib and OR-tools; the Python package is for corrections and peers.
EVALUATION_VENV ?= $(BUILD)/evaluation-venv
evaluation:
	$(call install-package,$(EVALUATION_VENV),--requirement benches/evaluation/requirements.txt)
	$(if $(DFLOP),,$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full)
	$(EVALUATION_VENV)/bin/python -m unittest discover -s benches/evaluation
	$(EVALUATION_VENV)/bin/python benches/evaluation/evaluate.py --dflop $(or $(DFLOP),$(BUILD)/release/dflop) $(EVALUATION)

# Throughput of shards behind 30 ms against the same shards as local files; OUT=FILE keeps the JSON.
bench-remote:
	$(CARGO) build --profile dist --locked -p dflop-cli --features dflop-cli/full -p dflop-tests --bins
	python3 benches/remote.py --corpus $(CORPUS) $(if $(OUT),--out $(OUT))

# The same through an S3 server that `make test-stores` has installed.
bench-s3:
	$(CARGO) build --profile dist --locked -p dflop-cli --features dflop-cli/full -p dflop-tests --bins
	$(STORES_VENV)/bin/moto_server -H $(word 1,$(subst :, ,$(S3_SERVER))) -p $(word 2,$(subst :, ,$(S3_SERVER))) \
		> target/moto.log 2>&1 & server=$$!; trap "kill $$server" EXIT; sleep 3; \
	XDG_CACHE_HOME=$(CURDIR)/target/stores-cache \
	python3 benches/remote.py --s3 $(S3_SERVER) --corpus $(CORPUS) $(if $(OUT),--out $(OUT))

# Truth for `loader/processors`, from the Hugging Face processors; PYTHON has transformers, torch and torchvision.
record-model-inputs:
	$(PYTHON) tests/record/model_inputs.py

# The same of videos; PYTHON has transformers 4.57.1, torch, torchvision and a Pillow before 12.2.
record-videos:
	$(PYTHON) tests/record/videos.py

# Kills and disturbs commands at random moments and checks what they promise; KILLS=150 is about 2,800 faults. Faults that
# need the right to mount a file system are skipped without it, and kills at system calls without `strace`.
KILLS ?= 100
chaos:
	$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/chaos/chaos.py --dflop $(BUILD)/release/dflop --kills $(KILLS) $(if $(OUT),--out $(OUT))

# Streams, loads and trains for MINUTES each, and checks that memory, descriptors and threads stay flat.
MINUTES ?= 30
soak:
	$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/chaos/soak.py --dflop $(BUILD)/release/dflop --minutes $(MINUTES) $(if $(OUT),--out $(OUT))

# Repeats commands on one core, two, and two loaded ones, and checks that output and files are the same, byte for byte.
REPEATS ?= 100
determinism:
	$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/chaos/determinism.py --dflop $(BUILD)/release/dflop --repeats $(REPEATS) $(if $(OUT),--out $(OUT))

# Plans a grid of models, shapes, clusters and batches and checks `plan` and `simulate --shapes` against each other;
# GRID="--skip equal" leaves out a check, GRID="--runs 2520" is the whole grid.
planner-grid:
	$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/python/plan_grid.py --dflop $(BUILD)/release/dflop --out $(BUILD)/plan-grid --jobs 2 $(GRID)

# Plans PROBLEMS random problems and checks plans, methods and memory; RANDOM_GRID="--seed 2 --only 17" repeats one of another
# seed, OUT=DIRECTORY keeps `summary.json` and the tables of cases with violations.
PROBLEMS ?= 100
planner-random:
	$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/python/plan_random.py --dflop $(BUILD)/release/dflop --cases $(PROBLEMS) --jobs 2 \
		--out $(if $(OUT),$(OUT),$(BUILD)/plan-random) $(RANDOM_GRID)

# Plans TINY tiny clusters and compares them with the best of all plans and all microbatches; BRUTE="--seed 2 --only 17" repeats
# one of another seed.
TINY ?= 60
planner-brute:
	$(CARGO) build --release --locked -p dflop-cli --features dflop-cli/full
	$(PYTHON) tests/python/plan_brute.py --dflop $(BUILD)/release/dflop --out $(BUILD)/plan-brute --cases $(TINY) --jobs 2 $(BRUTE)

# One fuzz target under libFuzzer, such as `make fuzz TARGET=tar SECONDS=600`; wants a C++ compiler. The corpus is read, new
# inputs go to target/fuzz. An allocation over 1 GiB, 2 GiB of memory or 8 s for one input are findings. FEATURES=avif
# adds AVIF images to the target `image`.
SECONDS ?= 600
FUZZ_FLAGS = -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-trace-compares \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table --cfg fuzzing -Ccodegen-units=1
fuzz:
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="$(FUZZ_FLAGS)" $(CARGO) build --release --manifest-path tests/fuzz/Cargo.toml \
		$(if $(FEATURES),--features $(FEATURES)) --target-dir target/fuzz-build --target $(shell rustc -vV | sed -n 's/^host: //p')
	mkdir -p target/fuzz/$(TARGET) target/fuzz/findings
	FUZZ_TARGET=$(TARGET) target/fuzz-build/*/release/dflop-fuzz target/fuzz/$(TARGET) tests/fuzz/corpus/$(TARGET) \
		-max_total_time=$(SECONDS) -timeout=8 -rss_limit_mb=2048 -max_len=65536 -print_final_stats=1 \
		-artifact_prefix=target/fuzz/findings/$(TARGET)-

# Hand-overs between threads under many schedules, half of them random; a claim that fails is printed, with the threads
# that wait. SEED=N chooses other schedules, MODEL=WORDS the claims that contain these words.
SCHEDULES ?= 20000
SEED ?= 1
interleavings:
	for program in flow comm; do \
		$(CARGO) run --quiet --locked --manifest-path tests/interleavings/Cargo.toml --target-dir $(BUILD)/interleavings \
			--bin $$program -- $(SCHEDULES) $(SEED) '$(MODEL)' || exit 1; \
	done

# Unit tests of the crates with unsafe code under the address sanitizer, and the stages, which multiply by it. A target is
# named so that build scripts and macros stay as they are; a test asks for more memory than there is, and must be refused.
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
sanitize-address:
	ASAN_OPTIONS=allocator_may_return_null=1 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
		$(CARGO) test --locked --target $(HOST) \
		--target-dir $(BUILD)/sanitize-address -p dflop-costmodel -p dflop-balancer -p dflop-planner -p dflop-loader \
		-p dflop-import -p dflop-executor -p dflop-comm -p dflop-device -p dflop-models --features dflop-loader/arrow2 --lib --test models --test device

# The CUDA device under it, on the stand-ins, which it does not instrument: their allocations and copies are checked. Two ranks
# over NCCL by default; CUDA_TESTS="--test nccl_failures --test device" runs others. The stand-ins keep what they allocate.
CUDA_TESTS ?= --test short
sanitize-address-cuda:
	ASAN_OPTIONS=detect_leaks=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address $(CARGO) test --locked --target $(HOST) \
		--target-dir $(BUILD)/sanitize-address --manifest-path $(STAND_INS) -p dflop-cuda-tests $(CUDA_TESTS)

# $(call toolchain-with,PATH): the first installed toolchain that has this file.
toolchain-with = $(firstword $(foreach name,$(shell rustup toolchain list 2>/dev/null | cut -d ' ' -f 1),$(if \
	$(wildcard $(shell rustc +$(name) --print sysroot)/$(1)),$(name))))

# The thread sanitizer needs a standard library that is instrumented as well: it would report every `Arc` otherwise.
sanitize-thread: TOOLCHAIN = $(call toolchain-with,lib/rustlib/src/rust/library/std/src/lib.rs)
sanitize-thread:
	$(if $(TOOLCHAIN),RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=thread $(CARGO) +$(TOOLCHAIN) test -Zbuild-std --locked \
		--target $(HOST) --target-dir $(BUILD)/sanitize-thread -p dflop-loader -p dflop-comm --lib -- flow:: decode::pool tcp:: rendezvous:: threads:: mailbox:: communicator:: collective::,\
		@echo 'sanitize-thread: skipped, no installed toolchain has rust-src (rustup component add rust-src)')

# Miri runs neither memory maps nor vector instructions nor Python, so only the bridge to arrow2 is left of the unsafe code.
miri: TOOLCHAIN = $(call toolchain-with,bin/cargo-miri)
miri:
	$(if $(TOOLCHAIN),MIRIFLAGS=-Zmiri-disable-isolation $(CARGO) +$(TOOLCHAIN) miri test --locked \
		--target-dir $(BUILD)/miri -p dflop-loader --lib --features arrow2 index::arrow2,\
		@echo 'miri: skipped, no installed toolchain has it (rustup toolchain install nightly --component miri,rust-src)')

demo:
	$(CARGO) run --release --locked -- demo

# Records the truth of all families anew, into a temporary directory, and prints how it differs from what is committed.
# NAMES="gemma3 tokens" runs some scripts; UPDATE=1 copies what differs to tests/golden.
record-models:
	$(PYTHON) tests/record/models.py $(NAMES) $(if $(UPDATE),--update)

# Records anew what the tests of `prepare` compare with: see tests/record/processors.py for what PYTHON must have.
record-processors:
	$(PYTHON) tests/record/processors.py

# Record anew what the cost model is compared with: see tests/record/tokens.py for what PYTHON must have.
record-tokens:
	$(PYTHON) tests/record/tokens.py

record-executor-parity:
	$(PYTHON) tests/record/executor_parity.py

record-flops:
	$(PYTHON) tests/record/flops.py

record-llm-flops:
	$(PYTHON) tests/record/llm_flops.py

# Rewrites the generated parts of the documents: the code map, the tables of options, settings and configuration keys.
docs-update:
	UPDATE_DOCS=1 $(CARGO) test -p dflop-tests --locked --test e2e the_code_map_is_current
	UPDATE_DOCS=1 $(CARGO) test -p dflop-tests --locked --test e2e repo::settings::
	UPDATE_DOCS=1 $(CARGO) test -p dflop-cli --locked --test cli the_versions_of_the_families
	UPDATE_DOCS=1 $(CARGO) test -p dflop-cli --locked --test cli the_document_of_the_models
	UPDATE_DOCS=1 $(CARGO) test -p dflop-cli --locked --test cli the_reference_lists_every_command
