"""A learned reward model in this process: a Hugging Face sequence classifier, the Judge port on torch.

The conversation is rendered with the tokenizer's chat template and cut on the left to `max_length` tokens; the score
is output `class_index` of the classification head, raw. `reward.judges` with `kind: model` finds it here, on an
image that has torch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from meshrl.contract.errors import ConfigError, UserError
from meshrl.contract.ports import Judge
from meshrl.contract.types import Outcome, Sample, Score
from meshrl.trainer.config import RewardModelJudgeConfig as Config
from meshrl.trainer.offline.turn_ends import NO_PAD, judged_text


class ModelJudge(Judge):
    """Scores with a model in this process. `start` loads it."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError when there is no such model."""
        if not (config.path / "config.json").is_file():
            raise ConfigError(f"judge model: no {config.path / 'config.json'}")
        self._config = config
        digest = hashlib.sha256(
            config.model_dump_json(exclude={"path", "device", "batch_size"}).encode()
        )
        for file in sorted(config.path.glob("*.json")) + sorted(config.path.glob("*.safetensors")):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        self._hash = digest.hexdigest()[:32]
        # One thread: forwards do not overlap, and the event loop stays free to renew leases.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")
        self._model: Any = None
        self._tokenizer: Any = None
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)

    @property
    def reward_hash(self) -> str:
        """Hash of the weights, the tokenizer's files and how they are asked."""
        return self._hash

    async def start(self) -> None:
        """Load the model; idempotent. Raises ConfigError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def close(self) -> None:
        """End the thread; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def score(self, samples: Sequence[Sample]) -> Sequence[Score]:
        """One Score per sample, in order."""
        await self.start()
        loop = asyncio.get_running_loop()
        scores: list[Score] = []
        for first in range(0, len(samples), self._config.batch_size):
            batch = samples[first : first + self._config.batch_size]
            scores += await loop.run_in_executor(self._thread, self._forward, batch)
        return scores

    def _load(self) -> None:
        if self._model is not None:
            return
        config = self._config
        try:
            tokenizer = AutoTokenizer.from_pretrained(config.path, local_files_only=True)
            model = AutoModelForSequenceClassification.from_pretrained(
                config.path, dtype=getattr(torch, config.dtype), local_files_only=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"judge model {config.path}: {error}") from error
        if config.class_index >= model.config.num_labels:
            raise ConfigError(
                f"judge model: class_index {config.class_index}, and it has {model.config.num_labels} outputs"
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ConfigError(f"judge model {config.path}: {NO_PAD}")
        model.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.truncation_side = "left"
        self._tokenizer = tokenizer
        self._model = model.to(self._device).eval().requires_grad_(False)

    @torch.inference_mode()
    def _forward(self, samples: Sequence[Sample]) -> list[Score]:
        texts: list[str] = []
        faults: dict[int, str] = {}
        for number, sample in enumerate(samples):
            try:
                texts.append(self._text(sample))
            except UserError as error:
                faults[number] = str(error)
        rewards = iter(self._rewards(texts))
        return [
            Score(uid=sample.uid, outcome=Outcome.INFRA_FAULT, reason=faults[number], lasting=True)
            if number in faults
            else self._score(sample, next(rewards))
            for number, sample in enumerate(samples)
        ]

    def _rewards(self, texts: list[str]) -> list[float]:
        """float[B]: output `class_index` of each conversation."""
        if not texts:
            return []
        inputs = self._tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=self._config.max_length,
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self._device)
        logits = self._model(**inputs).logits
        return [float(value) for value in logits[:, self._config.class_index].float()]

    def _score(self, sample: Sample, reward: float) -> Score:
        if not torch.isfinite(torch.tensor(reward)):
            reason = f"the reward model returned {reward}"
            fault = Outcome.INFRA_FAULT
            return Score(uid=sample.uid, outcome=fault, reason=reason, lasting=True)
        return Score(uid=sample.uid, outcome=Outcome.OK, score=reward, reward_hash=self._hash)

    def _text(self, sample: Sample) -> str:
        if not sample.messages:
            raise UserError("a reward model reads conversations, and the sample has no messages")
        messages = [{"role": m.role, "content": m.content} for m in sample.messages]
        return judged_text(messages, sample.solution, self._tokenizer)


def build(config: Config) -> ModelJudge:
    """The judge, not loaded yet."""
    return ModelJudge(config)
