"""Pictures on their way to an engine."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
import pytest

from meshrl.contract import codec
from meshrl.contract.errors import UserError
from meshrl.contract.types import GenerateRequest, Media, SamplingParams, TensorSpec, Version
from meshrl.contract.types import WeightManifest as Manifest
from meshrl.images import ImageFeatures
from meshrl.rollout.engines.vllm import PICTURE_ARGUMENTS, RAW_TENSOR, Config, VllmServer, features
from meshrl.rollout.server_engine.checkpoint import Checkpoint, check_version
from meshrl.rollout.server_engine.request import Picture
from meshrl.rollout.streams import check_request

from ...pictures import picture


class Processor(NamedTuple):
    """Makes the same of every picture."""

    image: ImageFeatures

    def features(self, media: Media, where: str) -> ImageFeatures:
        return self.image


def test_vllm_gets_pixels_and_grid_as_its_own_messages_have_them() -> None:
    pixels = np.arange(8, dtype=np.float32).reshape(4, 2)
    image = ImageFeatures(
        pixels=pixels,
        grid=np.array([1, 2, 2], dtype=np.int64),
        num_tokens=1,
        embeds=np.zeros(1, dtype=np.int64),
        name="n",
    )
    media = picture(0)
    asked = Picture(media=media, start=5, num_tokens=1, images=Processor(image))  # type: ignore[arg-type]
    body = features([asked])
    assert body["mm_hashes"] == {"image": [media.sha256]}
    assert body["mm_placeholders"] == {"image": [{"offset": 5, "length": 1}]}
    item = msgpack.unpackb(base64.b64decode(body["kwargs_data"]["image"][0]))
    dtype, shape, raw = item["pixel_values"]["data"]
    assert (dtype, shape, raw.code) == ("float32", [4, 2], RAW_TENSOR)
    assert np.array_equal(np.frombuffer(raw.data, np.float32).reshape(shape), pixels)
    whole = {"slices": [[0, 4, None]], "dim": 0, "keep_on_cpu": False}
    assert item["pixel_values"]["field"] == ["flat", whole]
    assert item["image_grid_thw"]["data"][:2] == ["int64", [3]]
    assert item["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


def asked() -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=np.arange(3, dtype=np.int32),
        sampling=SamplingParams(),
        media=(picture(0),),
    )


def test_an_engine_of_text_refuses_pictures_in_one_line() -> None:
    with pytest.raises(UserError, match=r"it has pictures, which rollout.name: vllm alone reads"):
        check_request(asked())
    check_request(asked(), pictures=True)


def test_a_request_keeps_its_pictures_on_the_wire() -> None:
    there = codec.encode_generate_request(asked())
    assert codec.decode_generate_request(there).media == asked().media
    there.media[0].data = b"another"
    with pytest.raises(UserError, match="has other data than its name says"):
        codec.decode_generate_request(there)


@pytest.mark.parametrize("names", [("model.x",), ("model.visual.a", "model.x")])
def test_a_version_has_all_weights_of_a_tower_or_none(names: tuple[str, ...]) -> None:
    shapes = {"model.x": (2,), "model.visual.a": (2,), "model.visual.b": (2,)}
    checkpoint = Checkpoint(
        path=Path("model"),
        num_bytes=0,
        shapes=shapes,
        tied=False,
        vocab_size=9,
        max_length=9,
        eos_token_ids=(),
    )
    tensors = tuple(
        TensorSpec(name=name, dtype="float32", shape=(2,), bucket=0, offset=8 * at, nbytes=8)
        for at, name in enumerate(names)
    )
    manifest = Manifest(
        run="run",
        version=Version(1, 0),
        tensors=tensors,
        bucket_bytes=(8 * len(names),),
        bucket_hashes=("",),
    )
    buckets = [np.zeros(8 * len(names), dtype=np.uint8)]
    if len(names) == 1:
        check_version(manifest, buckets, checkpoint)
    else:
        with pytest.raises(UserError, match=r"missing model\.visual\.b"):
            check_version(manifest, buckets, checkpoint)


class Served(NamedTuple):
    """What decides over a server's arguments."""

    images: object
    quantization: str | None


@pytest.mark.parametrize(
    ("served", "wanted", "absent"),
    [
        (Served(None, None), {"--skip-tokenizer-init"}, {*PICTURE_ARGUMENTS, "--quantization"}),
        (Served(object(), None), {*PICTURE_ARGUMENTS}, {"--skip-tokenizer-init"}),
        (Served(None, "fp8"), {"--quantization", "fp8"}, {*PICTURE_ARGUMENTS}),
    ],
)
def test_a_vllm_server_is_started_for_pictures_and_for_fewer_bits(
    served: Served, wanted: set[str], absent: set[str]
) -> None:
    checkpoint = Checkpoint(
        path=Path("model"),
        num_bytes=0,
        shapes={},
        tied=False,
        vocab_size=9,
        max_length=9,
        eos_token_ids=(),
        images=served.images,  # type: ignore[arg-type]
    )
    server = VllmServer(Config(quantization=served.quantization))
    arguments = set(server.arguments(checkpoint, max_length=9, slots=1, port="1"))
    assert wanted <= arguments and not absent & arguments
