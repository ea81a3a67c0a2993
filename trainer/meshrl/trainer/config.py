"""The trainer's sections of a recipe, in verl's words. Imports no torch, so that a recipe is checked in milliseconds.

An option that only one estimator or loss reads is defined beside it; see `algorithms.options`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NegativeFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from meshrl.common.config import Config, Machine, Seed
from meshrl.trainer.algorithms.options import with_options
from meshrl.trainer.data.reasoning_gym import ReasoningGymConfig
from meshrl.trainer.learner.optimizer_config import OptimConfig

KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Names of `meshrl.trainer.algorithms.kl`; each also with a `+` behind it."""


def _kl_estimator(name: str) -> str:
    if name.removesuffix("+") not in KL_ESTIMATORS:
        raise ValueError(f"want one of {', '.join(KL_ESTIMATORS)}, or one with + behind it")
    return name


def _trains(dtype: str) -> str:
    if dtype == "float16":
        raise ValueError("float16 loses small gradients, for they are not scaled; want bfloat16")
    return dtype


KlEstimator = Annotated[str, AfterValidator(_kl_estimator)]


DataFiles = Annotated[
    list[Path], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]
"""Files in a list, or one by itself."""


class ModelConfig(Config):
    """The policy."""

    path: Path
    """A Hugging Face checkpoint directory (config.json, safetensors, tokenizer), or a model of the hub: `ORG/NAME`,
    pinned `hf://ORG/NAME@REVISION`."""
    tokenizer_path: Path | None = None
    """The tokenizer's directory; None is `path`."""
    trust_remote_code: bool = False
    """Run the checkpoint's own Python files for its architecture, with the rights of your user: read them first.
    The tokenizer's files are never run; an engine has its own option (`rollout.engine.extra_args`)."""
    param_dtype: Annotated[Literal["float32", "bfloat16", "float16"], AfterValidator(_trains)] = (
        "float32"
    )
    """The compute type; where a recipe does not name it and trains on a GPU, bfloat16. A resumed run keeps its
    type. Master weights and optimizer state are float32 always."""
    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    keep_matmuls: bool = False
    """Keep the outputs of matrix products and attention, and recompute the rest (selective checkpointing), which
    costs memory and hardly any time. Needs `enable_gradient_checkpointing` without `use_torch_compile`."""
    param_offload: bool = False
    """Keep weights, gradients and optimizer state in the CPU's memory; a layer is on the device while it computes."""
    use_torch_compile: bool = False
    """Compile each decoder layer: slow at first, faster afterwards; on a CPU this needs a C++ compiler."""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """Number of ranks that share the tokens of each micro-batch, for rows too long for one device. Divides
    the trainer's ranks and the attention heads; RL and SFT only."""
    freeze_vision_tower: bool = True
    """Leave the vision tower's weights as they are; engines then have them from their checkpoint. For vision-language
    models."""
    lora_rank: NonNegativeInt = 0
    """Train low-rank adapters of this rank and leave the weights as they are; 0 trains the weights. A critic is
    trained whole."""
    lora_alpha: PositiveInt = 16
    """Adapters are multiplied by `lora_alpha / lora_rank`."""
    use_rslora: bool = False
    """Multiply by `lora_alpha / √lora_rank` instead (https://arxiv.org/abs/2312.03732)."""
    use_dora: bool = False
    """Also train the norm of each row of the weights that have an adapter (DoRA, https://arxiv.org/abs/2402.09353).
    Engines get the merged weights, not the adapters alone."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Which modules get an adapter: a list of names, `all-linear`, or as in peft a pattern of full names. In a
    mixture of experts `all-linear` leaves out MLPs, and adapters on experts are refused."""
    exclude_modules: str | tuple[str, ...] = ()
    """Which of them get none all the same: a list of names, or a pattern of full names."""
    lora_adapter_path: Path | None = None
    """A directory that peft wrote, whose adapter training starts from: its rank, alpha and modules must be the
    recipe's. A resumed run starts from its own checkpoint."""

    def adapter_mismatch(self, stored: Mapping[str, Any]) -> str:
        """Mismatch of peft's `adapter_config.json` with these settings, and the right ones; empty if none."""
        at = f"model.lora_adapter_path: {self.lora_adapter_path}"
        kind = stored.get("peft_type")
        if kind != "LORA":
            return f"{at} is no LoRA adapter of peft's ({kind or 'no adapter_config.json'})"
        if stored.get("bias", "none") != "none" or stored.get("modules_to_save"):
            return f"{at} has trained biases or whole modules beside its adapter: merge it into a model instead"
        wanted = {
            "lora_rank": stored.get("r"),
            "lora_alpha": stored.get("lora_alpha"),
            "use_rslora": bool(stored.get("use_rslora")),
            "use_dora": bool(stored.get("use_dora")),
        }
        other = [
            f"model.{key}={value}" for key, value in wanted.items() if getattr(self, key) != value
        ]
        return f"{at} was made with other settings: want {' '.join(other)}" if other else ""

    @model_validator(mode="after")
    def _has_what_dora_is_of(self) -> Self:
        if self.use_dora and not self.lora_rank:
            raise ValueError("use_dora: true is of adapters: want lora_rank above 0")
        return self

    @model_validator(mode="after")
    def _keeps_what_would_be_recomputed(self) -> Self:
        if self.keep_matmuls and (not self.enable_gradient_checkpointing or self.use_torch_compile):
            raise ValueError(
                "keep_matmuls says what gradient checkpointing keeps in layers that are not compiled: want "
                "enable_gradient_checkpointing: true and use_torch_compile: false"
            )
        return self


RENDERING = {
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "tokenize",
    "continue_final_message",
    "sanitize_control_tokens",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "messages",
}
"""Arguments of transformers' `apply_chat_template` that are no variables of a template."""


def _variables(options: dict[str, Any]) -> dict[str, Any]:
    if wrong := sorted(options.keys() & RENDERING):
        raise ValueError(
            f"{', '.join(wrong)}: want variables of the chat template, as enable_thinking"
        )
    return options


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_variables)]


class FewShotExample(Config):
    """A question with its answer."""

    prompt: str = Field(min_length=1)
    answer: str = Field(min_length=1)


class DataConfig(Config):
    """Prompts to train and evaluate on, in verl's schema or plain `prompt`/`answer` rows."""

    train_files: DataFiles = Field(default_factory=list)
    """Parquet, jsonl or csv files, folders of tasks in Harbor's format, or what `reader` reads; or a data set of the
    Hugging Face hub, `openai/gsm8k`."""
    val_files: DataFiles = Field(default_factory=list)
    """Held-out prompts; none switches evaluation off."""
    reasoning_gym: ReasoningGymConfig | None = None
    """Prompts of reasoning-gym, beside those of the files."""
    reader: str | None = None
    """A module of `meshrl.trainer.data.readers` that reads the files, or a dotted path; None: the one named like a
    file's suffix."""
    prompt_key: str = "prompt"
    """The column of the prompt: text or chat messages."""
    image_key: str = "images"
    """The column of a prompt's images, for a vision-language model: files, or their bytes."""
    answer_key: str | None = None
    """The column of the answer that a response is compared with; None takes `reward_model.ground_truth`, else
    `answer`."""
    response_key: str | None = None
    """The column of the whole text that the data answer, which `algorithm.adv_estimator: data_answer` learns from;
    None takes the answer."""
    answer_required: bool = True
    """A row without an answer is refused; False for tasks that have none, whose reward gets `ground_truth` None."""
    apply_chat_template_kwargs: TemplateVariables = Field(default_factory=dict)
    """Variables of the chat template, in prompts and in the turns of programs: `{enable_thinking: false}`."""
    system_prompt: str = ""
    """Begins each conversation that has no system message of its own; a prompt that is text becomes a chat. Empty:
    none."""
    few_shot: list[FewShotExample] = Field(default_factory=list)
    """Solved examples, as turns before the prompt's own; a prompt that is text becomes a chat."""
    max_prompt_length: PositiveInt = 512
    """In tokens, chat template applied."""
    max_response_length: PositiveInt = 512
    train_batch_size: PositiveInt = 32
    """Prompts of one training step; rows are `rollout.n` times as many."""
    val_max_samples: int = -1
    """Largest number of held-out prompts; -1 takes all."""
    filter_overlong_prompts: bool = True
    """Skip and count too long prompts; False: `truncation` decides."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    shuffle: bool = True
    curriculum: str | None = None
    """The order of each epoch: a module of `meshrl.trainer.data.curricula`, or a dotted path; None shuffles or keeps
    the files' order, as `shuffle` says."""
    weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Shares of several data sets: by `data_source`, or by file as in `train_files`. An epoch asks as many prompts as
    there are rows, of each source its share; a source's prompts come in a seeded order, none again before all others.
    Empty: an epoch asks each prompt once."""
    seed: Seed = 0


class KlControlConfig(Config):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: NonNegativeFloat = 0.001
    horizon: PositiveInt = 10_000
    target_kl: PositiveFloat = 0.1


class RolloutCorrectionConfig(Config):
    """Corrections for the difference between the sampling policy and the training policy."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Truncated importance sampling (TIS) per token or per sequence."""
    rollout_is_threshold: float | str = 2.0
    """A number clamps from above (TIS); "lo_hi" zeroes outside (IcePop)."""
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    """Rejection statistics, comma separated: token_k1 … seq_max_k3."""
    rollout_rs_threshold: float | str | None = None
    bypass_mode: bool = False
    """Take the rollout log-probs as old log-probs."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The loss of bypass mode; `reinforce` multiplies by the importance weights, `ppo_clip` does not."""
    second_moment_threshold: PositiveFloat | None = None
    """Mask the tokens with the largest squared log-ratio until the mean of the rest is below this
    (M2PO; its paper uses 0.04); None masks none."""
    proximal: Literal["recompute", "interpolate"] = "recompute"
    """Proximal policy of decoupled PPO, around which the ratio is clipped. `recompute`: old log-probs of a forward
    pass; `interpolate` (A-3PO): between the sampling and the current policy, without that pass; weighs each token by
    π_prox/π_rollout, bounded by `rollout_is_threshold`."""


Conventions = Literal["meshrl", "verl"]


class PfPpoConfig(Config):
    """How PF-PPO resamples the rows of a batch."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: float = 2.0


class FilterGroupsConfig(Config):
    """Dynamic sampling: groups that give no gradient leave the queue, counted by reason, and others are taken."""

    enable: bool = False
    metric: str = "reward"
    """Metric by which groups are judged: `reward`, or a reward component such as `acc`. Groups whose rows are all
    equal in it are dropped; a group of one row is kept."""
    low: float | None = None
    """Also drop groups whose mean is below this (PRIME: 0.2)."""
    high: float | None = None
    """Also drop groups whose mean is above this (PRIME: 0.8)."""
    max_num_gen_batches: NonNegativeInt = 10
    """Takes of one step, refills included; then the step is made from what was kept. 0: without end."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Groups of the first take, as a multiple of `data.train_batch_size`: fewer waits for a refill. Groups that are
    good and too many leave as `oversampled`."""


class OverlongBufferConfig(Config):
    """DAPO's soft penalty on responses that come close to `data.max_response_length`."""

    enable: bool = False
    len: PositiveInt | None = None
    """Tokens before the limit in which the penalty grows; None takes a fifth of the limit, as the paper does."""
    penalty_factor: PositiveFloat = 1.0
    """The penalty at the limit."""


class DistillationConfig(Config):
    """On-policy distillation: a teacher judges every token that the policy sampled (docs/how-to/distill.md)."""

    weight: NonNegativeFloat = 0.0
    """Factor of the teacher's judgement in the advantage or, with `top_k`, in the loss; above 0, the model in
    `reference.path` is the teacher. 0: none."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of the advantage from rewards beside a teacher; 0 learns from the teacher alone."""
    max_log_ratio: PositiveFloat = 10.0
    """Bound of |log π_teacher - log π| of a token, with `top_k` of its loss, in nats: none outweighs its batch."""
    top_k: int = Field(default=0, ge=0, le=256)
    """The teacher tells its k likeliest tokens at each place, and `weight` times the forward KL over them is added to
    the loss. 0: it judges the sampled token, in the advantage."""
    min_log_prob: NegativeFloat | None = None
    """Floor of the teacher's and the policy's log-probs with `top_k` (verl: -10); below it the policy gets no
    gradient."""

    @model_validator(mode="after")
    def _teaches(self) -> Self:
        if self.top_k and not self.weight:
            raise ValueError("top_k: nothing is taught with weight 0; want a weight above 0")
        return self


@with_options("meshrl.trainer.algorithms.advantages")
class AlgorithmConfig(Config):
    """From rewards to advantages.

    At run time it also has the options of each estimator in `meshrl.trainer.algorithms.advantages`; read them with
    `algorithms.options.options`.
    """

    name: str | None = None
    """A named algorithm (docs/reference/algorithms.md), or a dotted path: its `DEFAULTS` become defaults here."""
    adv_estimator: str = "grpo"
    """A module of `meshrl.trainer.algorithms.advantages`, or a dotted path."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of an estimator named by a dotted path, checked by its own class (docs/how-to/extend.md)."""
    gamma: float = 1.0
    use_kl_in_reward: bool = False
    kl_penalty: KlEstimator = "kl"
    kl_ctrl: KlControlConfig = KlControlConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    conventions: Conventions = "meshrl"
    """Formulas where verl's own is a trap: `verl` keeps it (docs/reference/differences-from-verl.md)."""
    group_by_seat: bool = True
    """Compare each seat of `rollout.program: seats` with itself in its group; false: all are judged by the score."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    distillation: DistillationConfig = DistillationConfig()
    use_pf_ppo: bool = False
    """PF-PPO: draw the rows of a batch with replacement, weighted by how reliable their reward is."""
    pf_ppo: PfPpoConfig = PfPpoConfig()


@with_options("meshrl.trainer.algorithms.losses")
class PolicyLossConfig(Config):
    """Which policy loss, and its options.

    At run time it also has the options of each loss in `meshrl.trainer.algorithms.losses`; read them with
    `algorithms.options.options`.
    """

    loss_mode: str = "vanilla"
    """A module of `meshrl.trainer.algorithms.losses` (verl's names), or a dotted path."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a loss named by a dotted path, checked by its own class (docs/how-to/extend.md)."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """Weight of the NLL on rows with positive advantage or correct answer (VAPO uses 0.1)."""
    rollout_correction: RolloutCorrectionConfig = Field(
        default=RolloutCorrectionConfig(), exclude=True
    )
    """A copy of the recipe's `algorithm.rollout_correction`, with which `bypass_mode` and `m2po` correct."""


AggregationMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
]


class ActorConfig(Config):
    """Settings from advantages to an optimizer step."""

    optim: OptimConfig = OptimConfig()
    ppo_mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; None takes the whole batch in one."""
    ppo_epochs: PositiveInt = 1
    ppo_max_token_len_per_gpu: PositiveInt = 16_384
    """Tokens that one packed micro-batch lays: a prompt counts once for all siblings in it. Those of its rows may be
    five times as many, for attention copies a prompt's keys for each row; twice as many where layers keep a state."""
    clip_ratio: PositiveFloat = 0.2
    clip_ratio_low: PositiveFloat | None = None
    """None takes `clip_ratio`."""
    clip_ratio_high: PositiveFloat | None = None
    clip_ratio_c: float | None = Field(default=None, gt=1)
    """Dual clip bound for negative advantages; the largest ratio in the dppo losses. None takes the
    loss's own: 3, and 20 in the dppo losses."""
    use_kl_loss: bool = False
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: KlEstimator = "low_var_kl"
    entropy_coeff: float = 0.0
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the auxiliary loss that keeps a mixture's experts equally busy, as transformers computes it, over a
    micro-batch; config.json has the model's own, often 0.001. Megatron's `moe_aux_loss_coeff` times layers / experts
    of a token is about the same."""
    moe_router_bias_update_rate: NonNegativeFloat = 0.0
    """How far the bias of each expert moves after an optimizer step, towards equally busy experts, in models whose
    routers have one (DeepSeek-V3, GLM-4.5; 0.001 there). Not with LoRA, whose engines get no biases."""
    loss_agg_mode: AggregationMode = "token-mean"
    loss_scale_factor: PositiveFloat | None = None
    """The constant divisor of seq-mean-token-sum-norm; None takes `data.max_response_length`."""
    conventions: Conventions = Field(default="meshrl", exclude=True)
    """A copy of the recipe's `algorithm.conventions`."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    recompute_old_log_probs: bool | None = None
    """Compute old log-probs with the trainer's weights; False takes the rollout's, so that the clipped ratio also
    corrects for staleness. None recomputes when `queue.max_staleness` is 0 or `algorithm.rollout_correction` compares
    the two (verl always does)."""


class CriticConfig(Config):
    """The value model; made only when the algorithm asks for values (`gae`, `vapo`)."""

    path: Path | None = None
    """A Hugging Face checkpoint whose decoder it starts from; None takes `model.path`. Its head starts at 0."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    ppo_epochs: PositiveInt | None = None
    """None takes `actor.ppo_epochs`."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may move from the one that the advantages were computed with."""
    loss_agg_mode: AggregationMode = "token-mean"
    pretrain_steps: NonNegativeInt = 0
    """Steps at the start of the run that train the critic alone, on Monte Carlo returns (VAPO: 50)."""
    warmup_steps: NonNegativeInt = 0
    """Steps after those that train the critic alone, on the estimator's returns (verl's `trainer.critic_warmup`)."""


class ReferenceConfig(Config):
    """The frozen model of KL terms, or a teacher; started only when the algorithm asks for `ref_logprobs`."""

    path: Path | None = None
    """None takes `model.path`; a teacher must be named, and have the policy's vocabulary."""
    max_tokens_per_batch: PositiveInt = 16_384
    nproc: PositiveInt = 1
    """Ranks of one machine that share the weights out, with a GPU each where there are GPUs."""


def _log_rows(value: object) -> object:
    """YAML reads `off` as false."""
    if isinstance(value, bool):
        return "all" if value else "off"
    return value


Profile = Annotated[
    Literal["off", "torch", "memory", "nsys"],
    BeforeValidator(lambda value: "off" if value is False else value),
]
LogRows = Annotated[
    Literal["all", "off"] | Annotated[float, Field(gt=0, lt=1)], BeforeValidator(_log_rows)
]


class ParallelConfig(Config):
    """How the ranks share rows and model.

    `data_replicate` x `data_shard` x `sequence` x `tensor` is all ranks; the later ones are nearer neighbours.
    """

    data_replicate: PositiveInt = 1
    """Copies of the model, each sharded over the ranks of its copy (HSDP): as many as there are machines keeps the
    traffic of weights inside each."""
    data_shard: PositiveInt | None = Field(default=None, exclude=True)
    """Ranks of a copy with rows of their own, which share its weights (FSDP). None: as many as the others leave."""
    sequence: PositiveInt = Field(default=1, exclude=True)
    """Ranks that share the tokens of a micro-batch (Ulysses): a recipe's `model.ulysses_sequence_parallel_size`."""
    tensor: PositiveInt = 1
    """Ranks that share the matrices of a layer, its experts and the vocabulary, and forward the same tokens:
    neighbours on one machine. Divides the heads, those of keys too, and the number of experts; needs transformers
    5.23."""
    expert: PositiveInt = 1
    """Ranks that share the experts of each layer: whole experts on each, to which tokens travel. Divides a copy's
    ranks and the number of experts, is a multiple of `tensor`; needs transformers 5.23."""

    @property
    def least(self) -> int:
        """The ranks must be a multiple of this."""
        rows = self.sequence * self.tensor * (self.data_shard or 1)
        return self.data_replicate * math.lcm(rows, self.expert)

    def faults(self, ranks: int, named: str = "") -> Iterator[tuple[str, str]]:
        """Options that do not fit `ranks` ranks, which messages call `named`, each with one sentence."""
        key, left, named = "trainer.parallel", ranks, named or f"the {ranks} trainer ranks"
        for name in ("data_replicate", "tensor", "sequence", "data_shard"):
            size = getattr(self, name) or 1
            if left % size:
                rest = "" if left == ranks else f", of which the others leave {left}"
                yield name, f"{key}.{name}: {size} does not divide {named}{rest}"
                return
            left //= size
        if self.data_shard is not None and left > 1:
            product = ranks // left
            yield (
                "data_shard",
                f"{key}.data_shard: with the others {product} ranks, and there are {ranks}",
            )
        copy = ranks // self.data_replicate
        if copy % self.expert:
            of = "" if copy == ranks else f", {copy} a copy"
            yield "expert", f"{key}.expert: {self.expert} does not divide {named}{of}"
        elif self.expert > 1 and self.expert % self.tensor:
            yield "expert", f"{key}.expert: {self.expert} is not a multiple of tensor {self.tensor}"


class TrainerConfig(Config):
    """Length, schedule and bookkeeping of a run."""

    total_training_steps: PositiveInt | None = None
    """None: as many as `total_epochs` of the data give."""
    total_epochs: PositiveInt = 1
    nproc: PositiveInt = 1
    """Trainer ranks on each of its machines (gloo on CPU, NCCL on GPUs)."""
    nnodes: PositiveInt = 1
    """Machines of the trainer, which share `default_local_dir` (docs/how-to/several-machines.md)."""
    peer_timeout_s: PositiveFloat = 60.0
    """Seconds of silence after which one of several machines counts as lost: the others' ranks end, to be started
    again from the last checkpoint."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    save_freq: int = -1
    """Steps between checkpoints; -1 saves at the end only."""
    max_ckpt_to_keep: PositiveInt = 2
    """Number of newest checkpoints that stay."""
    keep_ckpt_every: PositiveInt | None = None
    """Checkpoints whose step is a multiple of this stay as well."""
    after_checkpoint: str | None = None
    """A function, `package.module.function` or `path/to/file.py:function`, called with `path` and `step` after each
    checkpoint, in a process of its own; its failure is a warning (docs/how-to/resume.md)."""
    copy_checkpoints_to: str | None = None
    """A path or URL that fsspec opens, `s3://bucket/prefix`, which gets a copy of each checkpoint; as many stay there
    as here (docs/how-to/resume.md)."""
    default_local_dir: Path | None = None
    """Checkpoints; None is `<run.dir>/checkpoints`."""
    resume_mode: Literal["auto", "disable"] = "auto"
    test_freq: int = -1
    """Steps between evaluations; -1 evaluates at the end only."""
    val_before_train: bool = True
    logger: tuple[str, ...] = ("console",)
    """Loggers: console, mlflow, swanlab, tensorboard, trackio, wandb, or dotted paths (docs/how-to/loggers.md).
    Metrics are always written to `<run.dir>/metrics.jsonl`."""
    project_name: str = "meshrl"
    experiment_name: str | None = None
    """None takes `run.name`."""
    log_rows: LogRows = "all"
    """Which trained and evaluated rows are kept in `<run.dir>/trajectories` (docs/reference/trajectories.md): `all`,
    `off`, or a share between 0 and 1 of the groups."""
    log_bytes: PositiveInt = 10 << 30
    """Most bytes of these files; beyond it the oldest steps go. The newest file always stays."""
    profile: Profile = "off"
    """Recording of the third training step after each start, in `<run.dir>/profile`: `torch`, a trace of operators
    for Perfetto; `memory`, allocations (on a GPU a snapshot for pytorch.org/memory_viz); `nsys`, NVTX
    ranges for `nsys profile --capture-range=cudaProfilerApi`, which needs a GPU."""
    take_wait_s: PositiveFloat = Field(default=30.0, exclude=True)
    """Length of one wait for a batch, in seconds; then the trainer logs what blocks and waits again."""

    @property
    def ranks(self) -> int:
        """Ranks of all machines."""
        return self.nnodes * self.nproc

    @property
    def log_share(self) -> float:
        """Share of the groups whose rows are kept."""
        named = {"all": 1.0, "off": 0.0}
        return named[self.log_rows] if isinstance(self.log_rows, str) else self.log_rows


class RewardModelJudgeConfig(Config):
    """Options of the judge `model`: which model, and how it is asked."""

    path: Path
    """A folder in Hugging Face form with a sequence classifier and its tokenizer."""
    class_index: NonNegativeInt = 0
    """Which output is the score."""
    max_length: PositiveInt = 4096
    """Tokens of a conversation; the oldest are left out beyond it."""
    batch_size: PositiveInt = 16
    """Conversations of one forward."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def faults(self, machine: Machine, model: Path) -> Iterator[tuple[str, str]]:
        """Options that this machine cannot satisfy, each with one sentence."""
        if machine.known(self.path) and not machine.json(self.path / "config.json"):
            yield "path", f"no reward model there: {self.path / 'config.json'} is missing"
        if self.device == "cuda" and not machine.gpus:
            yield "device", "cuda, and this machine has no GPU"
