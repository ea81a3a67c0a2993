#!/usr/bin/env bash
# What a GPU machine without a network needs beside its own torch, CUDA and transformers, in one file of at most 64 MB:
#   make gpu-kit [NCCL_SOURCE=/path/to/nccl | NCCL_LIBRARY=/path/to/libnccl.so.2]     then, there:
#   tar xf gpu-kit.tar && bash gpu-kit/install.sh && cd gpu-kit/meshrl && PYTHON=../venv/bin/python bash benchmarks/gpu/day.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} out=${1:-build} version=${KIT_PYTHON:-3.12}
kit=$out/gpu-kit
rm -rf "$kit" && mkdir -p "$kit/meshrl" "$kit/wheels"
git archive HEAD | tar x -C "$kit/meshrl" --exclude docs/images
# meshrl's own requirements and those of its tests, with all that they require, but for what a machine with torch has.
# As .ci/requirements.lock has them, so that the kit runs what CI ran; hatchling builds the package itself.
"$python" - hatchling pathspec trove-classifiers > "$kit/names" <<'PYTHON'
import importlib.metadata, sys
from packaging.requirements import Requirement
roots = ["meshrl", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"]
found, known = [], {"numpy", "meshrl"}
while roots:
    name = roots.pop()
    if name not in known:
        found.append(name)
    known.add(name)
    for text in importlib.metadata.requires(name) or []:
        need = Requirement(text)
        wanted = need.marker is None or need.marker.evaluate({"extra": ""})
        if wanted and (other := need.name.lower().replace("_", "-")) not in known:
            roots.append(other)
print("\n".join(found + sys.argv[1:]))
PYTHON
while read -r name; do
  grep -ihoE "^$name==[^ ;\\]+" .ci/requirements.lock .ci/lock-build.txt | head -1 || echo "$name"
done < "$kit/names" | sort -u > "$kit/requirements.txt"
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: --dest "$kit/wheels" \
  --python-version "$version" --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
  -r "$kit/requirements.txt"
if [ -n "${NCCL_SOURCE:-}" ]; then
  tar cJf "$kit/nccl.tar.xz" --exclude .git -C "$(dirname "$NCCL_SOURCE")" "$(basename "$NCCL_SOURCE")" --transform 's,^[^/]*,nccl,'
elif [ -n "${NCCL_LIBRARY:-}" ]; then
  cp -L "$NCCL_LIBRARY" "$kit/libnccl.so.2"
else
  echo "without NCCL (NCCL_SOURCE or NCCL_LIBRARY): where the machine's NCCL is older than 2.30, two ranks cannot share a GPU"
fi
cp benchmarks/gpu/install.sh "$kit/"
tar cf "$out/gpu-kit.tar" -C "$out" gpu-kit
bytes=$(stat -c %s "$out/gpu-kit.tar")
echo "$out/gpu-kit.tar: $((bytes >> 20)) MiB, $(ls "$kit/wheels" | wc -l) wheels for Python $version"
[ "$bytes" -le $((64 << 20)) ] || { echo "error: more than 64 MiB"; exit 1; }
