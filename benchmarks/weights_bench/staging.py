"""The cost of each kind of staging for the embedded engine: copies before and at the commit, memory, the pause."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshrl.contract.types import TensorSpec, Uint8, Version, WeightManifest
from meshrl.rollout.engines.torch.architecture import DecoderArchitecture, read_architecture
from meshrl.rollout.engines.torch.staging import Staging, stage

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
LAYER_BYTES, BUCKETS = 23 << 20, 8
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


class CopiedBytes(TorchDispatchMode):
    """Bytes that torch's copies, casts and joins wrote."""

    OPERATIONS = ("copy_", "to", "_to_copy", "clone", "cat", "stack")

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.OPERATIONS and (name != "to" or found is not args[0]):
            self.bytes += found.nbytes
        return found


def figures(total_bytes: int, updates: int) -> dict[Staging, dict[str, float]]:
    """Milliseconds by kind, of a model of about so many bytes, in versions."""
    with tempfile.TemporaryDirectory() as directory:
        layers = max(1, total_bytes // LAYER_BYTES)
        Path(directory, "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": layers}))
        architecture = read_architecture(Path(directory))
    return {kind: _figures(kind, architecture, updates) for kind in ("device", "host")}


def _figures(kind: Staging, architecture: DecoderArchitecture, updates: int) -> dict[str, float]:
    manifest, buckets = _version(architecture)
    live = stage("device", manifest, buckets, architecture, DTYPE, CPU).serve(None, CPU)
    before, at_commit, staging_s, pauses_s = 0, 0, [], []
    for _ in range(updates):
        began = time.perf_counter()
        staged = stage(kind, manifest, buckets, architecture, DTYPE, CPU)
        ready = time.perf_counter()
        live = staged.serve(live, CPU)
        staging_s.append(ready - began)
        pauses_s.append(time.perf_counter() - ready)
    with CopiedBytes() as copied:
        staged = stage(kind, manifest, buckets, architecture, DTYPE, CPU)
        before = copied.bytes
        staged.serve(live, CPU)
        at_commit = copied.bytes - before
    whole = sum(manifest.bucket_bytes)
    return {
        "mib": whole >> 20,
        "versions_on_the_device": 2 if kind == "device" else 1,
        "copied_before_the_commit": round(before / whole, 2),
        "copied_at_the_commit": round(at_commit / whole, 2),
        "staging_ms": round(1000 * statistics.median(staging_s), 1),
        "pause_ms": round(1000 * statistics.median(pauses_s), 3),
    }


def _version(architecture: DecoderArchitecture) -> tuple[WeightManifest, list[Uint8]]:
    shapes = list(architecture.shapes().items())
    total = sum(2 * prod(shape) for _, shape in shapes)
    tensors: list[TensorSpec] = []
    sizes = [0]
    for name, shape in shapes:
        nbytes = 2 * prod(shape)
        if sizes[-1] and sizes[-1] + nbytes > total // BUCKETS:
            sizes.append(0)
        tensors.append(
            TensorSpec(
                name=name,
                dtype="bfloat16",
                shape=shape,
                bucket=len(sizes) - 1,
                offset=sizes[-1],
                nbytes=nbytes,
            )
        )
        sizes[-1] += nbytes
    manifest = WeightManifest(
        run="bench",
        version=Version(1, 1),
        tensors=tuple(tensors),
        bucket_bytes=tuple(sizes),
        bucket_hashes=(),
    )
    return manifest, [np.ones(size, np.uint8) for size in sizes]
