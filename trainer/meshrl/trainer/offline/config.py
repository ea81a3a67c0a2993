"""Configuration of training on stored rows: SFT, preferences, reward models. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from meshrl.common.config import Config, Seed
from meshrl.trainer.config import DataFiles, ModelConfig, PolicyLossConfig, TemplateVariables
from meshrl.trainer.learner.optimizer_config import OptimConfig


class OfflineConfig(Config):
    """Keys of every kind of offline training."""

    model: ModelConfig
    """Model to start from."""
    train_files: DataFiles = Field(min_length=1)
    """Parquet or jsonl files, or what `reader` reads."""
    val_files: DataFiles = Field(default_factory=list)
    """Held-out rows; none measures nothing."""
    reader: str | None = None
    """A module of `meshrl.trainer.data.readers` that reads the files, or a dotted path; None: the one named like a
    file's suffix."""
    output_dir: Path
    """Directory of the Hugging Face checkpoint that training ends with."""
    prompt_key: str = "prompt"
    """Text or chat messages."""
    steps: PositiveInt = 400
    batch_rows: PositiveInt = 32
    """Rows (of preferences: pairs) of one optimizer step."""
    max_length: PositiveInt = 2048
    """Longest row in tokens; a longer one is an error that names it."""
    max_tokens_per_pack: PositiveInt = 16_384
    optim: OptimConfig = OptimConfig(lr=1e-3, lr_warmup_steps=10)
    test_freq: PositiveInt = 50
    """Steps between measurements on held-out rows."""
    val_max_samples: PositiveInt = 256
    save_freq: int = -1
    """Steps between checkpoints; -1 saves none, and a killed run starts from the beginning."""
    max_ckpt_to_keep: PositiveInt = 2
    default_local_dir: Path | None = None
    """Checkpoints; None is `<output_dir>-checkpoints`."""
    resume_mode: Literal["auto", "disable"] = "auto"
    """auto resumes from the newest checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: Seed = 0

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of checkpoints."""
        beside = self.output_dir.with_name(f"{self.output_dir.name}-checkpoints")
        return self.default_local_dir or beside

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the tokenizer's files."""
        return self.model.tokenizer_path or self.model.path


class SftConfig(OfflineConfig):
    """Supervised fine-tuning on prompt / response rows, or on conversations: the warm start before RL."""

    response_key: str = "response"
    """Text."""
    messages_key: str = "messages"
    """A whole conversation, in rows without a response: what the assistant says in it is learned."""
    image_key: str = "images"
    """The column of a row's images, for a vision-language model: files, or their bytes."""
    tools_key: str = "tools"
    """The schemas of the tools of such a conversation, or JSON of them."""
    apply_chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the chat template: `{enable_thinking: false}`."""
    append_eos: bool = True
    """End every response with what the chat template puts behind the assistant's text, once; without a template, with
    the tokenizer's `eos_token`."""
    target_exact_match: PositiveFloat | None = None
    """Stop as soon as the exact match on held-out rows is at least this; None runs all `steps`."""


class PreferenceConfig(OfflineConfig):
    """Rows of a prompt with a chosen and a rejected response."""

    chosen_key: str = "chosen"
    """The better response: text, or messages of which the last is the response."""
    rejected_key: str = "rejected"
    """The worse one."""
    steps: PositiveInt = 200

    @model_validator(mode="after")
    def _whole_rows(self) -> Self:
        if self.model.ulysses_sequence_parallel_size > 1:
            raise ValueError(
                "model.ulysses_sequence_parallel_size: tokens of a pair are not shared among ranks; want 1"
            )
        return self


class DpoConfig(PreferenceConfig):
    """Offline preference optimisation."""

    append_eos: bool = True
    """End every response with what the chat template puts behind the assistant's text, once; without a template, with
    the tokenizer's `eos_token`."""
    reference_path: Path | None = None
    """The frozen model, asked once before the first step; None takes `model.path`."""
    policy_loss: PolicyLossConfig = PolicyLossConfig(loss_mode="dpo")
    """`loss_mode` is `dpo` or `ipo`, or a module of one's own over pairs; `dpo_beta`, `dpo_label_smoothing` and
    `dpo_reference_free` are read."""
    optim: OptimConfig = OptimConfig(lr=5e-7, lr_warmup_steps=10)


class RewardModelConfig(PreferenceConfig):
    """A Bradley-Terry reward model: a sequence classifier with one output."""

    optim: OptimConfig = OptimConfig(lr=1e-5, lr_warmup_steps=10)
    center_rewards_coef: NonNegativeFloat = 0.0
    """Weight of (r_chosen + r_rejected)², which keeps rewards around 0; differences alone do not fix their level."""
