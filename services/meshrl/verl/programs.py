"""Which program a command starts, and what that says beyond its keys: an algorithm, other defaults, or no run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshrl.contract.errors import ConfigError

ENTRY = re.compile(r"^verl(\.\w+)+$|(^|[./_])main(_\w+)?(\.py)?$|(^|[./])\w+_main(_\w+)?(\.py)?$")
"""A word that names what is started: `verl.trainer.main_ppo`, `recipe.dapo.main_dapo`, `main_ppo.py`."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlProgram:
    """Facts that follow from the program of verl's that is started."""

    algorithm: str = ""
    """`algorithm.name`: it brings the advantage and the loss, which the program computes whatever its keys say."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """verl's keys where this program's own configuration differs from `ppo_trainer.yaml`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keys of a recipe that only the program decides."""
    refused: str = ""
    """Its parts that nothing here does; the recipe is made without it."""
    instead: str = ""
    """For programs that do not train: the command of ours, or why there is none."""
    sft: bool = False
    """Whether it fine-tunes: it becomes a recipe of `meshrl sft`."""
    asynchronous: bool = False
    """verl's fully asynchronous trainer: batches are counted by `async_training`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlCommand:
    """One command of a script."""

    name: str
    """The program that it starts; empty: words without a program."""
    arguments: tuple[str, ...]
    program: VerlProgram


_PPO = VerlProgram()
_FULLY_ASYNC = VerlProgram(
    defaults={
        "async_training.staleness_threshold": 0.1,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": True,
        "rollout.total_rollout_steps": 100,
        "data.gen_batch_size": 1,
        f"{_ACTOR}.use_rollout_log_probs": True,
        "algorithm.rollout_correction.bypass_mode": True,
    },
    asynchronous=True,
)
_ONE_STEP_OFF = VerlProgram(
    defaults={"algorithm.rollout_correction.bypass_mode": True},
    settings={"queue.max_staleness": 1},
)
_DAPO = VerlProgram(defaults={"reward.reward_manager.name": "dapo"})
_SGLANG = {
    f"{_ACTOR}.optim.lr_warmup_steps": 15,
    f"{_ROLLOUT}.name": "sglang",
    f"{_ROLLOUT}.tensor_model_parallel_size": 2,
    f"{_ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}.val_kwargs.n": 2,
}
_PRIME = VerlProgram(
    algorithm="prime",
    defaults={"data.truncation": "right", f"{_ACTOR}.entropy_coeff": 0.001}
    | {"trainer.val_before_train": False},
)
_SFT = VerlProgram(sft=True)
_EVAL = VerlProgram(
    instead="it scores answers that are stored: `meshrl eval RECIPE` samples a model's answers and scores them"
)
_SAMPLE = VerlProgram(instead="it samples without training: `meshrl eval RECIPE` does, and scores")

PROGRAMS: Mapping[str, VerlProgram] = {
    "verl.trainer.main_ppo": _PPO,
    "verl.trainer.main_ppo_v0": _PPO,
    "verl.trainer.main_ppo_sync": _PPO,
    "fully_async_policy.fully_async_main": _FULLY_ASYNC,
    "one_step_off_policy.main_ppo": _ONE_STEP_OFF,
    "one_step_off_policy.async_main_ppo": _ONE_STEP_OFF,
    "partial_rollout.main_ppo": VerlProgram(settings={"rollout.on_update": "in_flight"}),
    "main_dapo": _DAPO,
    "main_entropy": _DAPO,
    "main_spin": VerlProgram(
        algorithm="spin", defaults={**_SGLANG, "trainer.log_val_generations": 0}
    ),
    "main_sppo": VerlProgram(algorithm="sppo", defaults=_SGLANG),
    "main_prime": _PRIME,
    "async_flow.grpo_main": VerlProgram(
        refused="AsyncFlow's own trainer and queue, whose keys are not verl's"
    ),
    "main_dynamo": VerlProgram(refused="rollout through NVIDIA Dynamo"),
    "main_flowrl": VerlProgram(
        refused="FlowRL's loss (flow balance with a learned partition function)"
    ),
    "gvpo_main_ppo": VerlProgram(refused="GVPO's loss"),
    "spo_main_ppo": VerlProgram(refused="SPO's values per prompt, kept over the run"),
    "main_rep_exp": VerlProgram(refused="the elliptical bonus of representation-based exploration"),
    "main_gkd": VerlProgram(refused="distillation from a teacher in the loss"),
    "main_dance": VerlProgram(
        instead="it trains image and video models; only text models are trained here"
    ),
    "main_atropos": VerlProgram(refused="Atropos environments"),
    "reward_queue.main": VerlProgram(
        refused="rewards in a queue of their own (here they are a stage always)"
    ),
    "verl.trainer.sft_trainer": _SFT,
    "verl.trainer.sft_trainer_ray": _SFT,
    "verl.trainer.fsdp_sft_trainer": _SFT,
    "verl.trainer.main_eval": _EVAL,
    "r1.main_eval": _EVAL,
    "verl.trainer.main_generation": _SAMPLE,
    "verl.trainer.main_generation_server": _SAMPLE,
    "verl.model_merger": VerlProgram(
        instead="nothing is to be merged: `meshrl export DIRECTORY` writes a checkpoint for engines"
    ),
}
"""The end of a module's name to what it says; another program that has keys of verl's is read as `main_ppo`."""


def program_of(name: str) -> VerlProgram:
    """The program that is the module or file `name`."""
    dotted = name.removesuffix(".py").replace("/", ".").lstrip(".")
    for known, program in PROGRAMS.items():
        if dotted == known or dotted.endswith(f".{known}"):
            return program
    return VerlProgram(
        refused=f"{name} is not a program of verl's that is known here: read as verl.trainer.main_ppo"
    )


def command_of(words: Sequence[str]) -> VerlCommand | None:
    """The program among the words of a command, and what follows it; None if there is none."""
    for at, word in enumerate(words):
        # A folder may be called main, too.
        names_file = "/" not in word or word.endswith(".py")
        if "=" not in word and names_file and ENTRY.search(word):
            arguments = tuple(words[at + 1 :])
            return VerlCommand(name=word, arguments=arguments, program=program_of(word))
    return None


def chosen(commands: Sequence[Sequence[str]]) -> tuple[VerlCommand | None, list[str]]:
    """The first command that trains, else the first of verl's; and the names of the other programs."""
    found = [command for words in commands if (command := command_of(words)) is not None]
    if not found:
        return None, []
    first = next((command for command in found if not command.program.instead), found[0])
    return first, [command.name for command in found if command is not first]


def refuse_other(command: VerlCommand) -> None:
    """Raises ConfigError for a program that is no training run."""
    if command.program.instead:
        raise ConfigError(f"{command.name}: {command.program.instead}")
