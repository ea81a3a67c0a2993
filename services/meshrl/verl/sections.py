"""Sections that several of verl's sections have: training engines, optimizers, LoRA, multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshrl.verl import names
from meshrl.verl.conversions import compute_type
from meshrl.verl.rules import (
    Conversion,
    Convert,
    Given,
    KeyRule,
    KeyStatus,
    configured,
    ignored_below,
    no,
    refused,
    rule,
    same,
    unless,
    within,
)

SPEED = "how verl's engine computes: speed and memory only"
QUANTIZED = "no training on quantised weights here"
ACTOR = "actor_rollout_ref.actor."
REPLAY = "only the policy takes the experts that the engine chose"
MODEL_CHANGES = "it changes the model: change the checkpoint's config.json"
TOKENS_AHEAD = "heads that predict several tokens are neither trained nor used here"
_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def engine(at: str, keys: tuple[str, ...]) -> Iterator[KeyRule]:
    """One training engine's section: what changes no number, and what does."""
    if at.startswith(ACTOR):
        yield rule(f"{at}.router_replay.mode", router_replay)
    else:
        yield refused(f"{at}.router_replay.mode", REPLAY, (None, "disabled"), "disabled")
    for name in ("record_file", "replay_file"):
        yield refused(f"{at}.router_replay.{name}", "experts travel with their rows, not in files")
    yield from quantized(f"{at}.qat")
    yield from _types(at)
    yield from ignored_below(at, keys, SPEED)
    if at.startswith(ACTOR):
        yield from _balance(f"{at}.override_transformer_config")
    for name in ("override_transformer_config", "override_mcore_model_config"):
        yield refused(f"{at}.{name}", MODEL_CHANGES)
        yield refused(f"{at}.{name}.*", MODEL_CHANGES)


def _types(at: str) -> Iterator[KeyRule]:
    """Types of weights, products and sums of gradients: the policy's keys say it for all models here."""
    policy = at.startswith(ACTOR) or at == "engine"
    others = "every model computes in model.param_dtype"
    plan = "turbo_config.distributed.fsdp_plan"
    products = ("mixed_precision.param_dtype", "mp_param_dtype", f"{plan}.param_dtype")
    for key, convert in (("model_dtype", _weights(at)), *((key, compute_type) for key in products)):
        yield rule(f"{at}.{key}", convert) if policy else within(f"{at}.{key}", others)
    yield within(f"{at}.mixed_precision", "model.param_dtype over master weights in float32")
    sums = ("mixed_precision.reduce_dtype", "mixed_precision.buffer_dtype", "mp_reduce_dtype")
    for name in (*sums, f"{plan}.reduce_dtype"):
        instead = "gradients are summed, and buffers kept, in float32"
        yield refused(f"{at}.{name}", instead, (None, "fp32", "float32"), "fp32")
    switches = ("enable_fp8", "backend_config.fake_balanced_gate", "backend_config.fake_gate_noise")
    for name in (*switches, "backend_config.gate_precision", "moe_config.lm_head_precision"):
        yield refused(
            f"{at}.{name}", "everything computes in model.param_dtype", (None, False, 0, 0.0)
        )


@configured
def _weights(at: str, value: Any, given: Given) -> Conversion:
    if value in (None, "fp32", "float32"):
        return Conversion(note="master weights are float32")
    if f"{at}.dtype" in given or f"{at}.mixed_precision.param_dtype" in given:
        return Conversion(note="the compute type is given; master weights stay float32")
    answer = compute_type(value, given)
    if answer.status is KeyStatus.REFUSED:
        return answer
    note = f"compute type; master weights stay float32, where verl rounds each update to {value}"
    return Conversion(settings=answer.settings, note=note)


def _balance(at: str) -> Iterator[KeyRule]:
    """How busy experts are kept: Megatron's names."""
    yield same(f"{at}.moe_router_bias_update_rate", "actor.moe_router_bias_update_rate")
    yield refused(
        f"{at}.moe_aux_loss_coeff",
        "another scale: actor.router_aux_loss_coef is this times layers / experts of a token",
        (None, 0, 0.0),
        0.0,
    )
    yield refused(f"{at}.moe_z_loss_coeff", "routers have no z-loss here", (None, 0, 0.0), 0.0)
    types = "routers compute in model.param_dtype, and their softmax in float32"
    yield refused(f"{at}.moe_router_dtype", types)


def router_replay(value: Any, given: Given) -> Conversion:
    """R3 replays the sampler's experts; R2 those of the pass that computes old log-probs, which is no key here."""
    if value in (None, "disabled"):
        return Conversion(note="routers choose")
    if value == "R3":
        return Conversion(
            settings={"rollout.routing_replay": True}, note="of vLLM, SGLang and torch"
        )
    return no(
        f"{value}: only the sampler's experts are replayed here; want R3, rollout.routing_replay"
    )


def engines(at: str, *others: str) -> Iterator[KeyRule]:
    """Every engine's section below `at`, and `others`, which hold what `fsdp` does."""
    for name, keys in names.ENGINES.items():
        yield from engine(f"{at}.{name}", keys)
    for name in others:
        yield from engine(f"{at}.{name}", names.FSDP)
    bookkeeping = "how verl saves and profiles: trainer.save_freq, trainer.profile"
    yield from ignored_below(f"{at}.checkpoint", names.CHECKPOINT, bookkeeping)
    yield from ignored_below(f"{at}.profiler", names.PROFILER, bookkeeping)


def quantized(at: str) -> Iterator[KeyRule]:
    """Quantisation-aware training."""
    yield refused(f"{at}.enable", QUANTIZED, (None, False), False)
    yield unless("enable", at, "qat.enable is off", QUANTIZED)


def tokens_ahead(at: str) -> Iterator[KeyRule]:
    """Multi-token prediction."""
    yield refused(f"{at}.enable", TOKENS_AHEAD, (None, False), False)
    yield unless("enable", at, "mtp.enable is off", TOKENS_AHEAD)


def lora(at: str) -> Iterator[KeyRule]:
    """Verl's LoRA for Megatron: one more spelling, with an alpha of 32."""
    yield rule(f"{at}.rank", _rank(at))
    yield same(f"{at}.alpha", "model.lora_alpha")
    yield rule(f"{at}.target_modules", _layers(at))
    yield rule(f"{at}.type", _kind(at))
    yield refused(f"{at}.dropout", "adapters have no dropout", (None, 0, 0.0), 0.0)
    yield refused(f"{at}.exclude_modules", "name what gets adapters: model.target_modules")
    yield refused(f"{at}.adapter_path", "give peft's form of it: model.lora_adapter_path")
    starts = (("lora_A_init_method", "xavier"), ("lora_B_init_method", "zero"))
    for name, default in starts:
        why = "adapters start as peft starts them"
        yield refused(f"{at}.{name}", why, (None, default), default)
    others = ("merge", "dropout_position", "a2a_experimental", "dtype")
    vision = ("freeze_vision_model", "freeze_vision_projection", "freeze_language_model")
    yield from ignored_below(at, (*others, *vision), "of Megatron's adapters")


@configured
def _rank(at: str, value: Any, given: Given) -> Conversion:
    settings = {"model.lora_rank": value}
    if value and f"{at}.alpha" not in given:
        settings["model.lora_alpha"] = 32
    return Conversion(settings=settings)


@configured
def _kind(at: str, value: Any, given: Given) -> Conversion:
    if value in (None, "lora") or not given.get(f"{at}.rank", 0):
        return Conversion(status=KeyStatus.IGNORED, note="plain LoRA, or no adapters")
    if value != "dora":
        return no("adapters are LoRA or DoRA of matrices as transformers has them")
    return Conversion(settings={"model.use_dora": True})


@configured
def _layers(at: str, value: Any, given: Given) -> Conversion:
    if not given.get(f"{at}.rank", 0):
        return Conversion(status=KeyStatus.IGNORED, note="no adapters: lora.rank is 0")
    listed = [value] if isinstance(value, str) else list(value)
    if unknown := [name for name in listed if name not in _MEGATRON_LAYERS]:
        return no(f"{unknown[0]} is not a layer that is known here: set model.target_modules")
    found = [layer for name in listed for layer in _MEGATRON_LAYERS[name]]
    return Conversion(settings={"model.target_modules": found}, note="Megatron's fused layers")


_SCHEDULES: dict[str, dict[str, Any]] = {
    "veomni": {"lr_scheduler_type": "cosine"},
    "torchtitan": {"lr_scheduler_type": "linear"},
    "automodel": {
        "lr_scheduler_type": "cosine",
        "min_lr_ratio": 0.01,
        "lr_warmup_init_ratio": 0.1,
    },
}


def schedule_of(*ours: str) -> Convert:
    """An engine that is chosen brings a schedule of its own where the command gives none."""

    def convert(value: Any, given: Given) -> Conversion:
        found = _SCHEDULES.get(str(value), {})
        settings = {f"{optim}.{name}": each for optim in ours for name, each in found.items()}
        return Conversion(
            settings=settings, note="which engine of verl's trains, with its schedule"
        )

    return convert


def _counted(value: Any, given: Given) -> Conversion:
    if value is False:
        return Conversion(note="as here: a step has the rate that is due at its end")
    return Conversion(
        note="rates are a step ahead of verl's here: the first step has one, verl's has 0"
    )


def optimizer(verl: str, ours: str) -> Iterator[KeyRule]:
    """Options of verl's optimizers besides a rate and a decay."""
    yield rule(f"{verl}.optimizer", _named(f"{ours}.name"))
    yield rule(f"{verl}.name", _named(f"{ours}.name"))
    states = "torch's optimizer, whose state is float32: another one's memory and kernels"
    yield from ignored_below(verl, names.OPTIMIZER, states)
    yield refused(f"{verl}.override_optimizer_config", "options of another optimizer")
    yield rule(f"{verl}.zero_indexed_step", _counted)
    muon = "the numbers of Muon are torch's here"
    yield from (KeyRule(key=f"{verl}.{name}", convert=_of_muon(verl, muon)) for name in names.MUON)
    for name in ("lr_decay_style", "decay_type"):
        yield rule(f"{verl}.{name}", _decay(f"{ours}.lr_scheduler_type"))
    for name in ("min_lr", "lr_min"):
        yield rule(f"{verl}.{name}", _share(verl, f"{ours}.min_lr_ratio"))
    yield same(f"{verl}.min_lr_factor", f"{ours}.min_lr_ratio")
    for name in ("lr_warmup_init", "lr_start"):
        yield rule(f"{verl}.{name}", _share(verl, f"{ours}.lr_warmup_init_ratio"))
    yield same(f"{verl}.init_lr_ratio", f"{ours}.lr_warmup_init_ratio")
    yield same(f"{verl}.lr_decay_steps", f"{ours}.lr_decay_steps")
    whole = f"{ours}.lr_decay_steps"
    yield refused(f"{verl}.lr_decay_ratio", whole, (None, 1, 1.0), 1.0)
    yield refused(f"{verl}.lr_wsd_decay_steps", "there is no schedule WSD")
    for name, default in (
        ("lr_wsd_decay_style", "exponential"),
        ("weight_decay_incr_style", "constant"),
    ):
        instead = "the weight decay is constant, and there is no schedule WSD"
        yield refused(f"{verl}.{name}", instead, (None, default), default)


@configured
def _named(ours: str, value: Any, given: Given) -> Conversion:
    match str(value).lower():
        case "none" | "adamw" | "adam" | "fusedadam":
            return Conversion(note="AdamW")
        case "muon":
            return Conversion(settings={ours: "muon"})
    return no(f"there is no optimizer {value!r}: {ours} is adamw or muon")


@configured
def _of_muon(verl: str, instead: str, value: Any, given: Given) -> Conversion:
    if str(given.get(f"{verl}.optimizer", "")).lower() == "muon":
        return no(instead)
    return Conversion(status=KeyStatus.IGNORED, note="the optimizer is not Muon")


@configured
def _decay(ours: str, value: Any, given: Given) -> Conversion:
    if value in (None, "constant", "cosine", "linear"):
        return Conversion(settings={ours: value} if value else {})
    return no(f"there is no schedule {value!r}: {ours} is constant, cosine or linear")


@configured
def _share(verl: str, ours: str, value: Any, given: Given) -> Conversion:
    """A rate as a share of the highest one."""
    if not value:
        return Conversion(note="0")
    rate = float(given.get(f"{verl}.lr"))
    note = f"{value} / a rate of {rate:g}"
    return Conversion(settings={ours: float(value) / rate}, note=note)
