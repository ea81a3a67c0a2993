#!/usr/bin/env bash
# On the GPU machine: an environment that sees the machine's own torch, with what the kit brings. Needs no network.
set -euo pipefail
cd "$(dirname "$0")"
base=${BASE_PYTHON:-python3}
"$base" -m venv --without-pip venv
# What the base has, also where it is an environment itself, whose packages `--system-site-packages` would not show.
"$base" -c 'import site, sys; print("\n".join(site.getsitepackages()), file=open(sys.argv[1], "w"))' \
  "$(echo venv/lib/python3*/site-packages)/base.pth"
pip="$base -m pip --python venv/bin/python install -q --no-index --no-deps --disable-pip-version-check"
$pip --ignore-installed wheels/*.whl
$pip --no-build-isolation -e meshrl
if [ -f nccl.tar.xz ]; then
  tar xf nccl.tar.xz
  # The kernels that the carrier and two FSDP ranks use: 10 files instead of 129.
  make -C nccl -j"$(nproc)" src.build NVCC_GENCODE="${NVCC_GENCODE:--gencode=arch=compute_90,code=sm_90}" \
    ONLY_FUNCS="AllGather * *|Broadcast * *|SendRecv|AllReduce Sum f32 * *|AllReduce PreMulSum f32 * *|ReduceScatter Sum f32 * *|ReduceScatter PreMulSum f32 * *" \
    > nccl-build.log 2>&1 && cp -L nccl/build/lib/libnccl.so.2 . || echo "NCCL was not built (nccl-build.log): the machine's own is used"
fi
venv/bin/python -c "import torch, meshrl.launcher; print('torch', torch.__version__, 'CUDA', torch.version.cuda, torch.cuda.device_count(), 'GPUs')"
