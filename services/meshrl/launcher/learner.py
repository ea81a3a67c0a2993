"""From a recipe to what learns: the policy, its objective, and the models that the objective asks for beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from meshrl.config.recipe import Recipe, algorithm_needs, trains_each_branch
from meshrl.contract.types import Int32
from meshrl.launcher.prompts import read_prompts
from meshrl.trainer.algorithms.advantages.prime import Options as PrimeOptions
from meshrl.trainer.algorithms.needs import rollout_is_old
from meshrl.trainer.algorithms.options import options
from meshrl.trainer.data.prompts import own_answer
from meshrl.trainer.learner.beside import RewardLearner, ValueLearner, build_critic
from meshrl.trainer.learner.learner import Learner, RowContents, StepSettings
from meshrl.trainer.learner.optimizer import Optimizers
from meshrl.trainer.learner.policy_gradient import PolicyGradient
from meshrl.trainer.model.policy import build_policy, open_hf
from meshrl.trainer.model.vision import VisionReader
from meshrl.trainer.offline.turn_ends import ended
from meshrl.trainer.ranks.world import World


def build_learner(recipe: Recipe, total_steps: int | None, world: World) -> Learner:
    """Build the learner of one rank. Every rank calls this.

    Raises:
        UserError: a model that cannot be loaded. ConfigError: an algorithm whose inputs are missing.
    """
    needs = algorithm_needs(recipe)
    policy = build_policy(_opened(recipe.model.path, recipe), world, recipe.model)
    on_policy = recipe.queue.max_staleness == 0
    sampled = rollout_is_old(recipe.algorithm, recipe.actor, on_policy=on_policy)
    actor = recipe.actor.model_copy(update={"recompute_old_log_probs": not sampled})
    return Learner(
        policy,
        Optimizers(policy, actor.optim),
        PolicyGradient(
            recipe.algorithm, actor, max_response_length=recipe.data.max_response_length
        ),
        world,
        StepSettings(
            actor=actor,
            temperature=_temperature(recipe),
            seed=recipe.run.seed,
            total_steps=total_steps,
        ),
        RowContents(
            token_rewards=recipe.reward.token_rewards,
            answers=_answers(recipe) if needs.data_answers else None,
            parts=trains_each_branch(recipe),
            by_seat=recipe.algorithm.group_by_seat,
            routed_experts=recipe.rollout.routing_replay,
            reader=VisionReader(recipe.model.path, policy.hf) if policy.tower is not None else None,
        ),
        critic=_critic(recipe, total_steps, world) if needs.critic else None,
        rewarder=_rewarder(recipe, total_steps, world) if needs.implicit_reward else None,
    )


def _opened(path: Path, recipe: Recipe) -> Any:
    """A model of the run, without its weights."""
    return open_hf(path, trust_remote_code=recipe.model.trust_remote_code)


def training_steps(recipe: Recipe) -> int:
    """Steps of a run: given, or what the data give; the last one may be smaller. The learning rate ends there."""
    if recipe.trainer.total_training_steps is not None:
        return recipe.trainer.total_training_steps
    prompts = read_prompts(recipe).prompts
    return math.ceil(len(prompts) * recipe.trainer.total_epochs / recipe.data.train_batch_size)


def _answers(recipe: Recipe) -> dict[int, Int32]:
    """The data's own answers by the number of their prompt, as the policy would end them, as long as it may speak."""
    tokenizer: Any = AutoTokenizer.from_pretrained(recipe.tokenizer_dir)
    found = {}
    for prompt in read_prompts(recipe).prompts:
        text = own_answer(prompt.response, prompt.where, recipe.data)
        text = ended(text, tokenizer, prompt.where, recipe.data.apply_chat_template_kwargs)
        ids = tokenizer.encode(text, add_special_tokens=False)
        found[prompt.index] = np.array(ids[: recipe.data.max_response_length], dtype=np.int32)
    return found


def _temperature(recipe: Recipe) -> float:
    """Greedy sampling has no temperature to divide by."""
    return recipe.rollout.temperature or 1.0


def _critic(recipe: Recipe, total_steps: int | None, world: World) -> ValueLearner:
    config = recipe.critic
    critic = build_critic(_opened(config.path or recipe.model.path, recipe), world, recipe.model)
    return ValueLearner(
        critic,
        Optimizers(critic, config.optim),
        config,
        world,
        epochs=config.ppo_epochs or recipe.actor.ppo_epochs,
        gamma=recipe.algorithm.gamma,
        max_response_length=recipe.data.max_response_length,
        total_steps=total_steps,
    )


def _rewarder(recipe: Recipe, total_steps: int | None, world: World) -> RewardLearner:
    # It starts as the reference does: before its first update every process reward is 0.
    model = build_policy(_opened(recipe.reference_model.path, recipe), world, recipe.model)
    config = options(recipe.algorithm, PrimeOptions).prime
    return RewardLearner(
        model,
        Optimizers(model, config.optim),
        config,
        world,
        temperature=_temperature(recipe),
        total_steps=total_steps,
    )
