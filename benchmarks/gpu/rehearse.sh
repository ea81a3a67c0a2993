#!/usr/bin/env bash
# The GPU day's parts (day.sh) by the GPU's paths on a machine without a GPU: tiny shapes, on the stand-in (stand_in/build.py).
#
#   make gpu-rehearsal [PARTS=install,machine,mesh_nccl] [PYTHON312=/path/to/python3.12]
#
# The environment is the GPU machine's: Python 3.12, torch 2.11.0 for CUDA 13 and what lies beside it there. It is made once, in
# build/gpu-rehearsal/base (6 GB), or BASE_PYTHON names one. The kit of the mesh is made where it is missing; without vLLM's, which
# takes a quarter of an hour (`make gpu-kit`), its parts are left out. Prints day.sh's line of JSON for each part, and a last one:
# the parts that failed, and the kernels that were launched without code for sm_90. Ends with 1 if there are any.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
work=$PWD/build/gpu-rehearsal
export DAY=$work/day OUT=$work/out
mkdir -p "$OUT"

# A name that exists may still start nothing, as pyenv's do.
python312() {
  local found
  for found in ${PYTHON312:-python3.12 $HOME/.pyenv/versions/3.12*/bin/python3.12}; do
    "$found" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$found" && return
  done
  echo "error: no Python 3.12 here, which the GPU machine has: want PYTHON312=/path/to/python3.12" >&2
  return 1
}

make_base() {
  local python
  [ ! -f "$work/base/.ready" ] || return 0
  python=$(python312) || return
  echo "making an environment like the GPU machine's in $work/base (6 GB)" >&2
  rm -rf "$work/base"
  "$python" -m venv "$work/base" && "$work/base/bin/pip" install --quiet --no-compile --disable-pip-version-check \
    torch==2.11.0 torchvision==0.26.0 transformers==5.17.0 numpy==2.5.2 cupy-cuda13x==14.2.0 grpcio protobuf peft pyarrow \
    aiohttp cloudpickle einops hypothesis msgpack nvidia-ml-py opencv-python-headless prometheus_client psutil py-cpuinfo \
    pytest pytest-timeout pytest-xdist scipy sentencepiece tiktoken uvloop xxhash && touch "$work/base/.ready"
}

if [ -z "${BASE_PYTHON:-}" ]; then
  make_base || exit 2
  BASE_PYTHON=$work/base/bin/python
fi
export BASE_PYTHON
site=$("$BASE_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || exit 2
"$BASE_PYTHON" benchmarks/gpu/stand_in/build.py "$site" "$work/stand_in" >/dev/null || exit 2
[ -f .gpu/mesh-kit/nccl.tar.xz ] || .venv/bin/python benchmarks/gpu/kit.py mesh >&2 || exit 2
parts=install,machine,mesh_nccl,mesh_shm,mesh_cuda_ipc,mfu,engine,nccl
if [ -f .gpu/vllm-kit.tar.xz ]; then
  parts=$parts,install_vllm,vllm,mesh_vllm
else
  echo "vLLM's parts are left out: .gpu/vllm-kit.tar.xz is missing (make gpu-kit)" >&2
fi
parts=${1:-$parts}

# Each block of memory that processes may share is an open file.
ulimit -n "$(ulimit -Hn)"
export FAKE_GPU_GIB=${FAKE_GPU_GIB:-16} FAKE_GPU_SHARE=1 FAKE_GPU_REPORT=$OUT/report
rm -f "$FAKE_GPU_REPORT"
# In a shell of its own: this one needs no GPU.
bash -c 'source "$1" && exec bash benchmarks/gpu/day.sh --rehearse --parts "$2"' - "$work/stand_in/env.sh" "$parts" |
  tee "$OUT/parts.jsonl"
"$BASE_PYTHON" - "$parts" "$OUT/parts.jsonl" "$FAKE_GPU_REPORT" <<'PYTHON'
import json, sys
from pathlib import Path

wanted, found, report = sys.argv[1].split(","), Path(sys.argv[2]), Path(sys.argv[3])
ended = {part["part"]: part["ok"] for part in map(json.loads, found.read_text().splitlines())}
failed = [name for name in wanted if not ended.get(name)]
said = report.read_text().splitlines() if report.exists() else []
no_code = sorted({line.split(": ", 2)[2] for line in said if "NO CODE" in line})
code = int(bool(failed or no_code))
print(json.dumps({"part": "rehearsal", "ok": not code, "failed": failed, "no_code": no_code}))
sys.exit(code)
PYTHON
