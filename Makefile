# meshrl: `make demo` runs the main job, `make test` passes the tests; both set everything up on a fresh machine.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.13.0
# Two OpenMP threads in each of several processes spin against each other: one each.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
PROTOS := $(wildcard proto/meshrl/v1/*.proto)

.PHONY: demo test check proto bench venv clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[torch,rewards,vllm,dev]'
	touch $@

venv: $(VENV)/.ready

demo: venv
	$(BIN)/meshrl demo

test: venv
	$(BIN)/pytest

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) --no-print-directory proto-drift

# Regenerate the committed gRPC code. The generator is pinned low so that its output runs on any newer protobuf.
proto: venv
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --grpc_python_out=proto \
	  --mypy_out=proto --mypy_grpc_out=only_async:proto \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  $(PROTOS)

.PHONY: proto-drift
proto-drift: proto
	git diff --exit-code --stat -- proto/meshrl/v1

bench: venv
	@ls benchmarks/*.py

clean:
	rm -rf $(VENV) .venv-vllm build dist .mypy_cache .ruff_cache .pytest_cache
