from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from meshrl.contract.errors import InfraError, UserError
from meshrl.trainer.checkpoint import checkpoint, export
from meshrl.trainer.checkpoint.export import export_checkpoint, export_policy
from meshrl.trainer.config import ModelConfig
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model import lora
from meshrl.trainer.model.lora import BaseModel
from meshrl.trainer.model.packing import pack
from meshrl.trainer.model.policy import Policy, build_policy, load_hf, open_hf, random_hf
from meshrl.trainer.ranks.world import World

from . import rank_work, tiny
from .rank_work import state, weights

PROMPT = 2


def fresh(
    path: Path, world: World, optimizer: str = "adamw", **changes: Any
) -> tuple[Policy, Optimizers]:
    return rank_work.fresh(path, world, optimizer, **{"lora_rank": 4, **changes})


def learn(policy: Policy, optimizers: Optimizers, seed: int) -> None:
    rank_work.nudge(policy, optimizers, seed, 5e-2)


def test_an_adapter_starts_as_the_model_and_only_it_is_trained(
    tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    plain = build_policy(open_hf(tiny_path), world, ModelConfig(path=tiny_path))
    packed = pack(tiny.rows(3), [PROMPT] * 3)
    with torch.no_grad():
        assert torch.equal(policy(packed, 1.0)[0], plain(packed, 1.0)[0])
    policy.reshard()  # type: ignore[operator]
    before = weights(policy)
    learn(policy, optimizers, 1)
    learn(policy, optimizers, 2)  # B was 0, so A moves from the second step on
    for name, tensor in weights(policy).items():
        assert torch.equal(tensor, before[name]) == (".lora_" not in name), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(
    tmp_path: Path, tiny_path: Path, world: World, optimizer: str
) -> None:
    policy, optimizers = fresh(tiny_path, world, optimizer)
    learn(policy, optimizers, 1)
    path = checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    names = checkpoint.freeze(policy, optimizers)["model"]
    assert names and all(".lora_" in name for name in names)
    learn(policy, optimizers, 2)
    other, others = fresh(tiny_path, world, optimizer)
    assert checkpoint.load(path, other, others).adapter == policy.adapter
    learn(other, others, 2)
    ours, theirs = weights(policy), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_export_and_snapshot_are_merged_and_decode_greedily_as_the_policy_does(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    for seed in range(4):
        learn(policy, optimizers, seed)
    checkpoint.save(tmp_path / "ckpt", policy, optimizers, state(1), world, keep=2)
    export_policy(policy, world, tmp_path / "live", tokenizer=tiny_path)
    export_checkpoint(
        tmp_path / "ckpt", tmp_path / "stored", model=tiny_path, max_shard_size="10KB"
    )
    assert len(list((tmp_path / "stored").glob("model-*-of-*.safetensors"))) > 1
    sent = rank_work.snapshot(policy, world)
    prompt = tiny.rows(1, seed=9)[0][:4]
    start = AutoModelForCausalLM.from_pretrained(tiny_path)
    for name in ("live", "stored"):
        hf = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert [s.name for s in sent.manifest.tensors] == [n for n, _ in hf.named_parameters()]
        ids = torch.from_numpy(prompt)[None].long()
        text = hf.generate(ids, max_new_tokens=12, do_sample=False)[0]
        assert not torch.equal(text, start.generate(ids, max_new_tokens=12, do_sample=False)[0])
        made = pack([text.numpy().astype("int32")], [len(prompt)])
        assert bool(policy.is_greedy(made).all())  # teacher forced: the policy would say the same
        exact = rank_work.exact_logprobs(hf, text.numpy())[len(prompt) - 1 :]
        torch.testing.assert_close(policy(made, 1.0)[0], exact, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks
@pytest.mark.parametrize("dora", [False, True])
def test_peft_reads_what_is_exported_and_training_starts_from_it(
    tmp_path: Path, tiny_path: Path, world: World, dora: bool
) -> None:
    settings = {
        "use_rslora": True,
        "use_dora": dora,
        "exclude_modules": ["down_proj"],
        "target_modules": "all-linear",
    }
    policy, optimizers = fresh(tiny_path, world, **settings)
    for seed in range(3):
        learn(policy, optimizers, seed)
    checkpoint.save(tmp_path / "ckpt", policy, optimizers, state(1), world, keep=2)
    export_checkpoint(tmp_path / "ckpt", tmp_path / "merged", model=tiny_path)
    stored = export_checkpoint(
        tmp_path / "ckpt", tmp_path / "adapter", model=tiny_path, adapter_only=True
    )
    assert (stored / "tokenizer.json").is_file()
    ids = torch.from_numpy(tiny.rows(1, seed=9)[0])[None].long()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_path), stored)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, rtol=0, atol=1e-5)
    assert not any("down_proj" in name for name in lora.targets(policy.hf))

    other, _ = fresh(tiny_path, world, lora_adapter_path=stored, **settings)
    ours, theirs = weights(policy), weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    whole, whole_optimizers = fresh(tiny_path, world, lora_rank=0)
    checkpoint.save(tmp_path / "whole", whole, whole_optimizers, state(1), world, keep=2)
    with pytest.raises(UserError, match="the run trains all weights"):
        export_checkpoint(tmp_path / "whole", tmp_path / "x", model=tiny_path, adapter_only=True)
    for changes, said in (
        ({"lora_rank": 8}, r"want model.lora_rank=4"),
        ({"use_rslora": False}, r"want model.use_rslora=True"),
        ({"use_dora": not dora}, rf"want model.use_dora={dora}"),
        ({"exclude_modules": ()}, r"lacks model.*down_proj.*want the adapter's own target_modules"),
        ({"target_modules": ["q_proj"]}, r"has model.*, and the recipe lacks it"),
        ({"lora_adapter_path": tmp_path}, r"unreadable: .*adapter_config.json"),
    ):
        with pytest.raises(UserError, match=said):
            fresh(tiny_path, world, **{"lora_adapter_path": stored, **settings, **changes})


def test_dora_is_pefts_and_engines_get_it_merged(tiny_path: Path, world: World) -> None:
    config = ModelConfig(path=tiny_path, lora_rank=4, use_dora=True)
    policy, optimizers = fresh(tiny_path, world, use_dora=True)
    plain = build_policy(open_hf(tiny_path), world, ModelConfig(path=tiny_path))
    peft: Any = AutoModelForCausalLM.from_pretrained(tiny_path)
    lora.add_adapter(peft, config)
    packed = pack(tiny.rows(3), [PROMPT] * 3)
    with torch.no_grad():
        torch.testing.assert_close(policy(packed, 1.0)[0], plain(packed, 1.0)[0])
    policy.reshard()  # type: ignore[operator]
    theirs = dict(peft.named_parameters())
    for name, tensor in weights(policy).items():
        if "magnitude" in name:
            torch.testing.assert_close(tensor, theirs[name])
    for seed in range(3):
        learn(policy, optimizers, seed)
    with torch.no_grad():
        for name, tensor in weights(policy).items():
            theirs[name].copy_(tensor)
    row = tiny.rows(1, seed=9)[0]
    ids = torch.from_numpy(row)[None].long()
    exact = rank_work.exact_logprobs(peft, row)
    ours = policy(pack([row], [PROMPT]), 1.0)[0]
    torch.testing.assert_close(ours, exact[PROMPT - 1 :], rtol=0, atol=1e-5)
    assert rank_work.snapshot(policy, world, adapters_only=True).manifest.adapter is None
    unpeft = {name: weight.whole(torch.float32) for name, weight in policy.named_weights()}
    merged: Any = AutoModelForCausalLM.from_pretrained(tiny_path)
    merged.load_state_dict(unpeft, strict=False)
    torch.testing.assert_close(merged(ids).logits, peft(ids).logits, rtol=0, atol=1e-5)


def test_another_adapter_or_none_is_refused_in_one_line(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    path = checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    larger, _ = fresh(tiny_path, world, lora_rank=8)
    with pytest.raises(UserError, match=r"LoRA adapter \(.*lora_rank 4.*trains .*lora_rank 8"):
        checkpoint.load(path, larger)
    whole, _ = fresh(tiny_path, world, lora_rank=0)
    with pytest.raises(UserError, match="and the recipe trains all weights"):
        checkpoint.load(path, whole)


@pytest.mark.parametrize("adapter_only", [False, True])
def test_an_export_to_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path,
    tiny_path: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    adapter_only: bool,
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    checkpoint.save(tmp_path / "ckpt", policy, optimizers, state(1), world, keep=2)

    def full(tensors: object, path: Path, *_: object) -> None:
        path.write_text("half of it")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    with pytest.raises(InfraError, match=r"cannot export .*/out: .*No space left on device"):
        export_checkpoint(
            tmp_path / "ckpt", tmp_path / "out", model=tiny_path, adapter_only=adapter_only
        )
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_an_adapter_of_another_base_model_is_refused_on_resume_and_on_export(
    tmp_path: Path, tiny_path: Path, world: World
) -> None:
    policy, optimizers = fresh(tiny_path, world)
    path = checkpoint.save(tmp_path, policy, optimizers, state(1), world, keep=2)
    other = tmp_path / "other"
    random_hf(tiny.config(), seed=1).save_pretrained(other)
    with pytest.raises(UserError, match=r"adapter of another base model: .*fingerprint"):
        checkpoint.load(path, fresh(other, world)[0])
    with pytest.raises(UserError, match=r"adapter of another base model: .*fingerprint"):
        export_checkpoint(path, tmp_path / "export", model=other, tokenizer=tiny_path)


def test_a_fingerprint_is_of_tensors_not_of_files(tmp_path: Path, tiny_path: Path) -> None:
    load_hf(tiny_path).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert BaseModel(tmp_path / "shards").fingerprint == BaseModel(tiny_path).fingerprint
    random_hf(tiny.config(), seed=1).save_pretrained(tmp_path / "other")
    assert BaseModel(tmp_path / "other").fingerprint != BaseModel(tiny_path).fingerprint


def test_merging_is_exact_for_any_share_of_the_rows_and_number_of_threads() -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(301, 2_000), torch.randn(5, 2_000), torch.randn(301, 5)
    whole = lora.merged(weight, a, b, 5, 16 / 5)
    torch.testing.assert_close(whole, weight + 16 / 5 * (b @ a), rtol=1e-5, atol=1e-5)
    part = lora.merged(weight[130:137], a, b[130:137], 5, 16 / 5)
    assert torch.equal(part, whole[130:137])
    torch.set_num_threads(2)
    try:
        assert torch.equal(lora.merged(weight, a, b, 5, 16 / 5), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["q_projj"], r"model.target_modules: Target modules .*q_projj.* not found"),
        (["q_proj", "embed_tokens"], "model.target_modules: adapters on the input or output"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_one_line(
    tiny_path: Path, world: World, targets: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        fresh(tiny_path, world, target_modules=targets)
