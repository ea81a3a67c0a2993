"""Reads what a checkpoint directory says of its model, and writes a version as a safetensors file. Without torch.

A safetensors file is eight bytes of header length, a JSON header and the tensors' bytes: the buckets of a version are
written unchanged, without building a tensor.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshrl.common.chunk_digest import digest
from meshrl.contract.errors import UserError
from meshrl.contract.types import Uint8, WeightManifest
from meshrl.images import ImageProcessor, reads_images, shared_processor
from meshrl.rollout.end_tokens import eos_token_ids

SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
"""The second is the end of a name."""
TOWER = ("visual.", "model.visual.", "model.vision_model.")
"""How names of a vision tower begin: of one that is not trained, a version has no weights."""
HEADER_BYTES = 100_000_000
"""The longest header that the safetensors library reads."""
ADAPTER_FILE = "adapter_config.json"
"""A directory with this file has an adapter, not whole weights."""
DIGESTS = "meshrl.digests"
"""In a staged file's metadata: JSON, from a tensor's name to its digest."""
FURTHER = re.compile(r"(model\.)?(mtp\.|(language_model\.)?layers\.(?P<layer>\d+)\.)")
"""How names begin of layers that predict further tokens, which transformers does not load: they are `mtp`, or come
after the last of the decoder's layers."""
NAMES_SHOWN = 4
"""Names listed in an error before it says how many more there are."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """Properties of a model directory that engines use."""

    path: Path
    num_bytes: int
    """Size of the weights."""
    shapes: Shapes
    """Hugging Face parameter name to shape."""
    tied: bool
    """The output projection is the embedding matrix."""
    vocab_size: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    experts: tuple[int, int] = (0, 0)
    """Decoder layers, and experts that a token goes to: 0 of a dense model."""
    images: ImageProcessor | None = None
    """Processor of the prompts' pictures; None: the model reads text only."""


Checkpoint = CheckpointFacts
"""Its name until 0.3, for engines of your own."""


def read_checkpoint(path: Path) -> CheckpointFacts:
    """Read `config.json`, what ends a response, and the headers of the weights.

    Raises:
        UserError: one of them is missing or unreadable.
    """
    config = _json(path / "config.json")
    text = config.get("text_config") or config  # multimodal models keep the decoder's part there
    layers = int(text.get("num_hidden_layers") or 0)
    try:
        return CheckpointFacts(
            path=path,
            num_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
            shapes={n: shape for n, shape in _shapes(path).items() if not _further(n, layers)},
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            vocab_size=int(text["vocab_size"]),
            max_length=int(text["max_position_embeddings"]),
            eos_token_ids=eos_token_ids(path),
            experts=(layers, int(text.get("num_experts_per_tok") or 0)),
            images=shared_processor(path) if reads_images(path) else None,
        )
    except KeyError as error:
        raise UserError(f"{path / 'config.json'} has no {error.args[0]!r}") from error


def check_version(
    manifest: WeightManifest, buckets: Sequence[Sized], checkpoint: CheckpointFacts
) -> None:
    """Compare a version with the model: names, shapes, layout; of the buckets only how long they are.

    Raises:
        UserError: naming what is missing, unknown, misshapen or outside its bucket.
    """
    where = f"weights {manifest.version} of {manifest.run!r}"
    sizes = tuple(len(bucket) for bucket in buckets)
    if sizes != manifest.bucket_bytes:
        raise UserError(f"{where}: buckets have {sizes} bytes, want {manifest.bucket_bytes}")
    for spec in manifest.tensors:
        if spec.dtype not in SAFETENSORS_DTYPE:
            known = ", ".join(SAFETENSORS_DTYPE)
            raise UserError(f"{where}: {spec.name} is {spec.dtype}, want one of {known}")
        if spec.bucket >= len(sizes) or spec.offset + spec.nbytes > sizes[spec.bucket]:
            raise UserError(f"{where}: {spec.name} ends outside bucket {spec.bucket}")
    expected = dict(checkpoint.shapes)
    actual = {spec.name: spec.shape for spec in manifest.tensors}
    if checkpoint.tied:  # either side may or may not name the projection
        expected.pop(HEAD, None)
        embeddings = [shape for name, shape in expected.items() if name.endswith(EMBEDDING)]
        if actual.get(HEAD) in embeddings:
            actual.pop(HEAD, None)
    if not any(name.startswith(TOWER) for name in actual):
        expected = {name: shape for name, shape in expected.items() if not name.startswith(TOWER)}
    wrong = [
        f"{name} is {list(actual[name])}, want {list(shape)}"
        for name, shape in expected.items()
        if name in actual and tuple(actual[name]) != shape
    ]
    differences = [
        _listed("missing", sorted(expected.keys() - actual.keys())),
        _listed("unknown", sorted(actual.keys() - expected.keys())),
        _listed("misshapen", wrong),
    ]
    message = "; ".join(difference for difference in differences if difference)
    if message:
        raise UserError(f"{where} do not fit {checkpoint.path}: {message}")


def check_adapter(
    manifest: WeightManifest, buckets: Sequence[Uint8], checkpoint: CheckpointFacts, most_rank: int
) -> None:
    """Compare an adapter with the model that it is for.

    Raises:
        UserError: it is no adapter, its rank is above `most_rank`, or a module is not the model's.
    """
    where, adapter = f"weights {manifest.version} of {manifest.run!r}", manifest.adapter
    if adapter is None:
        raise UserError(
            f"{where} are whole weights, and rollout.engine.max_lora_rank wants adapters: set model.lora_rank,"
            " or leave max_lora_rank out"
        )
    if adapter.rank > most_rank:
        raise UserError(
            f"{where}: an adapter of rank {adapter.rank}, rollout.engine.max_lora_rank is {most_rank}"
        )
    expected = {}
    for module in adapter.targets:
        rows, columns = checkpoint.shapes.get(f"{module}.weight", (0, 0))
        expected[f"{module}.lora_A.weight"] = (adapter.rank, columns)
        expected[f"{module}.lora_B.weight"] = (rows, adapter.rank)
    wrong = [spec.name for spec in manifest.tensors if expected.get(spec.name) != spec.shape]
    sizes = tuple(len(bucket) for bucket in buckets)
    if wrong or len(expected) != len(manifest.tensors) or sizes != manifest.bucket_bytes:
        raise UserError(
            f"{where} do not fit {checkpoint.path}: {_listed('misshapen', wrong) or 'layout'}"
        )


def write_adapter(directory: Path, manifest: WeightManifest, buckets: Sequence[Uint8]) -> None:
    """Write a checked adapter to `directory` as peft does."""
    adapter = manifest.adapter
    assert adapter is not None
    named = [replace(spec, name=f"base_model.model.{spec.name}") for spec in manifest.tensors]
    held = replace(manifest, tensors=tuple(named))
    write_version(directory, held, buckets, tied=False, name="adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.targets}),
        "bias": "none",
    }
    (directory / ADAPTER_FILE).write_text(json.dumps(settings))


def write_version(
    directory: Path,
    manifest: WeightManifest,
    buckets: Sequence[Uint8],
    *,
    tied: bool,
    name: str = "model.safetensors",
) -> None:
    """Write a checked version to `directory` as file `name`; a tied projection is left out.

    The file's metadata holds a digest of each tensor, for its reader.
    """
    tensors = [spec for spec in manifest.tensors if not (tied and spec.name == HEAD)]
    digests = {
        spec.name: digest(buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes])
        for spec in tensors
    }
    metadata = {"format": "pt", DIGESTS: json.dumps(digests)}
    header: dict[str, dict[str, Any]] = {"__metadata__": metadata}
    end = 0
    for spec in tensors:
        start, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": SAFETENSORS_DTYPE[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for spec in tensors:
            file.write(buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes].data)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read a safetensors header: the entry of each tensor by name, and the offset of the tensors' bytes.

    Raises:
        OSError, ValueError: it cannot be read, or has no such header.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        most = min(HEADER_BYTES, file.stat().st_size - 8)
        if not 0 < length <= most:
            raise ValueError(f"a header of {length} bytes, where {most} is the most")
        try:
            header = json.loads(opened.read(length))
        except RecursionError as error:
            raise ValueError("a header that is nested too deeply") from error
    if not isinstance(header, dict):
        raise ValueError("a header that is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length


def _shapes(path: Path) -> Shapes:
    index = path / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.is_file() else []
    shapes: dict[str, tuple[int, ...]] = {}
    for file in names or ["model.safetensors"]:
        try:
            header, _ = read_header(path / file)
            shapes |= {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path / file}: unreadable weights: {error}") from error
    # Old Llama checkpoints store the rotary frequencies, which follow from config.json.
    return {name: shape for name, shape in shapes.items() if not name.endswith(".inv_freq")}


def _further(name: str, layers: int) -> bool:
    found = FURTHER.match(name)
    return found is not None and (found["layer"] is None or int(found["layer"]) >= layers > 0)


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    return content


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = len(names) - NAMES_SHOWN
    shown = ", ".join(names[:NAMES_SHOWN])
    return f"{what} {shown}" + (f" and {more} more" if more > 0 else "")


TORCH_DTYPE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """One tensor and its byte range in the file."""

    name: str
    dtype: str
    """The safetensors name, such as BF16."""
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor."""
        return self.end - self.start


def read_tensor_ranges(file: Path) -> list[TensorRange]:
    """The tensors of a safetensors file, in its order."""
    header, base = read_header(file)
    return sorted(
        (
            TensorRange(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                start=base + entry["data_offsets"][0],
                end=base + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        ),
        key=lambda tensor: tensor.start,
    )


def aligned(tensors: Sequence[TensorRange]) -> tuple[TensorRange, ...]:
    """The widest items first: back to back, each tensor then begins at a multiple of its own item's size."""
    return tuple(sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype]))
