"""Pictures in packs: a policy that reads them says the same of a row in a pack, alone, and as transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from meshrl.contract.errors import CorruptError, UserError
from meshrl.contract.types import Media, Trajectory, Uid
from meshrl.images import ImageProcessor
from meshrl.rollout.server_engine.sglang_messages import positions
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.beside import build_critic
from meshrl.trainer.model.policy import Policy, build_policy, load_hf, open_hf
from meshrl.trainer.model.vision import VisionReader, tower_prefix
from meshrl.trainer.ranks.world import World
from tests.doubles import vision_rows
from tests.doubles.equality import TRAININGS, train
from tests.doubles.vision_rows import packed

from ...pictures import KINDS, PLACEHOLDER, make_model, picture
from . import rank_work
from .ranks import Ranks

TOWER = "model.visual."
A, B, C = picture(1, 96, 64), picture(2, 70, 130), picture(3)


def row(path: Path, media: Sequence[Media], response: int, number: int) -> Trajectory:
    return vision_rows.row(ImageProcessor(path), media, response, number)


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_says_of_each_row_what_the_row_alone_and_transformers_say(
    tmp_path: Path, kind: str
) -> None:
    make_model(tmp_path, kind)
    hf = load_hf(tmp_path)
    policy, reader = Policy(hf), VisionReader(tmp_path, hf)
    asked = [[A], [A], [B], [A, B], [C, A], []]
    rows = [row(tmp_path, media, 4 + n, n) for n, media in enumerate(asked)]
    together, _ = policy(packed(reader, rows), 1.0)
    together.sum().backward()
    of_pack = gradients(policy)
    alone = [policy(packed(reader, [each], share=False), 1.0)[0] for each in rows]
    torch.cat(alone).sum().backward()
    of_rows = gradients(policy)

    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert of_pack.keys() == of_rows.keys()
    assert any(name.startswith("hf." + tower_prefix(hf)) for name in of_pack)
    for name, expected in of_rows.items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(of_pack[name], expected, atol=1e-4 * scale + 1e-6, rtol=1e-3)
    theirs = load_theirs(tmp_path)
    for mine, each in zip(alone, rows, strict=True):
        expected = vision_rows.logprobs_alone(theirs, each, reader).detach()
        torch.testing.assert_close(mine.detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_the_positions_that_sglang_is_given_are_transformers_own(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path, kind)
    reader = VisionReader(tmp_path, load_hf(tmp_path))
    for media in ([A], [B, C, A], []):
        each = row(tmp_path, media, 3, 0)
        images = reader.of_row(each)
        found = positions(list(zip(images.starts, images.features, strict=True)), len(each.tokens))
        assert np.array_equal(found, images.positions)


def load_theirs(path: Path) -> Any:
    """Transformers' model."""
    from transformers import AutoModelForImageTextToText

    factory: Any = AutoModelForImageTextToText
    return factory.from_pretrained(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def vision_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    make_model(path)
    return path


def test_equal_pictures_are_read_once_and_others_share_no_prompt(vision_path: Path) -> None:
    reader = VisionReader(vision_path, load_hf(vision_path))
    same = packed(reader, [row(vision_path, [C], 3, n) for n in range(4)])
    other = packed(reader, [row(vision_path, [picture(n)], 3, n) for n in range(4)])
    assert same.images is not None and other.images is not None
    assert (len(same.images.grids), len(other.images.grids)) == (1, 4)
    assert same.input_ids.shape[1] < other.input_ids.shape[1]


def test_pictures_between_turns_stand_where_they_were_observed(vision_path: Path) -> None:
    hf = load_hf(vision_path)
    policy, reader = Policy(hf), VisionReader(vision_path, hf)
    rows = []
    for number, media in enumerate(([A, B], [A, C], [A])):
        # The first turn ends with a sampled placeholder, and each later picture is observed.
        said = row(vision_path, media[:1], 3, 7)
        seen = [row(vision_path, [each], 2, number) for each in media[1:]]
        rows.append(
            replace(
                said,
                uid=Uid("run", "task", number),
                tokens=np.concatenate([said.tokens, *(each.tokens for each in seen)]),
                loss_mask=np.concatenate([said.loss_mask, *(each.loss_mask for each in seen)]),
                media=tuple(media),
            )
        )
    assert [len(reader.of_row(each).starts) for each in rows] == [2, 2, 1]
    assert (rows[0].tokens[reader.of_row(rows[0]).starts[1] :][:6] == PLACEHOLDER).all()
    together, _ = policy(packed(reader, rows), 1.0)
    alone = [policy(packed(reader, [each], share=False), 1.0)[0] for each in rows]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    assert packed(reader, rows).images is not None
    # The picture that all have in common is read once.
    assert len(packed(reader, rows).images.grids) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("media", "problem"),
    [
        ((C, C), "picture 2 wants 4 places side by side, and 0 are left"),
        ((), "its prompt has 4 places for pictures that it does not have"),
        ((A,), "picture 1 wants 6 places side by side, and 4 are left"),
    ],
)
def test_a_row_whose_places_are_not_its_pictures_is_corrupt(
    vision_path: Path, media: tuple[Media, ...], problem: str
) -> None:
    reader = VisionReader(vision_path, load_hf(vision_path))
    good = row(vision_path, [C], 3, 0)
    with pytest.raises(CorruptError, match=rf"row r/t0/0\.0: {problem}"):
        reader.of_row(replace(good, media=media))


def test_a_frozen_tower_is_neither_trained_nor_published(vision_path: Path, world: World) -> None:
    policy = build_policy(open_hf(vision_path), world, ModelConfig(path=vision_path))
    reader = VisionReader(vision_path, policy.hf)
    logprobs, _ = policy(packed(reader, [row(vision_path, [C], 3, 0)]), 1.0)
    logprobs.sum().backward()
    trained = {name for name, p in policy.named_parameters() if p.grad is not None}
    assert trained and not any(TOWER in name for name in trained)
    names = [spec.name for spec in rank_work.snapshot(policy, world).manifest.tensors]
    assert names and not any(name.startswith(TOWER) for name in names)


def test_a_trained_tower_is_published(vision_path: Path, world: World) -> None:
    config = ModelConfig(path=vision_path, freeze_vision_tower=False)
    policy = build_policy(open_hf(vision_path), world, config)
    names = [name for name, _ in policy.published_weights()]
    assert any(name.startswith(TOWER) for name in names)


def test_a_critic_reads_pictures(vision_path: Path, world: World) -> None:
    critic = build_critic(open_hf(vision_path), world, ModelConfig(path=vision_path))
    torch.nn.init.ones_(critic.value_head.weight)
    reader = VisionReader(vision_path, load_hf(vision_path))
    rows = [row(vision_path, media, 4, n) for n, media in enumerate([[A], [A, B], []])]
    together = critic(packed(reader, rows))
    together.sum().backward()
    trained = {name for name, p in critic.named_parameters() if p.grad is not None}
    alone = [critic(packed(reader, [each], share=False)).detach() for each in rows]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
    other = critic(packed(reader, [replace(rows[0], media=(picture(9, 96, 64),))]))
    assert (other - alone[0]).abs().max() > 1e-3
    assert "value_head.weight" in trained and not any("visual" in name for name in trained)


def test_adapters_leave_a_frozen_tower_alone(vision_path: Path, world: World) -> None:
    config = ModelConfig(path=vision_path, lora_rank=2)
    policy = build_policy(open_hf(vision_path), world, config)
    names = [name for name, _ in policy.named_adapters()]
    assert names and not any(TOWER in name for name in names)


def test_adapters_go_where_the_recipe_says(vision_path: Path, world: World) -> None:
    def modules(**config: Any) -> set[str]:
        config = {"path": vision_path, "lora_rank": 2, "freeze_vision_tower": False, **config}
        policy = build_policy(open_hf(vision_path), world, ModelConfig.model_validate(config))
        trained = {name for name, p in policy.named_tensors() if p.requires_grad}
        assert all("lora_" in name for name in trained)
        return {name.partition(".lora_")[0] for name, _ in policy.named_adapters()}

    both = modules()
    assert {name.startswith(TOWER) for name in both} == {True, False}
    decoder = modules(exclude_modules=r".*visual\..*")
    assert decoder == {name for name in both if not name.startswith(TOWER)}
    assert modules(target_modules=r".*visual\..*attn\.qkv") == {
        f"model.visual.blocks.{n}.attn.qkv" for n in (0, 1)
    }


def test_tensor_ranks_are_refused_where_no_recipe_was_checked(vision_path: Path) -> None:
    shared = Mock(spec=World, tensor=Mock(), sequence=None, experts=None)
    shared.tensor.size.return_value = 2
    with pytest.raises(UserError, match="vision-language model is not sharded by tensor or expert"):
        build_policy(open_hf(vision_path), shared, ModelConfig(path=vision_path))


LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"data_shard": 2}, {"data_replicate": 2}, {"sequence": 2}],
    4: [{"data_replicate": 2, "data_shard": 2}],
}


def test_ranks_learn_of_pictures_what_one_process_learns(
    tmp_path: Path, world: World, ranks: Ranks
) -> None:
    make_model(tmp_path / "model")
    torch.save(train(tmp_path / "model", world, TRAININGS["AdamW"]), tmp_path / "alone.pt")
    for count, layouts in LAYOUTS.items():
        ranks.run("beside_one", tmp_path, layouts, output=tmp_path / "output", ranks=count)
    found = [json.loads(line) for line in (tmp_path / "found").read_text().splitlines()]
    assert len(found) == 4
    for layout, (loss, gradient, weight) in found:
        assert loss < 1e-6 and gradient < 1e-5 and weight < 1e-4, layout
