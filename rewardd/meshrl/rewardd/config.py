"""The `reward:` section of a recipe: which functions score, where, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from meshrl.common.config import Config
from meshrl.sandbox.limits import Limits, ScoringLimits
from meshrl.sandbox.sandbox import Isolation


class RegistryConfig(Config):
    """Submitted reward functions: limits, servers and access."""

    name: str = Field(default="reward", pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    """The submitted name that scores the run: its current version, as soon as there is one; before that, the
    functions of this recipe."""
    dir: Path | None = None
    """Folder of versions and names; null is `<run.dir>/rewards`."""
    http_port: int | None = Field(default=0, ge=0, le=65535)
    """Port of the HTTP server, on the service's own host; 0 picks a free one, null starts no HTTP server."""
    tokens: Path | None = None
    """A YAML file of tokens (`meshrl reward token` writes its lines). They count beside the credentials
    of the run, and alone beyond loopback, where mutual TLS is the other choice."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Names by which clients call the HTTP server, besides `localhost`, its own host and IP addresses; a request for
    another Host is refused."""
    allowed_dependencies: list[str] = Field(default_factory=list)
    """Packages that a submission may depend on, by name."""
    max_versions: PositiveInt = Field(default=1000, exclude=True)
    """Versions stored in all. The oldest that no name ever pointed to makes room, else a submission is refused."""

    requests_per_minute: ClassVar[float] = 1200.0
    """Requests of one caller, over HTTP and gRPC together."""
    max_request_bytes: ClassVar[int] = 32 << 20
    """Size of one whole HTTP request. A wheel travels as base64, a third larger than it is."""
    max_source_bytes: ClassVar[int] = 1 << 20
    """Size of a submitted Python file."""
    max_wheel_bytes: ClassVar[int] = 16 << 20
    """Size of a submitted wheel, packed."""
    max_unpacked_bytes: ClassVar[int] = 64 << 20
    """Size of a submitted wheel, unpacked."""
    max_tests: ClassVar[int] = 256
    """Tests of one submission."""
    submissions_per_minute: ClassVar[float] = 60.0
    """Submissions of one caller."""
    keep_samples: ClassVar[int] = 4096
    """Scored samples that are kept in memory, for `compare`; the newest stay."""


JUDGES = "meshrl.rewardd.judges"
START_DEADLINE_S = 60.0
"""Seconds that a scoring process may take to import this recipe's functions, torch among them."""
OTHER_PACKAGES: Mapping[str, str] = {"model": "meshrl.trainer.model.reward_model"}
"""Kinds that live in another package and are imported by name, because this package imports no torch."""


class RewardFunctionConfig(Config):
    """One reward function among several: the reward is the sum of `weight` times score."""

    name: str
    """A module of `meshrl.rewardd.rewards`, a dotted module with a `compute_score`, or with `path` a function."""
    path: Path | None = None
    """A Python file that defines `name`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    gate: float | None = Field(default=None, allow_inf_nan=False)
    """Below this score the reward is this function's alone: `weight` times its score; the others do not count."""
    label: str | None = None
    """The name of its component in metrics; None takes `name`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function with every sample; a built-in checks them against its own Config."""

    @property
    def component(self) -> str:
        """The name under which this function's own score is reported."""
        return self.label or self.name


class JudgeConfig(Config):
    """A judge that is not a Python function: one part of the reward."""

    kind: str
    """`http`, `grpc`, `pooling` (a reward model on vLLM), `generative` (a language model as judge), `model` (a reward
    model in this process), or a dotted module with a `Config` and a `build`."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    gate: float | None = Field(default=None, allow_inf_nan=False)
    """Below this score the reward is this part's alone."""
    label: str | None = None
    """The name of its component; null takes `kind`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Checked against the kind's own Config."""

    @property
    def component(self) -> str:
        """The name under which its score is reported."""
        return self.label or self.kind


class CustomRewardFunctionConfig(Config):
    """One function of your own, under verl's keys."""

    path: Path | None = None
    """A Python file. None: no custom function."""
    name: str = "compute_score"
    """The function in it: `(data_source, solution_str, ground_truth, extra_info=None, **reward_kwargs)`."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed with every sample."""


class RewardConfig(Config):
    """Which functions score, where, and within which limits. If none is named, `verl` scores by data_source."""

    functions: list[RewardFunctionConfig] = Field(default_factory=list)
    """The weighted sum of these; empty and no custom function: the built-in `verl`."""
    judges: list[JudgeConfig] = Field(default_factory=list)
    """Services and models that score beside the functions, or alone; the weighted scores are added up."""
    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    """Joins `functions` with weight 1 when its `path` is set."""
    workers: PositiveInt = 1
    """Scoring processes."""
    deadline_s: PositiveFloat = 30.0
    """Wall-clock seconds of one sample, all functions together; then its process is killed."""
    own_timeout: Literal["infra_fault", "policy_fault"] = "infra_fault"
    """A sample on which a function of your own, or one beside it, runs out of time or memory: `infra_fault` delivers
    its row again, and in the end leaves it out; `policy_fault` scores it as an empty response, at most 0. Built-in
    rewards alone always do the latter."""
    concurrency: PositiveInt = 32
    """Samples that an `async def` function scores at once in each process. Lower it for a service that refuses so
    many requests at once, raise it for one that answers slowly."""
    registry: RegistryConfig = RegistryConfig()
    """Functions submitted during a run."""
    mixed_versions: Literal["rescore", "allow"] = "rescore"
    """How to treat a batch whose rows were scored by several reward versions: `rescore` scores its older rows again
    with the current version, `allow` trains it as it is."""
    token_rewards: bool = False
    """Reward each token, with the `token_rewards` that functions return (or the steps of kind `process`); a judge
    that gives none rewards the last token. It adds a column, so the run's first start fixes it."""
    sandbox: Isolation = Isolation.STRICT
    """The isolation of submitted functions: `strict` (bubblewrap; without it they are refused), `weak` (restrictions
    that a process can put on itself) or `off`. See docs/reference/reward-sandbox.md."""
    recipe_sandbox: Isolation = Isolation.OFF
    """The isolation of the functions that this recipe names. In a sandbox they see no network and only the
    files of their own folder. The reward `code` needs `strict`."""
    limits: ScoringLimits = ScoringLimits()
    """Limits of a submitted function, which may ask for lower ones, and of this recipe's functions in a sandbox;
    without a sandbox those have only the limits that the recipe sets."""

    @model_validator(mode="after")
    def _names_differ(self) -> RewardConfig:
        names = [f.component for f in self.scorers] + [j.component for j in self.judges]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward functions are called {name!r}: give one a `label`")
        return self

    @property
    def scorers(self) -> tuple[RewardFunctionConfig, ...]:
        """The functions that score, the custom one last, or `verl` when nothing is named."""
        custom = self.custom_reward_function
        scorers = tuple(self.functions)
        if custom.path is not None:
            scorers += (
                RewardFunctionConfig(
                    name=custom.name, path=custom.path, kwargs=custom.reward_kwargs
                ),
            )
        return scorers if scorers or self.judges else (RewardFunctionConfig(name="verl"),)

    @property
    def submitted_limits(self) -> Limits:
        """The most that a submitted function gets."""
        return Limits(**self.limits.model_dump())

    @property
    def recipe_limits(self) -> Limits:
        """Limits of the functions that this recipe names; without a sandbox only those that the recipe sets."""
        limits = Limits(**self.limits.model_dump())
        if self.recipe_sandbox is Isolation.OFF:
            unlimited = Limits(
                memory_bytes=None,
                processes=None,
                open_files=None,
                tmp_bytes=None,
                output_bytes=None,
            )
            limits = unlimited.model_copy(update=self.limits.model_dump(exclude_unset=True))
        return limits.model_copy(
            update={"deadline_s": self.deadline_s, "start_deadline_s": START_DEADLINE_S}
        )
