#!/usr/bin/env bash
# A GPU's first hour: every part in under 30 minutes together, each ending in one line of JSON; one that fails stops none.
#   bash benchmarks/gpu/day.sh [--rehearse] [--parts a,b] [--list]
# --rehearse runs the same parts on a CPU, with tiny shapes and stand-ins for NCCL and CUDA IPC: their seconds mean
# nothing. PYTHON is the interpreter (.venv/bin/python), OUT the folder of the logs (build/gpu-day).
# Run in pieces on an H200 on 2026-11-26, but for the meshes, which did not come to their first step in time.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
python=${PYTHON:-.venv/bin/python} out=${OUT:-build/gpu-day} rehearse='' wanted=''
all='machine unit marked parity kernels mfu matrix nccl mesh_shm mesh_cuda_ipc mesh_nccl ranks engine'
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
mkdir -p "$out"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
# The kit's NCCL, in every process: torch and cupy then have one.
[ -z "$rehearse" ] && [ -f ../libnccl.so.2 ] && export LD_PRELOAD=$PWD/../libnccl.so.2
[ -n "$rehearse" ] && export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=

# part NAME SECONDS COMMAND...: the objects that it printed, or else its last line, are the result.
part() {
  local name=$1 limit=$2 began=$SECONDS code
  shift 2
  case ",$wanted," in *",$name,"*) ;; *) return ;; esac
  [ -n "$rehearse" ] && limit=$((3 * limit)) # other work on a CPU is no failure
  timeout -k 10 "$limit" "$@" > "$out/$name.log" 2>&1
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
print(json.dumps({"part": name, "ok": code == "0", "code": int(code), "seconds": int(seconds), "result": result}))
PYTHON
}

device=${rehearse:+--device cpu --shape tiny --steps 3 --packs 2}
tests="$python -m pytest -q -x -p no:cacheprovider"
mfu="$python benchmarks/gpu/trainer_mfu.py $device"
part machine 60 $python benchmarks/gpu/machine.py
units='tests/unit/trainer/test_logprob.py tests/unit/trainer/test_model_options.py'
[ -n "$rehearse" ] && units='tests/unit/trainer/test_logprob.py'
part unit 240 $tests $units
[ -n "$rehearse" ] || part marked 240 $python -m pytest -q -p no:cacheprovider -m gpu \
  tests/unit/trainer tests/unit/rollout tests/chaos/test_weights_cuda_ipc.py tests/integration/test_nccl_gpu.py
part parity 120 $python benchmarks/gpu/parity.py
part kernels 120 $python benchmarks/gpu/kernels.py
if [ -n "$rehearse" ]; then
  part mfu 120 $mfu --pack 128
  part matrix 120 $mfu --pack 128 --no-checkpointing --chunk 20
  part nccl 120 $python benchmarks/gpu/nccl_channels.py --library stub --mib 1 --rounds 1 --deadline 3
else
  part mfu 300 bash -c "$mfu --pack 16384 && $mfu --pack 16384 --rows 8 && $mfu --pack 65536"
  part matrix 420 bash -c "for c in 25 28; do for n in '' --no-checkpointing; do for t in '' --compile; do
    $mfu --pack 16384 --chunk \$c \$n \$t || true; done; done; done; $mfu --pack 16384 --shape qwen3-4b --packs 2"
  part nccl 120 $python benchmarks/gpu/nccl_channels.py
fi
limit=150
[ -n "$rehearse" ] && limit=200  # three times that: a CPU warms the demo's model up first
for carrier in shm cuda_ipc nccl; do
  # Without the variable, which would have numpy start threads: services are forked from one that has torch imported.
  part mesh_$carrier $limit env -u OMP_NUM_THREADS $python benchmarks/gpu/mesh.py $carrier ${rehearse:+--rehearse}
done
pack=8192
[ -n "$rehearse" ] && pack=128
# One rank, then two that share the first GPU: the same norm of the gradient.
shared="$mfu --pack $pack --steps 3 --packs 2"
part ranks 180 bash -c "$shared || exit; export WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517
  export NCCL_MULTI_RANK_GPU_ENABLE=1; RANK=1 $shared & RANK=0 $shared; wait \$!"
part engine 180 $python benchmarks/gpu/engine_rate.py ${rehearse:+--rehearse}
