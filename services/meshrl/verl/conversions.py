"""Conversions that are more than another name: other units, several keys to one, values of other kinds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from meshrl.common.plugins import known
from meshrl.config.hub import repository_of
from meshrl.config.machine import ThisMachine
from meshrl.trainer.model.untrainable import WANTED, refusal, refusal_of_name
from meshrl.verl.rules import (
    KEYWORD,
    Conversion,
    Convert,
    Given,
    KeyStatus,
    as_list,
    configured,
    expanded,
    no,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
TEACHERS = "distillation.teacher_models"
ONE_TEACHER = "teacher_model"
UNBOUNDED = 1e6
"""Nats that no token reaches: verl's null."""
CORRECTION = "algorithm.rollout_correction"
PACKS = "rows are packed to a token budget"
BUDGET = "actor.ppo_max_token_len_per_gpu"


@configured
def path_to(ours: str, value: Any, given: Given) -> Conversion:
    """A path, `~` replaced."""
    return Conversion(settings={ours: expanded(value)}) if value else Conversion(note="none")


def model_path(value: Any, given: Given) -> Conversion:
    """A checkpoint directory, or a name of the hub."""
    path = expanded(value)
    hub = repository_of(path, dataset=False, machine=ThisMachine())
    note = "a model of the Hugging Face hub, downloaded where it is not in the cache" if hub else ""
    described = ThisMachine().json(Path(path) / "config.json")
    why = refusal_of_name(hub.name) if hub else refusal(described)
    return Conversion(
        status=KeyStatus.REFUSED if why else KeyStatus.MAPPED,
        settings={"model.path": path},
        note=f"{why}; {WANTED}" if why else note,
    )


def positions(value: Any, given: Given) -> Conversion:
    """How long rows may be. Rotary positions are computed from it only where the checkpoint scales them."""
    path = Path(expanded(given.get(f"{MODEL}.path"))) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
    scaled = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaled.get("rope_type", scaled.get("type", "default"))
    if kind != "default":
        return no(
            f"positions of rope type {kind} depend on it: change the checkpoint's config.json"
        )
    note = "rows decide: `config check` compares the longest with the checkpoint's config.json"
    return Conversion(note=note)


def compute_type(value: Any, given: Given) -> Conversion:
    """Type of matrix products."""
    full = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(value), value)
    if full == "float16":
        return no(
            "gradients are not scaled, so that float16 would lose small ones: bfloat16 or float32"
        )
    return Conversion(
        settings={"model.param_dtype": full}, note="compute type; master weights are float32"
    )


@configured
def pair(ours: str, value: Any, given: Given) -> Conversion:
    """A list, also where quotes make it a text."""
    found = json.loads(value) if isinstance(value, str) else value
    return Conversion(settings={ours: found})


@configured
def files_to(ours: str, value: Any, given: Given) -> Conversion:
    """One file or a list of them."""
    return Conversion(settings={ours: [expanded(path) for path in as_list(value)]})


@configured
def name_in(package: str, ours: str, value: Any, given: Given) -> Conversion:
    """A name that a file of ours must have too."""
    if value in known(package):
        return Conversion(settings={ours: value})
    return no(
        f"there is no {value!r} here ({ours}: {', '.join(known(package))}); write one: docs/how-to/extend.md"
    )


def only(*values: Any, note: str, instead: str) -> Convert:
    """Refused but for these values, which are what the mesh does."""

    def convert(value: Any, given: Given) -> Conversion:
        return Conversion(note=note) if value in values else no(instead)

    return convert


@configured
def row_budget(ours: str, dynamic: str, value: Any, given: Given) -> Conversion:
    """Rows of a forward pass as tokens: rows x longest row."""
    if value is None:
        return Conversion(note=PACKS)
    if given.get(dynamic, given.get(f"{ACTOR}.use_dynamic_bsz")):
        return Conversion(
            status=KeyStatus.IGNORED, note="use_dynamic_bsz: the token budget decides"
        )
    rows = int(value)
    return Conversion(
        settings={ours: rows * given.row_tokens},
        note=f"{rows} rows x {given.row_tokens} tokens (the same gradient for any split)",
    )


@configured
def token_budget(ours: str, dynamic: str, value: Any, given: Given) -> Conversion:
    """Tokens of a forward pass, where verl reads them; times the ranks that share a row."""
    if not given.get(dynamic, given.get(f"{ACTOR}.use_dynamic_bsz")):
        return Conversion(
            status=KeyStatus.IGNORED, note="use_dynamic_bsz is off: verl does not read it"
        )
    split = "ulysses_sequence_parallel_size"
    shared = int(given.get(f"{ACTOR}.{split}") or given.get(f"{ACTOR}.fsdp_config.{split}") or 1)
    tokens = max(int(value) * shared, given.row_tokens)
    note = f"{value} x {shared} ranks of a sequence" if shared > 1 else ""
    return Conversion(settings={ours: tokens}, note=note)


def clip_ratio(value: Any, given: Given) -> Conversion:
    """Read by verl only where the bounds are null, and their default is 0.2."""
    if any(f"{ACTOR}.clip_ratio_{side}" not in given.values for side in ("low", "high")):
        note = "verl does not read it: clip_ratio_low and clip_ratio_high are 0.2 unless given"
        return Conversion(settings={"actor.clip_ratio": value}, note=note)
    return Conversion(settings={"actor.clip_ratio": value})


def loss_scale_factor(value: Any, given: Given) -> Conversion:
    """Verl's null is the width of a padded micro-batch."""
    if value is None:
        return Conversion(
            note="null: data.max_response_length here, the width of each micro-batch in verl"
        )
    return Conversion(settings={"actor.loss_scale_factor": value})


@configured
def warmup_steps(ours: str, section: str, value: Any, given: Given) -> Conversion:
    """-1 leaves it to the ratio."""
    if value is not None and int(value) >= 0:
        return Conversion(settings={f"{ours}.lr_warmup_steps": int(value)})
    return Conversion(note="lr_warmup_steps_ratio decides")


@configured
def warmup_ratio(ours: str, section: str, value: Any, given: Given) -> Conversion:
    """A share of the run's steps; its number of steps must be known."""
    ratio = float(value or 0.0)
    fixed = given.get(f"{section}.lr_warmup_steps")
    if ratio == 0 or (fixed is not None and int(fixed) >= 0):
        return Conversion(note="no warm-up by ratio")
    total = given.get(f"{section}.lr_decay_steps", given.get("trainer.total_training_steps"))
    if total is None:
        return no(
            f"the number of steps is not known here: set {ours}.lr_warmup_steps, or trainer.total_training_steps"
        )
    steps = int(ratio * int(total))
    return Conversion(
        settings={f"{ours}.lr_warmup_steps": steps}, note=f"{ratio:g} of {total} steps"
    )


@configured
def scheduler(ours: str, value: Any, given: Given) -> Conversion:
    """The schedule's name."""
    if value in (None, "constant", "cosine", "linear"):
        return Conversion(settings={f"{ours}.lr_scheduler_type": value} if value else {})
    return no(
        f"there is no schedule {value!r}: {ours}.lr_scheduler_type is constant, cosine or linear"
    )


def metric(value: Any, given: Given) -> Conversion:
    """Metric by which a group is judged."""
    if value in ("reward", "score", "seq_reward", "seq_final_reward"):
        note = "" if value == "reward" else "the reward as it was scored, before any KL term"
        return Conversion(settings={"algorithm.filter_groups.metric": "reward"}, note=note)
    return Conversion(
        settings={"algorithm.filter_groups.metric": value},
        note=f"the reward function returns a dict with {value!r}; for one that returns a number write reward",
    )


def batch_size(value: Any, given: Given) -> Conversion:
    """Prompts of a step; verl's asynchronous trainer wants 0 here and counts mini-batches."""
    if not given.program.asynchronous:
        return Conversion(settings={"data.train_batch_size": value}, note="prompts, in both")
    batches = given.get("async_training.require_batches")
    note = f"async_training.require_batches={batches} mini-batches a step"
    return Conversion(settings={"data.train_batch_size": given.batch_prompts}, note=note)


def image_key(value: Any, given: Given) -> Conversion:
    """Images: verl trains the vision tower unless the recipe freezes it."""
    settings = {"data.image_key": value}
    if f"{ACTOR}.freeze_vision_tower" in given:
        return Conversion(settings=settings)
    trains = {"model.freeze_vision_tower": False}
    return Conversion(settings=settings | trains, note="verl trains the vision tower, too")


def oversample(value: Any, given: Given) -> Conversion:
    """Prompts of one generation, as a multiple of the batch."""
    batch = given.batch_prompts
    if given.program.asynchronous:
        return Conversion(note="prompts are sampled all the time")
    if value is None or int(value) == batch:
        return Conversion(note="as large as the batch")
    if not given.get("algorithm.filter_groups.enable"):
        return Conversion(status=KeyStatus.IGNORED, note="algorithm.filter_groups.enable is off")
    share = int(value) / batch
    if share < 1:
        return Conversion(
            status=KeyStatus.IGNORED, note="smaller takes: the mesh generates all the time"
        )
    return Conversion(
        settings={"algorithm.filter_groups.oversample": share}, note=f"{value} / {batch} prompts"
    )


def engine(value: Any, given: Given) -> Conversion:
    """The engine that samples."""
    if value in ("vllm", "sglang"):
        return Conversion(settings={"rollout.name": value})
    if value == "hf":
        return Conversion(settings={"rollout.name": "torch"}, note="the embedded engine")
    if value == "trtllm":
        note = "there is no engine trtllm; vLLM samples from the same distribution"
        return Conversion(settings={"rollout.name": "vllm"}, note=note)
    return no("rollout.name is torch, vllm or sglang: docs/reference/engines.md")


SGLANG_FLAGS = {
    "--tensor-parallel-size": "--tp-size",
    "--pipeline-parallel-size": "--pp-size",
    "--data-parallel-size": "--dp-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
}
"""SGLang's names of vLLM's options; the others have no counterpart."""


@configured
def engine_argument(flag: str, value: Any, given: Given, *, switch: bool = False) -> Conversion:
    """An argument of the server: vLLM's flag, or SGLang's for the same."""
    name = given.get(f"{ROLLOUT}.name")
    if value is None:
        return Conversion(note="the engine's own choice")
    if name == "hf" or (name == "sglang" and flag not in SGLANG_FLAGS):
        engine = "SGLang" if name == "sglang" else "the embedded engine"
        return Conversion(status=KeyStatus.IGNORED, note=f"{engine} has no such setting")
    if name == "sglang":
        note = "of the SGLang server"
        return Conversion(engine_arguments=(SGLANG_FLAGS[flag], str(value)), note=note)
    words = ((flag,) if value else (f"--no-{flag[2:]}",)) if switch else (flag, str(value))
    return Conversion(engine_arguments=words, note="of the vLLM server")


@configured
def engine_keyword(engine: str, value: Any, given: Given) -> Conversion:
    """A keyword of the engine's own, as an argument of its server."""
    if given.get(f"{ROLLOUT}.name", "vllm") != engine:
        return Conversion(status=KeyStatus.IGNORED, note=f"of {engine}, which does not sample here")
    if engine == "trtllm":
        return no("there is no engine trtllm")
    if value is None or (value is False and engine == "sglang"):
        return Conversion(note="the engine's own choice")
    text = json.dumps(value) if isinstance(value, list | dict) else str(value)
    return Conversion(engine_arguments=(KEYWORD, text), note="an argument of the server")


def expert_parallel(value: Any, given: Given) -> Conversion:
    """Ranks that share experts: vLLM takes all ranks of an engine."""
    if value in (None, 0, 1):
        return Conversion(note="experts are on every rank")
    if given.get(f"{ROLLOUT}.name") == "sglang":
        return Conversion(engine_arguments=("--ep-size", str(value)), note="of the SGLang server")
    return Conversion(engine_arguments=("--enable-expert-parallel",), note="of the vLLM server")


def quantization(value: Any, given: Given) -> Conversion:
    """The engine's weights, on load; with it the mismatch is corrected, as a recipe does by default."""
    if value in (None, False, ""):
        return Conversion(status=KeyStatus.IGNORED, note="switched off")
    if value != "fp8":
        return no(
            f"{value}: engines take the trained weights, and quantise them on load as fp8 only"
        )
    if given.get(f"{ROLLOUT}.name") == "hf":
        return no("fp8 is of vLLM and SGLang")
    return Conversion(settings={"rollout.engine.quantization": "fp8"}, note="TIS is on with it")


def routing_replay(value: Any, given: Given) -> Conversion:
    """The engine's half of R3: alone it would only return experts, without a replay."""
    return Conversion(settings={"rollout.routing_replay": True} if value else {}, note="R3")


def sampling_seed(value: Any, given: Given) -> Conversion:
    """Seed of every sampler."""
    return Conversion(
        settings={} if value is None else {"run.seed": value}, note="of the whole run"
    )


@configured
def engine_option(ours: str, value: Any, given: Given) -> Conversion:
    """An option of a server's engine."""
    if value is None or given.get(f"{ROLLOUT}.name") == "hf":
        return Conversion(status=KeyStatus.IGNORED, note="the engine's own choice")
    if value == "fp8":
        return quantization(value, given)
    return Conversion(settings={f"rollout.engine.{ours}": value})


@configured
def do_sample(ours: str, value: Any, given: Given) -> Conversion:
    """False is greedy, whatever the temperature says."""
    if value:
        return Conversion(note=f"{ours} decides")
    return Conversion(settings={ours: 0}, note="greedy")


def sampled_temperature(value: Any, given: Given) -> Conversion:
    """Temperature of validation, which is greedy unless do_sample."""
    if not given.get(f"{ROLLOUT}.val_kwargs.do_sample", False):
        return Conversion(
            settings={"rollout.val_kwargs.temperature": 0},
            note="val_kwargs.do_sample is off: greedy",
        )
    return Conversion(settings={"rollout.val_kwargs.temperature": value})


def logger(value: Any, given: Given) -> Conversion:
    """The ones that there are."""
    names = as_list(value)
    ours = [
        name
        for name in names
        if name in ("console", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
    ]
    left = [str(name) for name in names if name not in ours]
    note = f"there is no {', '.join(left)}; metrics.jsonl holds every number" if left else ""
    return Conversion(settings={"trainer.logger": ours or ["console"]}, note=note)


def machines(value: Any, given: Given) -> Conversion:
    """Machines of the trainer; engines have GPUs of their own."""
    if value in (1, None):
        return Conversion(note="one machine")
    return Conversion(
        settings={"trainer.nnodes": int(value)},
        note="the trainer's machines; engines have other GPUs, of these or of more machines: meshrl slurm --nodes, or"
        " placement.machines (docs/how-to/several-machines.md)",
    )


def experiment(value: Any, given: Given) -> Conversion:
    """Names the run too."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).lstrip("._-") or "run"
    return Conversion(settings={"run.name": name, "trainer.experiment_name": str(value)})


def resume_mode(value: Any, given: Given) -> Conversion:
    """A checkpoint that is named cannot be: the queue's position belongs to it."""
    if value in ("auto", "disable"):
        return Conversion(settings={"trainer.resume_mode": value})
    return no(
        "a verl checkpoint holds no queue: export it to a Hugging Face directory and set model.path"
    )


def reward_manager(value: Any, given: Given) -> Conversion:
    """How rewards are computed."""
    match value:
        case None | "naive" | "prime" | "rate_limited" | "limited":
            return Conversion(note="functions are called one sample at a time, several at once")
        case "batch":
            return Conversion(
                note="a function with the plural parameters gets many samples in one call"
            )
        case "dapo":
            return Conversion(
                note="its overlong penalty is algorithm.overlong_buffer, see reward_kwargs"
            )
        case "gdpo":
            return Conversion(
                note="every key of the returned dict is a component: algorithm.gdpo_reward_keys"
            )
        case _:
            return no(
                "write `compute_score` for one sample (docs/how-to/reward.md), or a judge for a service"
            )


def overlong_limit(value: Any, given: Given) -> Conversion:
    """Must be the one limit there is."""
    if value is None or int(value) == int(given.get("data.max_response_length")):
        return Conversion(note="data.max_response_length")
    return no(
        f"algorithm.overlong_buffer counts from data.max_response_length: set that to {value}"
    )


@configured
def reward_model(path_keys: tuple[str, ...], value: Any, given: Given) -> Conversion:
    """A learned reward model as a judge."""
    if not value:
        return Conversion(note="no reward model")
    path = next((given.get(key) for key in path_keys if key in given), None)
    if path is None:
        return no(
            f"it needs a path ({path_keys[0]}): reward.judges: [{{kind: model, options: {{path: ...}}}}]"
        )
    judge = {"kind": "model", "options": {"path": expanded(path)}}
    return Conversion(
        settings={"reward.judges": [judge]},
        note="scores in the reward service; kind: pooling asks a vLLM server instead",
    )


PRIME_DATA = {
    "filter_accuracy": "algorithm.filter_groups.enable",
    "accuracy_lower_bound": "algorithm.filter_groups.low",
    "accuracy_upper_bound": "algorithm.filter_groups.high",
    "oversample_factor": "algorithm.filter_groups.oversample",
}


@configured
def prime(ours: str, value: Any, given: Given) -> Conversion:
    """Read by verl's program `main_prime` only."""
    if given.program.algorithm != "prime":
        return no("only PRIME reads it: algorithm.name=prime")
    return Conversion(settings={ours: value})


def own_log_probs(value: Any, given: Given) -> Conversion:
    """Whether the ratio's denominator is what the engine said; `bypass_mode=False` outranks it in newer verl."""
    own = bool(value) and given.get(f"{CORRECTION}.bypass_mode", True) is not False
    return Conversion(settings={"actor.recompute_old_log_probs": not own})


OLD_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def rejection(value: Any, given: Given) -> Conversion:
    """Statistics by which rows or tokens are rejected; older names are of the ratio itself, k1."""
    return Conversion(settings={f"{CORRECTION}.rollout_rs": OLD_REJECTIONS.get(value, value)})


def rejection_bounds(value: Any, given: Given) -> Conversion:
    """The upper bound, or both as `lower_upper`; older scripts have a key for the lower one."""
    lower = given.get(f"{CORRECTION}.rollout_rs_threshold_lower", None)
    both = value if lower is None or value is None else f"{lower}_{value}"
    return Conversion(settings={f"{CORRECTION}.rollout_rs_threshold": both})


def device(value: Any, given: Given) -> Conversion:
    """Device of the trainer."""
    if value in (None, "auto", "cpu", "cuda"):
        return Conversion(settings={"trainer.device": value})
    return no("the trainer computes on GPUs that torch calls cuda, or on the CPU")


def reference_updates(value: Any, given: Given) -> Conversion:
    """How often the frozen model is renewed."""
    if value in (None, -1) or (given.program.algorithm == "spin" and value == 1):
        return Conversion(note="SPIN's opponent is renewed every step; another reference never")
    return no("SPIN's opponent is renewed every step, and another reference never")


def teacher(value: Any, given: Given) -> Conversion:
    """On-policy distillation: the reference service with the teacher's model."""
    if value in (None, False):
        return Conversion(status=KeyStatus.IGNORED, note="switched off")
    loss = "distillation.distillation_loss"
    mode = str(given.get(f"{loss}.loss_mode", "k3"))
    top, rewarded = mode == "forward_kl_topk", given.get(f"{loss}.use_task_rewards", True)
    if top == bool(given.get(f"{loss}.use_policy_gradient", True)):
        return no(
            "loss_mode=forward_kl_topk is a loss, use_policy_gradient=false, and loss_mode=k1 an advantage, true;"
            " another loss: actor.use_kl_loss, kl_loss_type k2, reference.path (docs/how-to/distill.md)"
        )
    if not top and mode not in ("k1", "kl"):
        return no("an advantage is the log-prob itself: loss_mode=k1")
    names = _teachers(given)
    if len(names) > 1:
        return no(
            f"one teacher for all data, not {', '.join(names)}: a run for each, or one of them"
        )
    model = given.get(f"{TEACHERS}.{names[0]}.model_path", None)
    if not model:
        return no(f"of one teacher: {TEACHERS}.{names[0]}.model_path")
    settings = {
        "reference.path": expanded(model),
        # verl reads the coefficient beside rewards only.
        "algorithm.distillation.weight": given.get(f"{loss}.distillation_loss_coef", 1.0)
        if rewarded
        else 1.0,
        "algorithm.distillation.max_log_ratio": given.get(f"{loss}.loss_max_clamp", UNBOUNDED),
    }
    if not rewarded:
        settings["algorithm.distillation.reward_weight"] = 0.0
    if top:
        settings["algorithm.distillation.top_k"] = given.get(f"{loss}.topk", 32)
        settings["algorithm.distillation.min_log_prob"] = given.get(
            f"{loss}.log_prob_min_clamp", None
        )
        return Conversion(
            settings=settings, note="the forward KL over the teacher's likeliest tokens"
        )
    return Conversion(
        settings=settings, note="one advantage, clipped once, for rewards and teacher"
    )


def _teachers(given: Given) -> list[str]:
    """The names of the teachers that are asked; verl drops `teacher_model` beside any other."""
    below = [key.removeprefix(f"{TEACHERS}.") for key in given.values if key.startswith(TEACHERS)]
    names = dict.fromkeys(name.partition(".")[0] for name in below if "." in name)
    return [name for name in names if name != ONE_TEACHER] or [ONE_TEACHER]


def reward_style(value: Any, given: Given) -> Conversion:
    """A name of what scores."""
    match value:
        case None | "rule":
            return Conversion(note="a function")
        case "math_verify":
            return Conversion(
                settings={"reward.functions": [{"name": "math"}]}, note="the package math-verify"
            )
    return no("name what scores: reward.functions, reward.custom_reward_function or reward.judges")


def trainer_mode(value: Any, given: Given) -> Conversion:
    """How far sampling may run ahead."""
    if value == "sync" or given.get("trainer.use_v1", True) is False:
        return Conversion(
            settings={"queue.max_staleness": 0},
            note="on-policy, as verl's synchronous trainer; 1 lets sampling and training overlap",
        )
    key = "trainer.v1.sampler.max_off_policy_threshold"
    bound = "inf" if key in given.values and key not in given else given.get(key, 8)
    strategy = given.get("trainer.v1.sampler.max_off_policy_strategy", "drop")
    return Conversion(
        settings={
            "queue.max_staleness": bound if bound == "inf" else int(bound),
            "queue.stale_policy": "drop" if strategy == "drop" else "reissue",
            "actor.recompute_old_log_probs": not given.get(
                "algorithm.rollout_correction.bypass_mode", False
            ),
        },
        note=f"asynchronous, {'any number of' if bound == 'inf' else f'at most {bound}'} steps off",
    )


def staleness_threshold(value: Any, given: Given) -> Conversion:
    """Whole steps here; in verl a share of what is sampled for the steps between two versions, which are also old."""
    steps = int(given.get("async_training.trigger_parameter_sync_step") or 1)
    bound = math.ceil((1 + float(value)) * steps - 1e-9) - 1
    own = given.get(f"{ACTOR}.use_rollout_log_probs")
    settings: dict[str, Any] = {"queue.max_staleness": bound}
    if own is not None:
        settings |= own_log_probs(own, given).settings
    note = f"(1 + {value}) x {steps} steps between two versions, less the newest; versions are published every step"
    return Conversion(settings=settings, note=note)


def partial_rollout(value: Any, given: Given) -> Conversion:
    """Whether a response continues under new weights."""
    return Conversion(settings={"rollout.on_update": "in_flight" if value else "drain"})


def total_rollouts(value: Any, given: Given) -> Conversion:
    """Prompts of the whole run, as steps."""
    if value is None or "trainer.total_training_steps" in given:
        return Conversion(note="trainer.total_training_steps")
    steps = max(1, int(value) // given.batch_prompts)
    note = f"{value} prompts / {given.batch_prompts} of a step"
    return Conversion(settings={"trainer.total_training_steps": steps}, note=note)


def rollout_gpus(value: Any, given: Given) -> Conversion:
    """GPUs for sampling alone, as rollout workers with a GPU for each rank of an engine."""
    section = ROLLOUT if f"{ROLLOUT}.nnodes" in given else "rollout"
    gpus = int(given.get(f"{section}.nnodes") or 0) * int(
        given.get(f"{section}.n_gpus_per_node") or 8
    )
    ranks = int(given.get(f"{ROLLOUT}.tensor_model_parallel_size") or 1)
    if not gpus:
        return Conversion(note="sampling shares the trainer's GPUs: placement.colocate")
    settings = {"rollout.workers": max(1, gpus // ranks), "placement.rollout": ranks}
    return Conversion(settings=settings, note=f"{gpus} GPUs / {ranks} of an engine")


def correction_cap(value: Any, given: Given) -> Conversion:
    """The older name of truncated importance sampling."""
    if value is None or float(value) <= 0:
        return Conversion(note="off")
    return Conversion(
        settings={
            f"{CORRECTION}.rollout_is": "token",
            f"{CORRECTION}.rollout_is_threshold": float(value),
        }
    )


@configured
def critic_only(convert: Convert, value: Any, given: Given) -> Conversion:
    """Read only where the estimator needs values."""
    if given.get("algorithm.adv_estimator") not in ("gae", "vapo"):
        return Conversion(status=KeyStatus.IGNORED, note="the estimator needs no critic")
    return convert(value, given)


def critic_mini_batch(value: Any, given: Given) -> Conversion:
    """The critic steps with the actor."""
    if int(value) == int(given.get(f"{ACTOR}.ppo_mini_batch_size")):
        return Conversion(note="as the actor's")
    return no("the critic's mini-batches are the actor's: actor.ppo_mini_batch_size")
