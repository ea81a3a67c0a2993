#!/usr/bin/env bash
# A quarter of an hour with one GPU, in parts on one machine; each command prints lines of JSON, and one that fails stops none.
#
#   bash benchmarks/gpu/day.sh PART [--rehearse]
#
#   PART       needs in .gpu/ (made by kit.py)             seconds at most
#   meshes     mesh-kit/                                   230   the demo's mesh over nccl, shm, cuda_ipc; the channel alone
#   vllm       vllm-kit.tar.xz [caches.tar.xz]             230   a vLLM server: rate, log-probs, versions over nccl
#   vllm_mesh                                              130   the demo's mesh with vLLM, weights over nccl
#   fp8                                                     80   the server in FP8: rate, log-probs
#   engine                                                  60   the embedded engine's rate, for comparison
#   trainer                                                200   MFU at 65,536 and 16,384 tokens; the tests marked `gpu`
#
# The first two install what later parts use, in the folder DAY (/tmp/day). OUT is the folder of the logs.
# --rehearse: tiny shapes and a stand-in for NCCL, for `stand_in/`: seconds and values mean nothing.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
day=${DAY:-/tmp/day} out=${OUT:-/tmp/day/out}
name=${1:?want a part: meshes, vllm, vllm_mesh, fp8, engine or trainer} rehearse=${2:+1}
mkdir -p "$day" "$out"
python=$day/venv/bin/python vllm_python=$day/vllm-venv/bin/python base=${BASE_PYTHON:-python3}
export VLLM_CACHE_ROOT=$day/caches/vllm TRITON_CACHE_DIR=$day/caches/triton HF_HUB_OFFLINE=1 TORCHINDUCTOR_COMPILE_THREADS=4
one_nccl() { # torch and cupy must share one NCCL: 2.30, which permits two ranks on a GPU
  [ -f "$day/libnccl.so.2" ] && [ -z "$rehearse" ] && export LD_PRELOAD=$day/libnccl.so.2
}
one_nccl

# part NAME SECONDS COMMAND...: the lines of JSON that it prints; where it fails, the end of the rest.
part() {
  local name=$1 limit=$2 began=$SECONDS code
  shift 2
  [ -z "$rehearse" ] || limit=$((3 * limit)) # other work on a CPU is no failure
  timeout -k 5 "$limit" "$@" > "$out/$name.log" 2>&1
  code=$?
  echo "{\"part\": \"$name\", \"code\": $code, \"seconds\": $((SECONDS - began))}"
  grep '^{' "$out/$name.log" | tail -20 || true
  [ $code = 0 ] || grep -v '^{' "$out/$name.log" | tail -25 | cut -c1-300
}

# environment FOLDER LINE...: an environment that sees the machine's packages behind those in LINE.
environment() {
  local folder=$1 site
  shift
  "$base" -m venv --without-pip "$folder"
  site=$(echo "$folder"/lib/python3*/site-packages)
  "$base" -c 'import site; print("\n".join(site.getsitepackages()))' > "$site/z_base.pth"
  printf '%s\n' "$@" > "$site/a_first.pth"
}

install() {
  environment "$day/venv"
  local pip="$base -m pip --python $python install -q --no-index --no-deps --disable-pip-version-check --no-compile"
  $pip --ignore-installed .gpu/mesh-kit/wheels/*.whl && $pip --no-build-isolation -e . || return
  # Not by xz and tar, which a machine may lack.
  "$base" -c 'import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' \
    .gpu/mesh-kit/libnccl.so.2.xz "$day/libnccl.so.2" || return
  unpack .gpu/mesh-kit/assets.tar.xz .
}

unpack() { "$base" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' "$1" "$2"; }

install_vllm() {
  mkdir -p "$day/caches"
  unpack .gpu/vllm-kit.tar.xz "$day" || return
  [ ! -f .gpu/caches.tar.xz ] || unpack .gpu/caches.tar.xz "$day/caches"
  environment "$day/vllm-venv" "$day/vllm-site"
}

# mesh NAME CARRIER SECONDS OPTION...: a run of the demo.
mesh() {
  # Without the variable, which would have numpy start threads: services are forked from one that has torch imported.
  part "$1" "$3" env -u OMP_NUM_THREADS "$python" benchmarks/gpu/mesh.py "$2" $short "${@:4}"
}

vllm_day=("$python" benchmarks/gpu/vllm_day.py "$vllm_python")
mfu=("$python" benchmarks/gpu/trainer_mfu.py)
short=
if [ -n "$rehearse" ]; then
  vllm_day+=(--library stub --no-check --shape tiny --slots 8 --tokens 8 --cache 256)
  mfu+=(--shape tiny)
  short=--rehearse
  export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
fi

case $name in
  meshes)
    [ -n "$rehearse" ] || nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    SECONDS=0; install > "$out/install.log" 2>&1
    echo "{\"part\": \"installed\", \"code\": $?, \"seconds\": $SECONDS}"
    one_nccl
    part machine 40 "$python" benchmarks/gpu/machine.py
    mesh mesh_nccl nccl 100 --steps 12
    mesh mesh_shm shm 60 --steps 12
    mesh mesh_cuda_ipc cuda_ipc 50 --steps 6 --on-policy
    part nccl 60 "$python" benchmarks/gpu/nccl_channels.py --buckets 5 --rounds 3 --deadline 2 ${short:+--library stub --mib 1}
    ;;
  vllm)
    [ -d "$day/vllm-venv" ] || install_vllm > "$out/install_vllm.log" 2>&1
    echo "{\"part\": \"installed\", \"code\": $?, \"seconds\": $SECONDS}"
    part vllm_nccl 200 "${vllm_day[@]}" --steps 4 --slots ${SLOTS:-64,256}
    # Only where the carrier failed: the server alone, by files in /dev/shm.
    ;;
  vllm_mesh) mesh mesh_vllm nccl 130 --steps 12 --vllm "$vllm_python" ;;
  fp8) part vllm_fp8 80 "${vllm_day[@]}" --steps 0 --fp8 ;;
  engine) part engine 60 "$python" benchmarks/gpu/engine_rate.py --graphs $short ;;
  trainer)
    part mfu_65536 90 "${mfu[@]}" --pack 65536 --keep-matmuls --compile --packs 1 --steps 5
    part mfu_16384 60 "${mfu[@]}" --pack 16384 --no-checkpointing --compile --packs 2 --steps 5
    part tests 60 "$python" -m pytest -q -p no:cacheprovider -m gpu tests/integration/test_nccl_gpu.py \
      tests/chaos/test_weights_cuda_ipc.py tests/unit/trainer tests/unit/rollout
    ;;
  *) echo "error: no part $name" >&2; exit 2 ;;
esac
# One file: few come back. What was measured is printed above.
logs() { find "$out" -name '*.log'; find runs -path 'runs/gpu-*' \( -name '*.log' -o -name '*.jsonl' -o -name '*.json' \) 2>/dev/null; }
logs | "$base" -c 'import sys, tarfile; tar = tarfile.open(sys.argv[1], "w:gz"); [tar.add(line.strip()) for line in sys.stdin]; tar.close()' \
  "$out/$name.tar.gz"
