"""Loads a staged version into a running SGLang worker: the weight loader `meshrl_sglang.load`.

This file runs inside SGLang's own environment, where meshrl is not installed: it imports torch and safetensors only.
The server is started with `--custom-weight-loader meshrl_sglang.load` and this file's folder on PYTHONPATH. Every
tensor-parallel rank calls it when `/update_weights_from_tensor` names it as `load_format`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Hand every tensor of the version to the model's own loader, which fuses and shards.

    `named_tensors` is one pair: the version's directory, and a tensor without elements. What this raises ends the
    server's scheduler, and the server with it: half a version is never served.
    """
    ((directory, _),) = named_tensors
    model.load_weights(_tensors(Path(directory)))  # type: ignore[operator]


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into the page cache; each rank copies what it keeps."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                yield name, opened.get_tensor(name)
