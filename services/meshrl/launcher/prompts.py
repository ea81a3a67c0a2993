"""A recipe's prompts as tasks: for the feeder, for evaluation through the mesh, for evaluation without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshrl.config.recipe import Recipe
from meshrl.config.stages import eval_spec
from meshrl.contract.types import Task
from meshrl.launcher.prompt_tokenizer import load_prompt_tokenizer
from meshrl.trainer.data.prompts import PromptSet, load_prompts, task_maker


def read_prompts(recipe: Recipe, files: Sequence[Path]) -> PromptSet:
    """Prompts of `files` in the policy's tokens.

    Raises:
        UserError: there is no tokenizer, or a row is malformed (names file and row).
    """
    return load_prompts(files, recipe.data, load_prompt_tokenizer(recipe.tokenizer_dir))


def eval_tasks(recipe: Recipe) -> list[Task]:
    """The held-out prompts, `data.val_max_samples` of them at most, sampled as `rollout.val_kwargs` says."""
    spec = eval_spec(recipe)
    prompts = read_prompts(recipe, recipe.data.val_files).prompts
    if recipe.data.val_max_samples >= 0:
        prompts = prompts[: recipe.data.val_max_samples]
    make = task_maker(
        spec.run,
        group_size=spec.group_size,
        sampling=recipe.rollout.val_sampling(
            max_tokens=recipe.data.max_response_length, seed=recipe.run.seed
        ),
        program=recipe.rollout.program,
        deadline_s=recipe.rollout.deadline_s,
    )
    return [make(prompt, str(prompt.index)) for prompt in prompts]
