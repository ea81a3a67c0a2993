"""Pictures on their way to an engine."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgpack
import numpy as np
import pytest

from meshrl.contract.errors import UserError
from meshrl.contract.types import GenerateRequest, Media, SamplingParams, TensorSpec, Version
from meshrl.contract.types import WeightManifest as Manifest
from meshrl.images import ImageFeatures, ImageProcessor
from meshrl.rollout.engines.sglang import Config as SglangConfig
from meshrl.rollout.engines.sglang import SglangClient, SglangServer
from meshrl.rollout.engines.vllm import PICTURE_ARGUMENTS, RAW_TENSOR, Config, VllmServer, features
from meshrl.rollout.server_engine.checkpoint import CheckpointFacts, check_version
from meshrl.rollout.server_engine.request import Picture
from meshrl.rollout.server_engine.sglang_messages import image_data
from meshrl.rollout.streams import check_request

from ...pictures import make_model, picture


class Processor(NamedTuple):
    """Makes the same of every picture."""

    image: ImageFeatures

    def features(self, media: Media, where: str) -> ImageFeatures:
        return self.image


PIXELS = np.arange(8, dtype=np.float32).reshape(4, 2)


def given(media: Media, **changes: Any) -> Picture:
    """A picture of one token, at token 5."""
    image: dict[str, Any] = {
        "pixels": PIXELS,
        "grid": np.array([1, 2, 2]),
        "num_tokens": 1,
        "name": "n",
        "embeds": np.zeros(1, dtype=np.int64),
        **changes,
    }
    made = ImageFeatures(**image)
    return Picture(media=media, start=5, num_tokens=made.num_tokens, images=Processor(made))  # type: ignore[arg-type]


def test_vllm_gets_pixels_and_grid_as_its_own_messages_have_them() -> None:
    pixels, media = PIXELS, picture(0)
    body = features([given(media)], "salt")
    assert body["mm_hashes"] == {"image": [f"{media.sha256}-salt"]}
    assert body["mm_placeholders"] == {"image": [{"offset": 5, "length": 1}]}
    item = msgpack.unpackb(base64.b64decode(body["kwargs_data"]["image"][0]))
    dtype, shape, raw = item["pixel_values"]["data"]
    assert (dtype, shape, raw.code) == ("float32", [4, 2], RAW_TENSOR)
    assert np.array_equal(np.frombuffer(raw.data, np.float32).reshape(shape), pixels)
    whole = {"slices": [[0, 4, None]], "dim": 0, "keep_on_cpu": False}
    assert item["pixel_values"]["field"] == ["flat", whole]
    assert item["image_grid_thw"]["data"][:2] == ["int64", [3]]
    assert item["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]


def test_vllm_gets_each_tile_as_an_item_of_its_own() -> None:
    tiles = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2)
    media = picture(0)
    tiled = given(media, pixels=tiles, num_tokens=8, embeds=np.array([1, 2, 5, 6]))
    body = features([tiled], "salt")
    assert body["mm_hashes"]["image"] == [f"{media.sha256}-salt-{n}" for n in (0, 1)]
    assert body["mm_placeholders"]["image"] == [
        {"offset": 6, "length": 2},
        {"offset": 10, "length": 2},
    ]
    items = [msgpack.unpackb(base64.b64decode(each)) for each in body["kwargs_data"]["image"]]
    for item, tile in zip(items, tiles, strict=True):
        dtype, shape, raw = item["pixel_values"]["data"]
        assert np.array_equal(np.frombuffer(raw.data, dtype).reshape(shape), tile[None])
        assert item["pixel_attention_mask"]["data"][:2] == ["bool", [1, 2, 2]]
        assert item["num_patches"]["data"][1] == []


def test_sglang_gets_pixels_places_and_positions_as_one_text() -> None:
    made = json.loads(image_data([given(picture(0))], 8))
    assert made["offsets"] == [[5, 5]]
    tensors = {
        name: np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
        for name, (dtype, shape, data) in made["tensors"].items()
    }
    assert np.array_equal(tensors["pixel_values"], PIXELS)
    assert tensors["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert tensors["mrope_positions"].tolist() == [[*range(8)]] * 3
    assert tensors["mrope_position_delta"].tolist() == [[0]]


async def test_an_sglang_server_that_takes_no_pixels_of_ours_is_refused_at_its_start(
    tmp_path: Path,
) -> None:
    make_model(tmp_path)
    client = Mock(spec=SglangClient, url="http://x")
    client.generate.side_effect = UserError("SGLang refuses a request: Error while loading data")
    with pytest.raises(UserError, match="without SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=meshrl_sgl"):
        await SglangServer(SglangConfig())._check_pictures(client, ImageProcessor(tmp_path))
    (_, probe, _), _ = client.generate.call_args
    assert probe.pictures[0].features().num_tokens == probe.pictures[0].num_tokens


async def test_sglang_tells_no_log_probs_of_a_prompt_with_pictures() -> None:
    wanted = Mock(prompt_top=0, pictures=("one",))
    with pytest.raises(UserError, match="SGLang tells none of a prompt with pictures"):
        await anext(SglangClient._chunks(Mock(), wanted, {}))


def asked() -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        prompt_ids=np.arange(3, dtype=np.int32),
        sampling=SamplingParams(),
        media=(picture(0),),
    )


def test_an_engine_of_text_refuses_pictures_in_one_line() -> None:
    with pytest.raises(UserError, match=r"it has pictures, which vllm and sglang alone read"):
        check_request(asked())
    check_request(asked(), pictures=True)


@pytest.mark.parametrize("names", [("model.x",), ("model.visual.a", "model.x")])
def test_a_version_has_all_weights_of_a_tower_or_none(names: tuple[str, ...]) -> None:
    shapes = {"model.x": (2,), "model.visual.a": (2,), "model.visual.b": (2,)}
    checkpoint = CheckpointFacts(
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
    """The settings that decide over a server's arguments."""

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
    checkpoint = CheckpointFacts(
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
    sglang = SglangServer(SglangConfig()).arguments(checkpoint, max_length=9, slots=1, port="1")
    assert "--served-model-name" in sglang  # else a path with a colon is no name
