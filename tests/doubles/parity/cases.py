"""Reads recorded cases: `index*.json` names the arrays of `golden*.npz` beside it.

A record has name, function, kwargs, inputs and outputs (name to array key), metrics, rtol and atol, and where they
apply masked_by (outputs count at its trained places only), torch_manual_seed, raises, notes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrl.contract.errors import UserError

Array = npt.NDArray[Any]
DATASET = re.compile(r"dataset '(\w+)'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call that was recorded."""

    name: str
    function: str
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    metrics: Mapping[str, float] = field(default_factory=dict)
    rtol: float = 1e-5
    atol: float = 1e-6
    masked_by: str | None = None
    seed: int | None = None
    raises: str | None = None

    @property
    def family(self) -> str:
        """The function that was recorded, without its package."""
        return self.function.removeprefix("verl.")

    def tensor(self, name: str) -> Tensor:
        """An input as a fresh tensor.

        Raises:
            UserError: it was not recorded.
        """
        if name not in self.inputs:
            raise UserError(f"case {self.name} records no input {name!r}")
        return torch.from_numpy(np.array(self.inputs[name]))

    def optional(self, name: str) -> Tensor | None:
        """An input that may be absent."""
        return self.tensor(name) if name in self.inputs else None

    def config(self, name: str = "config") -> dict[str, Any]:
        """A recorded configuration without its class name."""
        fields = dict(self.kwargs.get(name) or {})
        fields.pop("_class", None)
        return fields


def load(directory: Path) -> Iterator[Case]:
    """All cases of a directory, in the order of the index files.

    Raises:
        UserError: the directory holds no cases.
    """
    indexes = sorted(directory.glob("index*.json"))
    if not indexes:
        raise UserError(f"no index*.json in {directory}: wanted recorded cases, as in tests/golden")
    for index in indexes:
        archive = directory / f"golden{index.stem.removeprefix('index')}.npz"
        if not archive.exists():
            raise UserError(f"{index} describes arrays of {archive.name}, which is not beside it")
        records = json.loads(index.read_text())["cases"]
        with np.load(archive, allow_pickle=False) as arrays:
            for record in records:
                yield _case(record, records, arrays)


def _case(record: Mapping[str, Any], records: list[dict[str, Any]], arrays: Any) -> Case:
    keys, kwargs = record["inputs"], record["kwargs"]
    if record.get("raises") and not keys:
        keys, kwargs = _borrowed(record, records, arrays)
    return Case(
        name=record["name"],
        function=record["function"],
        kwargs=kwargs,
        inputs={name: arrays[key] for name, key in keys.items()},
        outputs={name: arrays[key] for name, key in record["outputs"].items()},
        metrics=record.get("metrics", {}),
        rtol=record.get("rtol", 1e-5),
        atol=record.get("atol", 1e-6),
        masked_by=record.get("masked_by"),
        seed=record.get("torch_manual_seed"),
        raises=record.get("raises"),
    )


def _borrowed(
    record: Mapping[str, Any], records: list[dict[str, Any]], arrays: Any
) -> tuple[dict[str, str], dict[str, Any]]:
    """Inputs and settings of a case that raises and names only its data set, from its kin."""
    kin = [r for r in records if r["function"] == record["function"] and r["inputs"]]
    if not kin:
        return {}, record["kwargs"]
    stem, _, last = record["name"].rpartition("/")
    named = DATASET.search(record.get("notes") or "")
    dataset = named[1] if named else last
    keys = {}
    for name, fallback in kin[0]["inputs"].items():
        ending = f"/{dataset}/{name}"
        keys[name] = next((key for key in arrays.files if key.endswith(ending)), fallback)
    alike = [r["kwargs"] for r in kin if r["name"].rpartition("/")[0] == stem]
    return keys, record["kwargs"] or (alike[0] if alike else {})
