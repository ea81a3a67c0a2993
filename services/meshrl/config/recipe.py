"""A recipe: one section per room, each with the class that the room itself defines. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, JsonValue, NonNegativeInt, PositiveInt, model_validator

from meshrl.common import plugins
from meshrl.common.config import Config
from meshrl.common.sockets import Certificates
from meshrl.config.weights import WeightsConfig
from meshrl.contract.types import SamplingParams
from meshrl.rewardd.config import RewardConfig
from meshrl.rollout.config import RolloutConfig
from meshrl.trainer.algorithms.needs import Needs, needs_of
from meshrl.trainer.config import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    ReferenceConfig,
    TrainerConfig,
)
from meshrl.transferqueue.config import QueueConfig

EVAL_SUFFIX = ".eval"
RECIPE_NAME, METRICS_NAME = "recipe.yaml", "metrics.jsonl"
"""In a run's directory."""
RUNNING_NAME = "recipe.running.yaml"
"""The recipe that services of `up` read, in the run's directory."""


class RunConfig(Config):
    """Which run this is, and where its files go."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """Letters, digits, `.`, `_`, `-`; empty takes the name of the recipe's file."""
    dir: Path | None = None
    """Logs, queue, checkpoints, metrics; null is `runs/<run.name>`."""
    seed: int = Field(default=0, ge=-(1 << 63), lt=1 << 63)
    """Seeds samplers and trainer. The draws of a row depend on its name, too, which begins with the run's: runs with
    different names sample differently."""
    trace: float = Field(default=0.0, ge=0, le=1)
    """Share of the groups whose rows are traced from prompt to gradient, with the steps of the trainer, in
    `<run.dir>/spans` (docs/how-to/trace.md); 0 traces nothing."""
    trace_otlp: str | None = Field(default=None, pattern="^https?://")
    """An OTLP/HTTP endpoint that gets the spans too: `http://localhost:4318/v1/traces`."""

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self.dir if self.dir is not None else Path("runs") / self.name


CredentialRole: TypeAlias = Literal[
    "feeder",
    "rollout",
    "reward",
    "reference",
    "stage",
    "trainer",
    "operator",
    "submitter",
    "tuner",
    "reader",
]


class TlsConfig(Config):
    """Certificates, as PEM files. With none, connections are not encrypted."""

    cert: Path | None = None
    """Certificate of a service, and of a client if `client_ca` asks for one; it must name the hosts called."""
    key: Path | None = None
    """Private key of `cert`."""
    ca: Path | None = None
    """Authority that must have signed a service's certificate; null: the machine's own authorities."""
    client_ca: Path | None = None
    """Authority that must have signed a client's certificate (mutual TLS); null asks for no certificate."""
    roles: dict[str, CredentialRole] = Field(default_factory=dict)
    """Role of a client by the common name or a SAN of its certificate. With any, certificates without a role are
    refused."""

    @model_validator(mode="after")
    def _fits(self) -> TlsConfig:
        _ = self.certificates
        return self

    @property
    def certificates(self) -> Certificates:
        """The files, as servers and clients read them."""
        return Certificates(cert=self.cert, key=self.key, ca=self.ca, client_ca=self.client_ca)


class PlacementConfig(Config):
    """Which GPUs each service gets, on machines that have any: `auto` divides them (docs/how-to/gpus.md)."""

    trainer: Literal["auto"] | NonNegativeInt = "auto"
    """GPUs of the trainer, with one rank on each; `auto`: `trainer.nproc` where the recipe names it, else what the
    rollout workers leave, at most half of all where its state fits on that. 0: the trainer computes on the CPU."""
    rollout: Literal["auto"] | NonNegativeInt = "auto"
    """GPUs of each rollout worker, the tensor-parallel size of its engine; `auto`: as few as the model fits on. Where
    the recipe does not name `rollout.workers`, there are as many as find room. 0: engines have no GPU from here."""
    reference: Literal["auto", 0, 1] = "auto"
    """GPUs of the reference model; 0: it computes on the CPU. `auto`: one for itself on machines with 4 or more, else
    the trainer's last one."""
    colocate: Literal["auto", "time_sliced"] | bool = "auto"
    """Rollout workers share the trainer's GPUs, each with a share of their memory; `auto`: on a single GPU only.
    `time_sliced`: trainer and engines take turns on one GPU, and each has nearly all of its memory meanwhile (on a
    machine without GPUs, on its CPU)."""
    machines: dict[str, PositiveInt] = Field(default_factory=dict)
    """Host names and numbers of GPUs, for services that are started on several machines; trainer and reference are on
    the first one. Empty: the machine where services start."""


class TinkerConfig(Config):
    """The server of models that callers train (docs/how-to/tinker.md)."""

    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of the HTTP API, on the service's own host; 0 picks a free one."""


class StageConfig(Config):
    """A stage of your own."""

    kind: str
    """A dotted path to the module that defines it."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of the module's `Config`."""
    after: tuple[str, ...] = ()
    """Stages whose columns a row must have before this one leases it; those whose columns it reads are implied."""
    workers: PositiveInt | None = None
    """Processes that share the work, named `<stage>-0` and so on; null is one process, named as the stage."""


class Recipe(Config):
    """Everything that a run is made from."""

    run: RunConfig = RunConfig()
    """Name, directory and seed of the run."""
    model: ModelConfig
    """The policy."""
    data: DataConfig = DataConfig()
    """Prompts to train and evaluate on."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Settings from rewards to advantages."""
    actor: ActorConfig = ActorConfig()
    """Settings from advantages to an optimizer step."""
    critic: CriticConfig = CriticConfig()
    """The value model of algorithms that need one."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of KL terms."""
    trainer: TrainerConfig = TrainerConfig()
    """Length, schedule and bookkeeping."""
    rollout: RolloutConfig = RolloutConfig()
    """How answers are sampled, by how many workers."""
    reward: RewardConfig = RewardConfig()
    """How answers are scored."""
    queue: QueueConfig = QueueConfig()
    """The transfer queue: store, staleness, leases."""
    weights: WeightsConfig = WeightsConfig()
    """How new weights reach the rollout workers."""
    placement: PlacementConfig = PlacementConfig()
    """Which GPUs each service gets."""
    tinker: TinkerConfig | None = None
    """Training and sampling for loops from outside: `meshrl up` then starts this server, and nothing else."""
    stages: dict[str, StageConfig] = Field(default_factory=dict)
    """Stages beside the built-in rollout, reward and reference, by name."""
    tls: TlsConfig = TlsConfig()
    """Certificates: every connection between services is encrypted once there is one."""

    @property
    def queue_path(self) -> Path:
        """Folder of the queue's store."""
        return self.queue.path if self.queue.path is not None else self.run.path / "queue"

    @property
    def checkpoint_dir(self) -> Path:
        """Folder of the trainer's checkpoints."""
        return self.trainer.default_local_dir or self.run.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per step."""
        return self.run.path / METRICS_NAME

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer."""
        return self.model.tokenizer_path or self.model.path

    @property
    def encrypted(self) -> bool:
        """Whether all traffic between machines is encrypted: with certificates, and nothing over gloo."""
        gloo = self.weights.may_use_gloo or self.trainer.nnodes > 1
        return self.tls.cert is not None and not gloo

    @property
    def takes_turns(self) -> bool:
        """Trainer and engines use one device in turns."""
        return self.placement.colocate == "time_sliced"

    @property
    def parallel(self) -> ParallelConfig:
        """How the trainer's ranks share rows and model, those of a sequence among them."""
        shared = self.model.ulysses_sequence_parallel_size
        return self.trainer.parallel.model_copy(update={"sequence": shared})

    @property
    def reference_model(self) -> ModelConfig:
        """The frozen model: the policy's own start unless `reference.path` names another."""
        return self.model.model_copy(
            update={
                "path": self.reference.path or self.model.path,
                "tokenizer_path": self.tokenizer_dir,
            }
        )


def names(section: Config, key: str) -> bool:
    """Whether the recipe itself says what `key` of this section is; else it follows from the machine."""
    return key in section.model_fields_set


def algorithm_needs(recipe: Recipe) -> Needs:
    """The needs of the recipe's algorithm."""
    return needs_of(recipe.algorithm, recipe.actor)


def needs_reference(recipe: Recipe) -> bool:
    """True when the algorithm reads `ref_logprobs`."""
    return algorithm_needs(recipe).reference


def group_rows(recipe: Recipe) -> int:
    """Rows of one prompt: the samples, and the greedy baseline of algorithms that want one."""
    return recipe.rollout.n + algorithm_needs(recipe).extra_rows


def train_sampling(recipe: Recipe) -> SamplingParams:
    """How training rows are sampled, greedy baselines included."""
    sampling = recipe.rollout.sampling(
        max_tokens=recipe.data.max_response_length, seed=recipe.run.seed
    )
    return replace(sampling, greedy_siblings=algorithm_needs(recipe).extra_rows)


def groups_taken(recipe: Recipe) -> int:
    """Groups that one step may take at once: with oversampling more than it trains on."""
    batch, judged = recipe.data.train_batch_size, recipe.algorithm.filter_groups
    return math.ceil(batch * judged.oversample) if judged.enable else batch


def uses_gateway(recipe: Recipe) -> bool:
    """True when agents lead the conversations of the run."""
    program = recipe.rollout.program
    return bool(plugins.constant("meshrl.rollout.programs", program, "USES_GATEWAY", False))


def session_options(recipe: Recipe) -> Mapping[str, Any]:
    """Options of the sessions that agents lead; `verifiers` has them in a section of its own."""
    options = recipe.rollout.program_options
    own = options.get("session")
    return own if isinstance(own, Mapping) else options


def posts_rewards(recipe: Recipe) -> bool:
    """Whether the leader of a conversation may give its reward."""
    program, options = recipe.rollout.program, recipe.rollout.program_options
    scores = plugins.constant("meshrl.rollout.programs", program, "POSTS_REWARD", False)
    return uses_gateway(recipe) or bool(scores or options.get("posts_reward"))


def trains_each_branch(recipe: Recipe) -> bool:
    """True when a row has all branches of its conversation, or several seats, and the trainer takes it apart."""
    program = recipe.rollout.program
    seats = plugins.constant("meshrl.rollout.programs", program, "TRAINS_SEATS", False)
    return bool(seats) or session_options(recipe).get("branch") == "each"


def has_evaluation(recipe: Recipe) -> bool:
    """True when held-out prompts are given."""
    gym = recipe.data.reasoning_gym
    return bool(recipe.data.val_files) or (gym is not None and gym.val_size > 0)
