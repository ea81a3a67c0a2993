"""Loads a staged version into a running SGLang worker: the weight loader `meshrl_sglang.load`.

This file runs inside SGLang's own environment, where meshrl is not installed: it imports torch and its
neighbour `meshrl_staged` only.
The server is started with `--custom-weight-loader meshrl_sglang.load` and this file's folder on PYTHONPATH. Every
tensor-parallel rank calls it when `/update_weights_from_tensor` names it as `load_format`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from meshrl_staged import lend, tensors


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Hand every tensor of the version to the model's own loader, which fuses and shards.

    `named_tensors` is one pair: the version's directory, and a tensor without elements. What this raises ends the
    server's scheduler, and the server with it: half a version is never served.
    """
    ((directory, _),) = named_tensors
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    model.load_weights(tensors(Path(directory), device))  # type: ignore[operator]
    lend(Path(directory), device)
    _forget_pictures()


def _forget_pictures() -> None:
    """Drop what the vision tower made of pictures before the update: SGLang keeps it, by the pixels alone."""
    cache = getattr(sys.modules.get("sglang.srt.managers.mm_schedule"), "embedding_cache", None)
    if cache is not None:
        cache.clear()
