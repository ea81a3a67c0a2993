"""A recipe's prompts as tasks: for the feeder, for evaluation through the mesh, for evaluation without it."""

from __future__ import annotations

from meshrl.config.picture_checks import PICTURE_ENGINES
from meshrl.config.recipe import Recipe
from meshrl.config.stages import eval_spec, vocabulary
from meshrl.contract.types import Task
from meshrl.images import ImageProcessor, reads_images, shared_processor
from meshrl.trainer.data.prompt_tokenizer import load_prompt_tokenizer
from meshrl.trainer.data.prompts import PromptSet, load_prompts, task_maker
from meshrl.trainer.data.reasoning_gym import gym_rows


def read_prompts(recipe: Recipe, *, held_out: bool = False) -> PromptSet:
    """The prompts for training, or those held out, in the policy's tokens.

    Raises:
        UserError: there is no tokenizer, or a row is malformed (names file and row).
    """
    data = recipe.data
    made = gym_rows(data.reasoning_gym, held_out=held_out) if data.reasoning_gym else ()
    files = data.val_files if held_out else data.train_files
    tokenizer, images = load_prompt_tokenizer(recipe.tokenizer_dir), image_processor(recipe)
    return load_prompts(files, data, tokenizer, made, images, vocabulary(recipe))


def image_processor(recipe: Recipe) -> ImageProcessor | None:
    """Reader of the pictures of prompts; None for a model, or an engine, of text. Raises UserError."""
    sees = recipe.rollout.name in PICTURE_ENGINES and reads_images(recipe.model.path)
    return shared_processor(recipe.model.path) if sees else None


def eval_tasks(recipe: Recipe) -> list[Task]:
    """The held-out prompts, `data.val_max_samples` of them at most, sampled as `rollout.val_kwargs` says."""
    spec = eval_spec(recipe)
    prompts = read_prompts(recipe, held_out=True).prompts
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
