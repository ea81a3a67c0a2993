#!/usr/bin/env bash
# A quarter of an hour with one GPU, in parts: each ends in one line of JSON, and one that fails stops none.
#   bash benchmarks/gpu/day.sh [--rehearse] [--parts a,b] [--list]
# Parts take some 20 to 150 seconds; a machine's time and the 64 MiB that reach it at a time decide which go together, in
# this order of value:
#   install,machine,mesh_nccl        with .gpu/mesh-kit: the mesh's packages, and its first steps
#   install_vllm,vllm                with .gpu/vllm-kit.tar.xz: a stock server, versions over NCCL while it samples
#   mesh_vllm                        trainer, NCCL, vLLM
#   mesh_shm,mesh_cuda_ipc           the other carriers of one machine; the second on policy, whose mismatch is the arithmetic's
#   mfu,engine,nccl,fp8,marked       rates, the channel alone, the tests marked `gpu`
#   parity,kernels,matrix,ranks,unit what the first day measured
# `make gpu-kit` makes the kits. DAY is the folder of what is installed (build/gpu-day), OUT that of the logs (DAY/out), and
# PYTHON the interpreter where nothing has to be installed (.venv/bin/python). --rehearse: tiny shapes on a CPU or on
# `stand_in/`; seconds and values mean nothing.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
day=$(realpath -m "${DAY:-build/gpu-day}") rehearse='' wanted=''
out=${OUT:-$day/out} base=${BASE_PYTHON:-python3}
all='install machine mesh_nccl install_vllm vllm mesh_vllm mesh_shm mesh_cuda_ipc mfu engine nccl fp8 marked parity kernels matrix ranks unit'
while [ $# -gt 0 ]; do
  case $1 in
    --rehearse) rehearse=1 ;;
    --parts) wanted=${2:-}; shift ;;
    --list) echo "$all"; exit 0 ;;
    *) echo "error: $1: want --rehearse, --parts a,b or --list" >&2; exit 2 ;;
  esac
  shift
done
wanted=${wanted:-${all// /,}}
for name in ${wanted//,/ }; do
  case " $all " in *" $name "*) ;; *) echo "error: --parts: no part $name (there are $all)" >&2; exit 2 ;; esac
done
mkdir -p "$day" "$out"
export VLLM_CACHE_ROOT=$day/caches/vllm TRITON_CACHE_DIR=$day/caches/triton HF_HUB_OFFLINE=1
[ -n "$rehearse" ] && export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1

# part NAME SECONDS COMMAND...: the objects that it printed, or else its last line, are the result.
part() {
  local name=$1 limit=$2 began=$SECONDS code python=${PYTHON:-.venv/bin/python}
  shift 2
  case ",$wanted," in *",$name,"*) ;; *) return ;; esac
  [ -x "$day/venv/bin/python" ] && python=$day/venv/bin/python
  [ -n "$rehearse" ] && limit=$((3 * limit)) # other work on a CPU is no failure
  # The kit's NCCL, in every process: torch and cupy then have one, which permits two ranks on a GPU.
  local preload=${LD_PRELOAD:-}
  [ -z "$rehearse" ] && [ -f "$day/libnccl.so.2" ] && preload=$day/libnccl.so.2
  LD_PRELOAD=$preload python=$python timeout -k 10 "$limit" bash -c "$*" > "$out/$name.log" 2>&1
  code=$?
  "$python" - "$name" "$code" "$((SECONDS - began))" "$out/$name.log" <<'PYTHON'
import json, sys
from pathlib import Path
name, code, seconds, log = sys.argv[1:]
lines = [line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
found = []
for line in lines:
    try:
        value = json.loads(line)
    except ValueError:
        continue
    if isinstance(value, dict) and (line == lines[-1] or "benchmark" in value):
        found.append(value)
result = found[0] if len(found) == 1 else found or "".join(lines[-1:])[-300:]
print(json.dumps({"part": name, "ok": code == "0", "code": int(code), "seconds": int(seconds), "result": result}), flush=True)
PYTHON
}

# environment FOLDER [LINE]: an environment that has the machine's packages behind those of the folder in LINE.
environment() {
  "$base" -m venv --without-pip "$1"
  local site
  site=$(echo "$1"/lib/python3*/site-packages)
  "$base" -c 'import site; print("\n".join(site.getsitepackages()))' > "$site/z_base.pth"
  echo "${2:-}" > "$site/a_first.pth"
  if [ -n "${STAND_IN_PYTHON:-}" ]; then
    printf '%s\n' "$STAND_IN_PYTHON" 'import stand_in_torch' > "$site/stand_in.pth"
  fi
}

# unpack FILE FOLDER: by Python, as a machine may lack xz.
unpack() { "$base" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' "$1" "$2"; }

install() {
  local pip="$base -m pip --python $day/venv/bin/python install -q --no-index --no-deps --disable-pip-version-check --no-compile"
  environment "$day/venv" || return
  $pip --ignore-installed .gpu/mesh-kit/wheels/*.whl && $pip --no-build-isolation -e . || return
  unpack .gpu/mesh-kit/nccl.tar.xz "$day" && unpack .gpu/mesh-kit/assets.tar.xz .
}

install_vllm() {
  unpack .gpu/vllm-kit.tar.xz "$day" && environment "$day/vllm-venv" "$day/vllm-site"
}
export -f environment install install_vllm unpack
export base day

short=${rehearse:+--rehearse}
vllm="$day/vllm-venv/bin/python"
vllm_day="\$python benchmarks/gpu/vllm_day.py $vllm"
mfu="\$python benchmarks/gpu/trainer_mfu.py"
mesh="env -u OMP_NUM_THREADS \$python benchmarks/gpu/mesh.py $short"
[ -n "$rehearse" ] && vllm_day="$vllm_day --library stub --no-check --shape tiny --slots 8 --tokens 8 --cache 256"
[ -n "$rehearse" ] && mfu="$mfu $([ -n "${FAKE_GPU_GIB:-}" ] || echo --device cpu) --shape tiny --steps 3 --packs 2"
tests='$python -m pytest -q -p no:cacheprovider'
part install 60 install
part machine 60 "\$python benchmarks/gpu/machine.py"
part mesh_nccl 150 "$mesh nccl --steps 12"
part install_vllm 60 install_vllm
part vllm 200 "$vllm_day --steps 4"
part mesh_vllm 150 "$mesh nccl --steps 12 --vllm $vllm"
part mesh_shm 120 "$mesh shm --steps 12"
part mesh_cuda_ipc 120 "$mesh cuda_ipc --steps 6 --on-policy"
if [ -n "$rehearse" ]; then
  part mfu 120 "$mfu --pack 128"
  part nccl 120 "\$python benchmarks/gpu/nccl_channels.py --library stub --mib 1 --rounds 1 --deadline 3"
  part matrix 120 "$mfu --pack 128 --no-checkpointing --chunk 20"
  pack=128
else
  part mfu 150 "$mfu --pack 65536 --keep-matmuls --compile --packs 1 --steps 5; $mfu --pack 16384 --no-checkpointing --compile --packs 2 --steps 5"
  part nccl 60 "\$python benchmarks/gpu/nccl_channels.py --buckets 5 --rounds 3 --deadline 2"
  part matrix 420 "for c in 25 28; do for n in '' --no-checkpointing; do for t in '' --compile; do
    $mfu --pack 16384 --chunk \$c \$n \$t || true; done; done; done; $mfu --pack 16384 --shape qwen3-4b --packs 2"
  part marked 60 "$tests -m gpu tests/integration/test_nccl_gpu.py tests/chaos/test_weights_cuda_ipc.py tests/unit/trainer tests/unit/rollout"
  pack=8192
fi
part engine 60 "\$python benchmarks/gpu/engine_rate.py --graphs $short"
part fp8 100 "$vllm_day --steps 0 --fp8"
part parity 120 "\$python benchmarks/gpu/parity.py"
part kernels 120 "\$python benchmarks/gpu/kernel_times.py"
# One rank, then two that share the first GPU: the same norm of the gradient.
shared="$mfu --pack $pack --steps 3 --packs 2"
part ranks 180 "$shared || exit; export WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517
  export NCCL_MULTI_RANK_GPU_ENABLE=1; RANK=1 $shared & RANK=0 $shared; wait \$!"
part unit 240 "$tests tests/unit/trainer/test_logprob.py"
