"""A reward model from preferences: Bradley and Terry's model on a sequence classifier with one output.

Bradley and Terry 1952, https://doi.org/10.1093/biomet/39.3-4.324; Ouyang et al. 2022,
https://arxiv.org/abs/2203.02155, eq. 1:

    l = -log σ(r_c - r_r) + coef · (r_c + r_r)²

r is read at the last token of the conversation, as `transformers` reads it. What is written is an ordinary
`…ForSequenceClassification`: the judge `model` loads it, and so does a vLLM pooling server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.types import Int32
from meshrl.trainer.checkpoint.export import export_policy
from meshrl.trainer.data.prompts import check_open
from meshrl.trainer.learner.metrics import MetricSums
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.model import attention
from meshrl.trainer.model.attention import take_falcon
from meshrl.trainer.model.packing import Pack, alone, pack
from meshrl.trainer.model.packing_check import HfModel, first_line
from meshrl.trainer.model.policy import (
    Policy,
    as_trained,
    packing_fault,
    refuse,
    response_hidden,
)
from meshrl.trainer.model.sharding import decoder_layers, shard
from meshrl.trainer.offline.config import RewardModelConfig
from meshrl.trainer.offline.loop import Lesson, OfflineProgress, Report, fit
from meshrl.trainer.offline.pairs import Pair, PairLearner, read_pairs
from meshrl.trainer.offline.turn_ends import NO_PAD, judged_text
from meshrl.trainer.ranks.world import World

Conversations = tuple[Int32, Int32]
"""The tokens of a prompt with its chosen, and with its rejected response."""


class Classifier(Policy):
    """A sequence classifier over packs: the score of each row, at its last token."""

    def forward(self, pack: Pack, temperature: float = 1.0) -> Any:
        """float32[B]; `pack` comes from `scoring_pack`."""
        scores = self.hf.score(response_hidden(self.hf, pack))
        # A sum over one entry, because FSDP wants no view of what the module made.
        return scores.sum(-1, dtype=torch.float32)


def run(config: RewardModelConfig, report: Report | None = None) -> OfflineProgress:
    """Train on preferences and write a Hugging Face checkpoint to `config.output_dir`.

    Args:
        config: Data, steps and output directory.
        report: Called every ten steps and with each measurement; None logs a line.

    Raises:
        UserError: a row is malformed (names file and row), the model cannot be loaded, or the checkpoint there is
            another training's.
        ConfigError: LoRA is asked for.
    """
    if getattr(config.model, "lora_rank", 0):
        raise ConfigError("model.lora_rank: a reward model is trained whole; leave it 0")
    world = World.start(config.device)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(config.tokenizer_dir)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if pad is None:
            raise UserError(f"{config.tokenizer_dir}: {NO_PAD}")
        train = conversations(config, read_pairs(config, config.train_files), tokenizer)
        held_out = read_pairs(config, config.val_files)[: config.val_max_samples]
        pairs = [*train, *conversations(config, held_out, tokenizer)]
        torch.manual_seed(config.seed)
        hf = load_classifier(config.model.path, pad)
        model = shard(Classifier(hf).train(), hf, world, config.model)
        optimizers = Optimizers(model, config.optim)
        lesson = RewardLesson(model, optimizers, config, world, pairs, len(train), pad)
        done = fit(
            lesson, model, optimizers, config, world,
            kind="reward-model", count=len(train), rows=(row for pair in train for row in pair),
            report=report,
        )  # fmt: skip
        export_policy(model, world, config.output_dir, tokenizer=config.tokenizer_dir)
        return done
    finally:
        world.close()


class RewardLesson(PairLearner, Lesson):
    """A step on pairs."""

    def __init__(
        self,
        model: Classifier,
        optimizers: Optimizers,
        config: RewardModelConfig,
        world: World,
        pairs: Sequence[Conversations],
        train: int,
        pad: int,
    ) -> None:
        """Keep the parts; of `pairs` the first `train` are to train on, `pad` is the padding token."""
        super().__init__(
            optimizers,
            world,
            sizes=alone([sum(map(len, pair)) for pair in pairs]),
            train=train,
            max_tokens=config.max_tokens_per_pack,
        )
        self._model = model
        self._config = config
        self._pairs = pairs
        self._pad = pad

    def _forward(self, chosen: Sequence[int], total: int, tally: MetricSums) -> torch.Tensor:
        rows = [row for index in chosen for row in self._pairs[index]]
        scores: torch.Tensor = self._model(scoring_pack(rows, self._pad).to(self._world.device))
        if not rows:
            return scores.sum() * 0.0
        better, worse = scores[0::2], scores[1::2]
        losses = bradley_terry(better, worse, center=self._config.center_rewards_coef)
        loss = losses.sum() / total
        tally.add_sums({"loss": float(loss.detach())})
        means = {
            "accuracy": float((better > worse).float().mean()),
            "margin": float((better - worse).detach().mean()),
            "reward": float(scores.detach().mean()),
        }
        tally.add_means(means, len(chosen))
        return loss * self._world.size


def bradley_terry(
    better: torch.Tensor, worse: torch.Tensor, *, center: float = 0.0
) -> torch.Tensor:
    """L of scores [P] of the chosen and [P] of the rejected, [P]."""
    return -logsigmoid(better - worse) + center * (better + worse).square()


def scoring_pack(rows: Sequence[Int32], pad: int) -> Pack:
    """Whole conversations, laid end to end; the one position of each is its last token that is not `pad`."""
    packed = pack(rows, [len(row) for row in rows], share_prefixes=False)
    starts = np.cumsum([0, *map(len, rows[:-1])])
    within = [int(np.flatnonzero(row != pad).max(initial=0)) for row in rows] or [0]
    places = torch.from_numpy(starts + within)
    return replace(packed, positions=places, targets=packed.input_ids[0, places])


def load_classifier(path: Path, pad: int) -> HfModel:
    """A float32 classifier with one output; without a head in the checkpoint, one that scores 0.

    Raises:
        UserError: there is no such checkpoint, or its architecture has no classifier over the last token.
    """
    if not (path / "config.json").is_file():
        raise UserError(
            f"model.path: no config.json in {path}: not a Hugging Face checkpoint directory"
        )
    try:
        config: Any = AutoConfig.from_pretrained(path)
        if config.model_type == "falcon":
            take_falcon()
        hf, loading = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            dtype=torch.float32,
            attn_implementation=attention.NAME,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and the code of a model raise whatever they like
        raise UserError(
            f"model.path: cannot load {path} as a classifier: {first_line(error)}"
        ) from error
    if not isinstance(getattr(hf, "score", None), nn.Linear):
        raise UserError(
            f"model.path: {type(hf).__name__} has no linear `score` over the last token"
        )
    if "score.weight" in loading["missing_keys"]:
        nn.init.zeros_(hf.score.weight)
    refuse(path, packing_fault(type(hf), hf.config, _scores, _own_scores))
    hf.config.pad_token_id = pad
    return as_trained(hf)


def _scores(hf: HfModel, pack: Pack) -> torch.Tensor:
    decoder_layers(hf)
    scores: torch.Tensor = hf.score(response_hidden(hf, pack))
    return scores


def _own_scores(hf: HfModel, row: torch.Tensor) -> torch.Tensor:
    hidden = hf.base_model(input_ids=row, use_cache=False).last_hidden_state
    scores: torch.Tensor = hf.score(hidden[0, :-1])
    return scores


def conversations(
    config: RewardModelConfig, pairs: Sequence[Pair], tokenizer: Any
) -> list[Conversations]:
    """Both conversations of each pair, as the judge reads them.

    Raises:
        UserError: a prompt is empty or ends with the assistant, or a conversation is longer than `max_length`.
    """

    def tokens(pair: Pair, response: str) -> Int32:
        prompt = pair.prompt
        check_open(prompt, pair.where)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = judged_text(messages, response, tokenizer)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) > config.max_length:
            raise UserError(f"{pair.where}: {len(ids)} tokens > max_length {config.max_length}")
        return np.array(ids, dtype=np.int32)

    return [(tokens(pair, pair.chosen), tokens(pair, pair.rejected)) for pair in pairs]
