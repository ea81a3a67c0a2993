"""The base checkpoint of a LoRA adapter: read tensor by tensor, identified by its fingerprint.

Both ends of the weight plane have it on disk. A replica that merges an adapter into another one would serve a policy
that nobody trained, so the fingerprint travels with every adapter and stands in every checkpoint of one.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from meshrl.contract.errors import UserError


class BaseModel:
    """The safetensors of a Hugging Face checkpoint directory, mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        """Read the headers.

        Raises:
            UserError: there are no safetensors in `path`, or they cannot be read.
        """
        self.path = path
        self._file_of: dict[str, Any] = {}
        try:
            for file in _files(path):
                opened: Any = safe_open(file, framework="pt")
                self._file_of |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}: unreadable weights: {error}") from error

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128, hexadecimal, over names, types, shapes and bytes of all tensors, in order of their names.

        How the tensors are shared out over files does not matter. Reads every byte once.
        """
        digest = xxhash.xxh3_128()
        for name in sorted(self._file_of):
            tensor = self.tensor(name)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def names(self) -> frozenset[str]:
        """Of its tensors."""
        return frozenset(self._file_of)

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        """Is there such a tensor?"""
        file = self._file_of.get(name)
        return file is not None and tuple(file.get_slice(name).get_shape()) == shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as it is stored. Raises KeyError."""
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def slice(self, name: str) -> Any:
        """The tensor, of which only what is indexed is read. Raises KeyError."""
        return self._file_of[name].get_slice(name)


def _files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    return [
        path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
    ]
