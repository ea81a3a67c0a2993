"""Requirements of an algorithm on the mesh, decided once from its configuration. Imports no torch.

The columns that services write, the models that the trainer trains beside the policy, the passes that it makes before
an update: recipe, queue and trainer all ask here, so that they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshrl.common import plugins
from meshrl.contract.errors import ConfigError
from meshrl.contract.types import REFERENCE_TOP
from meshrl.trainer.algorithms.advantages.gdpo import Options as GdpoOptions
from meshrl.trainer.algorithms.losses.dpo import Options as DpoOptions
from meshrl.trainer.algorithms.options import ADVANTAGES, LOSSES, check_options, options
from meshrl.trainer.algorithms.rollout_correction import parse, parse_threshold
from meshrl.trainer.config import ActorConfig, AlgorithmConfig, RolloutCorrectionConfig

PROVIDED = frozenset(
    {
        "old_logprobs",
        "sum_pi_squared",
        "reward_components",
        "group_sizes",
        "values",
        "implicit_rewards",
        "reward_baselines",
        "steps",
        "data_answers",
    }
)
"""Fields of AdvantageBatch that this mesh can fill, besides the reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Requirements of one algorithm."""

    reference: bool
    """`ref_logprobs` of every row: a reference service."""
    top: bool
    """The tokens that a teacher thinks likeliest at each place of every row."""
    critic: bool
    """Values: a value model beside the policy."""
    implicit_reward: bool
    """Process rewards: PRIME's reward model beside the policy."""
    greedy: bool
    """One more row per group, sampled greedily; it is not trained, its reward is the group's baseline."""
    steps: bool
    """Start of each step of a row, and the observation that the step answers."""
    data_answers: bool
    """The data's own answer as one more row beside each: the trainer tokenises it."""
    old_logprobs: bool
    """Log-probs before the update, for more than the loss."""
    sum_pi_squared: bool
    """Σ_v π(v)² of every token before the update."""
    whole_groups: bool
    """The loss compares rows of a group, which must then share a micro-batch."""

    @property
    def extra_rows(self) -> int:
        """Rows of a group besides the `rollout.n` trained ones."""
        return int(self.greedy)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to fetch besides those that every algorithm needs."""
        reference = ("ref_logprobs",) if self.reference else ()
        top = REFERENCE_TOP if self.top else ()
        return (*reference, *top)


def needs_of(algorithm: AlgorithmConfig, actor: ActorConfig) -> Needs:
    """The needs of an algorithm: the `NEEDS` of its estimator and loss, and those of its other options."""
    estimator = estimator_needs(algorithm)
    loss = loss_name(algorithm, actor)
    reads = set(plugins.constant(LOSSES, loss, "NEEDS", ()))
    if options(actor.policy_loss, DpoOptions).dpo_reference_free:
        reads.discard("ref_logprobs")
    implicit = "implicit_rewards" in estimator
    return Needs(
        reference=(
            algorithm.use_kl_in_reward
            or actor.use_kl_loss
            or implicit
            or "ref_logprobs" in reads
            or algorithm.distillation.weight > 0
        ),
        top=algorithm.distillation.top_k > 0,
        critic="values" in estimator,
        implicit_reward=implicit,
        greedy="reward_baselines" in estimator,
        steps="steps" in estimator,
        data_answers="data_answers" in estimator,
        old_logprobs=(
            algorithm.use_kl_in_reward
            or corrects(algorithm)
            or algorithm.use_pf_ppo
            or "old_logprobs" in estimator
        ),
        sum_pi_squared="sum_pi_squared" in estimator,
        whole_groups=bool(plugins.constant(LOSSES, loss, "WHOLE_GROUPS", False)),
    )


def estimator_needs(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """The fields of AdvantageBatch that the estimator reads."""
    return tuple(plugins.constant(ADVANTAGES, algorithm.adv_estimator, "NEEDS", ()))


def cannot_learn(algorithm: AlgorithmConfig, actor: ActorConfig, *, rows: int, greedy: bool) -> str:
    """Why groups of `rows` rows, `greedy` ones alike, give no gradient; empty where they may."""
    if algorithm.distillation.weight or "data_answers" in estimator_needs(algorithm):
        return ""  # a teacher judges each token of a row; the data's answer makes a pair of it
    alone = rows == 1 and algorithm.conventions != "verl"
    name = algorithm.adv_estimator
    if alone and plugins.constant(ADVANTAGES, name, "GROUP_BASELINE", False):
        return (
            f"algorithm.adv_estimator {name} compares the rows of a group, and a group of one row has advantage 0:"
            " nothing is learned; raise rollout.n"
        )
    if greedy and rows > 1 and plugins.constant(ADVANTAGES, name, "GROUP_BASELINE", False):
        return (
            f"algorithm.adv_estimator {name} compares the rows of a group, and greedy ones are all alike: nothing is"
            " learned; want rollout.temperature above 0, and rollout.top_k other than 1"
        )
    if rows == 1 and plugins.constant(LOSSES, loss_name(algorithm, actor), "WHOLE_GROUPS", False):
        return (
            f"actor.policy_loss.loss_mode {loss_name(algorithm, actor)} compares the rows of a group: nothing is"
            " learned from groups of one; raise rollout.n"
        )
    return ""


def loss_name(algorithm: AlgorithmConfig, actor: ActorConfig) -> str:
    """The loss that is computed: bypass mode has one of its own."""
    bypass = algorithm.rollout_correction.bypass_mode
    return "bypass_mode" if bypass else actor.policy_loss.loss_mode


def corrects(algorithm: AlgorithmConfig) -> bool:
    """True when tokens are weighed or rejected before the loss; bypass mode and `interpolate` do it inside."""
    correction = algorithm.rollout_correction
    if correction.bypass_mode:
        return False
    weighs = correction.rollout_is is not None and correction.proximal == "recompute"
    return (
        weighs
        or correction.rollout_rs is not None
        or correction.second_moment_threshold is not None
    )


def rollout_is_old(algorithm: AlgorithmConfig, actor: ActorConfig, *, on_policy: bool) -> bool:
    """True when the rollout's log-probs are used as the old policy's.

    `on_policy`: `queue.max_staleness` is 0.

    Raises:
        ConfigError: they are, and a correction is to compare the two.
    """
    correction = algorithm.rollout_correction
    if "data_answers" in estimator_needs(algorithm):
        return False  # nobody sampled these
    if correction.proximal == "interpolate" and (corrects(algorithm) or correction.bypass_mode):
        raise ConfigError(
            "algorithm.rollout_correction.proximal: interpolate corrects by itself; leave bypass_mode, rollout_rs and"
            " second_moment_threshold out"
        )
    if correction.bypass_mode or correction.proximal == "interpolate":
        return True
    if actor.recompute_old_log_probs is False and corrects(algorithm):
        raise ConfigError(
            "actor.recompute_old_log_probs is false, so algorithm.rollout_correction would compare the rollout's"
            " log-probs with themselves; leave it null, or set algorithm.rollout_correction.bypass_mode"
        )
    if actor.recompute_old_log_probs is None:
        return not (on_policy or corrects(algorithm))
    return not actor.recompute_old_log_probs


def check(algorithm: AlgorithmConfig, actor: ActorConfig) -> None:
    """Check that the mesh can provide what the algorithm needs, and the options of its plug-ins.

    Raises:
        ConfigError: a need that no service provides, or wrong options.
    """
    loss = actor.policy_loss
    check_options(ADVANTAGES, algorithm.adv_estimator, algorithm.options, where="algorithm.options")
    check_options(LOSSES, loss.loss_mode, loss.options, where="actor.policy_loss.options")
    missing = [need for need in estimator_needs(algorithm) if need not in PROVIDED]
    if missing:
        raise ConfigError(
            f"algorithm.adv_estimator {algorithm.adv_estimator} needs {', '.join(missing)}, which no service"
            f" provides (there are: the reward, {', '.join(sorted(PROVIDED))})"
        )
    for key in plugins.constant(LOSSES, loss_name(algorithm, actor), "REQUIRED", ()):
        if getattr(loss, key, None) is None:
            raise ConfigError(
                f"actor.policy_loss.{key} is missing: the loss {loss.loss_mode} has no default for it",
                key=f"actor.policy_loss.{key}",
            )
    _check_gdpo(options(algorithm, GdpoOptions))
    mode = loss_name(algorithm, actor)
    if "data_answers" in estimator_needs(algorithm):
        _check_data_answers(algorithm, actor)
    if algorithm.distillation.weight and plugins.constant(LOSSES, mode, "OF_ROWS", False):
        raise ConfigError(
            f"algorithm.distillation.weight: the loss {mode} reads one number of a row, and a teacher judges tokens;"
            " want 0, or a loss over tokens such as vanilla",
            key="algorithm.distillation.weight",
        )
    _check_bounds(algorithm.rollout_correction)
    rollout_is_old(algorithm, actor, on_policy=False)


def _check_data_answers(algorithm: AlgorithmConfig, actor: ActorConfig) -> None:
    """Raises ConfigError for whatever reads of a row what the data's answers do not have."""
    at = f"algorithm.adv_estimator {algorithm.adv_estimator}"
    correction = algorithm.rollout_correction
    for wrong, key, want in (
        (loss_name(algorithm, actor) != "spin", "actor.policy_loss.loss_mode", "spin"),
        (needs_of(algorithm, actor).reference, "actor.use_kl_loss", "no reference"),
        (corrects(algorithm) or correction.bypass_mode, "algorithm.rollout_correction", "none"),
        (
            correction.proximal == "interpolate",
            "algorithm.rollout_correction.proximal",
            "recompute",
        ),
        (actor.recompute_old_log_probs is False, "actor.recompute_old_log_probs", "null"),
        (algorithm.use_pf_ppo, "algorithm.use_pf_ppo", "false"),
    ):
        if wrong:
            raise ConfigError(f"{key}: {at} pairs rows that were not sampled; want {want}", key=key)


def _check_bounds(correction: RolloutCorrectionConfig) -> None:
    """Raises ConfigError for statistics or thresholds that the first step would refuse."""
    at = "algorithm.rollout_correction"
    for key, parsed in (
        ("rollout_is_threshold", lambda: parse_threshold(correction.rollout_is_threshold)),
        (
            "rollout_rs",
            lambda: (
                correction.rollout_rs
                and parse(correction.rollout_rs, correction.rollout_rs_threshold)
            ),
        ),
    ):
        try:
            parsed()
        except ConfigError as error:
            raise ConfigError(f"{at}.{key}: {error}", key=f"{at}.{key}") from error


def _check_gdpo(own: GdpoOptions) -> None:
    keys, weights = own.gdpo_reward_keys, own.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights has {len(weights)} entries for {len(keys)} keys"
            " (algorithm.gdpo_reward_keys)",
            key="algorithm.gdpo_reward_weights",
        )
