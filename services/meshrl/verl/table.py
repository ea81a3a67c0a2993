"""Rules for each key of verl 0.9, and of older names that scripts still use. The first rule that fits wins."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from meshrl.verl import conversions as to
from meshrl.verl import sections, services_table
from meshrl.verl.conversions import ACTOR, BUDGET, MODEL, PACKS
from meshrl.verl.rules import (
    KeyRule,
    ignored,
    ignored_below,
    refused,
    rule,
    same,
    unless,
    unnamed,
    within,
)
from meshrl.verl.tools import tool_files

REF = "actor_rollout_ref.ref"
MM_PROCESSOR = (
    "set it in the checkpoint's preprocessor_config.json, which engine and trainer read: min_pixels and max_pixels"
    " are shortest_edge and longest_edge of `size`"
)
WORKER_KEYS = (
    "nccl_timeout",
    "load_weight",
    "data_loader_seed",
    "use_fused_kernels",
    "use_remove_padding",
    "use_prefix_grouper",
    "use_torch_compile",
    "pad_to_length",
    "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size",
    "entropy_checkpointing",
)


@cache
def rules() -> tuple[KeyRule, ...]:
    """Every rule, in the order in which keys are reported and a recipe is written."""
    return (
        *_model(),
        *_data(),
        *_algorithm(),
        *_actor(),
        *_optimizer(f"{ACTOR}.optim", "actor.optim", 1e-6),
        *_critic(),
        *_reference(),
        *services_table.rollout(),
        *services_table.reward(),
        *services_table.trainer(),
        *services_table.elsewhere(),
    )


def _model() -> Iterator[KeyRule]:
    yield rule(f"{MODEL}.path", to.model_path, "~/models/deepseek-llm-7b-chat")
    yield rule(f"{MODEL}.tokenizer_path", to.path_to("model.tokenizer_path"))
    yield within(f"{MODEL}.use_remove_padding", "rows are packed always", True)
    yield same(
        f"{MODEL}.enable_gradient_checkpointing", "model.enable_gradient_checkpointing", True
    )
    yield rule(f"{ACTOR}.fsdp_config.dtype", to.compute_type, "bfloat16")
    yield same(f"{MODEL}.lora_rank", "model.lora_rank")
    yield same(f"{MODEL}.lora_alpha", "model.lora_alpha")
    yield same(f"{MODEL}.target_modules", "model.target_modules")
    yield same(f"{MODEL}.exclude_modules", "model.exclude_modules")
    yield rule(f"{MODEL}.lora_adapter_path", to.path_to("model.lora_adapter_path"))
    for name in ("custom_chat_template", "external_lib", "hf_config_path"):
        yield refused(f"{MODEL}.{name}", "put it into the checkpoint's own files")
    for at in ("override_config", "override_config.model_config"):
        yield rule(f"{MODEL}.{at}.max_position_embeddings", to.positions)
    yield refused(f"{MODEL}.override_config.*", "change the checkpoint's config.json")
    yield same(f"{MODEL}.trust_remote_code", "model.trust_remote_code")
    yield from sections.lora(f"{MODEL}.lora")
    yield refused(f"{MODEL}.override_config", sections.MODEL_CHANGES)
    yield from sections.tokens_ahead(f"{MODEL}.mtp")
    for name in ("lora_rank", "lora_alpha", "target_modules"):
        yield same(f"{ACTOR}.peft.{name}", f"model.{name}")
    yield from ignored_below(
        MODEL,
        (
            "use_liger",
            "use_fused_kernels",
            "fused_kernel_options.impl_backend",
            "use_shm",
            "enable_activation_offload",
            "tiled_mlp.enabled",
            "tiled_mlp.num_shards",
        ),
        "kernels and memory: the results are the same",
    )
    yield unnamed(MODEL)


def _data() -> Iterator[KeyRule]:
    yield rule(
        "data.train_files", to.files_to("data.train_files"), "~/data/rlhf/gsm8k/train.parquet"
    )
    yield rule("data.val_files", to.files_to("data.val_files"), "~/data/rlhf/gsm8k/test.parquet")
    yield same("data.prompt_key", "data.prompt_key", "prompt")
    yield rule("data.train_batch_size", to.batch_size, 1024)
    yield same("data.max_prompt_length", "data.max_prompt_length", 512)
    yield same("data.max_response_length", "data.max_response_length", 512)
    yield same("data.filter_overlong_prompts", "data.filter_overlong_prompts", False)
    yield same("data.truncation", "data.truncation", "error")
    yield same("data.shuffle", "data.shuffle", True)
    yield same("data.seed", "data.seed")
    yield same("data.val_max_samples", "data.val_max_samples", -1)
    yield refused("data.train_max_samples", "cut the file to that many rows", (None, -1), -1)
    yield rule("data.gen_batch_size", to.oversample)
    yield rule(
        "data.reward_fn_key",
        to.only(
            "data_source",
            None,
            note="the column data_source",
            instead="name the column data_source",
        ),
    )
    yield refused(
        "data.custom_cls.path",
        "write the rows that it makes to parquet: docs/how-to/your-own-data.md",
    )
    yield refused("data.sampler.class_path", "an order of prompts is a function: data.curriculum")
    for name in ("tool_config_path", "function_tool_path"):
        yield rule(f"data.{name}", tool_files(name))
    yield refused("data.tokenizer", "model.tokenizer_path")
    yield refused("data.datagen.path", "write the rows to parquet first")
    yield same("data.apply_chat_template_kwargs.*", "data.apply_chat_template_kwargs.*")
    yield within("data.apply_chat_template_kwargs", "none")
    for prime in (
        "filter_accuracy",
        "accuracy_lower_bound",
        "accuracy_upper_bound",
        "oversample_factor",
    ):
        yield rule(f"data.{prime}", to.prime(to.PRIME_DATA[prime]))
    yield refused("data.filter_truncate", "truncated rows are kept", (None, False, True), True)
    yield ignored(
        "data.filter_overlong_prompts_workers", "prompts are measured while they are read"
    )
    yield rule("data.image_key", to.image_key)
    for name in ("video_key", "audio_key"):
        yield refused(
            f"data.{name}", "texts and pictures are read: make frames of a video pictures"
        )
    yield ignored("data.image_patch_size", "the checkpoint's preprocessor_config.json says it")
    for name in ("mm_processor_kwargs", "mm_processor_kwargs.*"):
        yield refused(f"data.{name}", MM_PROCESSOR, ({},))
    yield ignored("data.custom_cls.name", "see data.custom_cls.path")
    yield from ignored_below(
        "data",
        (
            "return_raw_input_ids",
            "return_raw_chat",
            "return_full_prompt",
            "use_shm",
            "return_multi_modal_inputs",
            "dataloader_num_workers",
            "validation_shuffle",
            "trust_remote_code",
            "val_batch_size",
            "datagen.name",
        ),
        "how verl loads its data; the rows are the same",
    )
    yield unnamed("data")


def _algorithm() -> Iterator[KeyRule]:
    at = "algorithm"
    yield rule(
        f"{at}.adv_estimator",
        to.name_in("meshrl.trainer.algorithms.advantages", f"{at}.adv_estimator"),
        "gae",
    )
    for name in (
        "norm_adv_by_std_in_grpo",
        "gamma",
        "lam",
        "use_kl_in_reward",
        "kl_penalty",
        "use_pf_ppo",
    ):
        yield same(f"{at}.{name}", f"{at}.{name}")
    for name in ("type", "kl_coef", "horizon", "target_kl"):
        yield same(f"{at}.kl_ctrl.{name}", f"{at}.kl_ctrl.{name}")
    for name in ("reweight_method", "weight_pow"):
        yield same(f"{at}.pf_ppo.{name}", f"{at}.pf_ppo.{name}")
    agents = "gigpo.step_advantage_w", "gigpo.mode", "hgpo.mode", "hgpo.length_weight_alpha"
    for name in ("gdpo_reward_keys", "gdpo_reward_weights", *agents, "hgpo.base_group"):
        yield same(f"{at}.{name}", f"{at}.{name}")
    correction = "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"
    for name in (*correction, "bypass_mode", "loss_type"):
        yield same(f"{to.CORRECTION}.{name}", f"{to.CORRECTION}.{name}")
    yield rule(f"{to.CORRECTION}.rollout_rs", to.rejection)
    yield rule(f"{to.CORRECTION}.rollout_rs_threshold", to.rejection_bounds)
    yield within(f"{to.CORRECTION}.rollout_rs_threshold_lower", "with rollout_rs_threshold")
    yield refused(f"{to.CORRECTION}.rollout_token_veto_threshold", "no token vetoes its row")
    yield rule(f"{ACTOR}.tis_imp_ratio_cap", to.correction_cap)
    yield same(f"{at}.filter_groups.enable", f"{at}.filter_groups.enable")
    yield rule(f"{at}.filter_groups.metric", to.metric)
    yield same(
        f"{at}.filter_groups.max_num_gen_batches", f"{at}.filter_groups.max_num_gen_batches", 0
    )
    yield within(
        f"{at}.filter_groups.max_inflight_gen_batches",
        "admission is bounded by queue.max_staleness",
    )
    yield same(f"{at}.sppo_eta", "actor.policy_loss.sppo_eta")
    yield same(f"{at}.dpo_beta", "actor.policy_loss.dpo_beta")
    for name in ("reward_gt_coef", "reward_dpo_coef"):
        yield rule(f"{at}.{name}", to.prime(f"algorithm.prime.{name}"))


def _actor() -> Iterator[KeyRule]:
    yield rule(
        f"{ACTOR}.strategy",
        to.only(
            "fsdp",
            "fsdp2",
            "megatron",
            None,
            note="FSDP2 always",
            instead="the trainer is FSDP2: leave it out",
        ),
    )
    yield same(
        f"{ACTOR}.ppo_mini_batch_size", "actor.ppo_mini_batch_size", 256, note="prompts, in both"
    )
    yield same(f"{ACTOR}.ppo_epochs", "actor.ppo_epochs")
    yield within(f"{ACTOR}.use_dynamic_bsz", PACKS)
    yield rule(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu", to.row_budget(BUDGET, f"{ACTOR}.use_dynamic_bsz")
    )
    yield rule(
        f"{ACTOR}.ppo_max_token_len_per_gpu", to.token_budget(BUDGET, f"{ACTOR}.use_dynamic_bsz")
    )
    yield ignored(f"{ACTOR}.ppo_micro_batch_size", "use ppo_micro_batch_size_per_gpu; " + PACKS)
    yield rule(f"{ACTOR}.clip_ratio", to.clip_ratio)
    yield same(f"{ACTOR}.clip_ratio_low", "actor.clip_ratio_low", 0.2)
    yield same(f"{ACTOR}.clip_ratio_high", "actor.clip_ratio_high", 0.2)
    # 3 in every loss, where ours is 20 in the dppo losses.
    yield same(f"{ACTOR}.clip_ratio_c", "actor.clip_ratio_c", 3.0)
    for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff", "loss_agg_mode"):
        yield same(f"{ACTOR}.{name}", f"actor.{name}")
    yield rule(f"{ACTOR}.loss_scale_factor", to.loss_scale_factor)
    loss = "actor.policy_loss"
    yield rule(
        f"{ACTOR}.policy_loss.loss_mode",
        to.name_in("meshrl.trainer.algorithms.losses", f"{loss}.loss_mode"),
        "vanilla",
    )
    knobs = (
        "clip_cov_ratio",
        "clip_cov_lb",
        "clip_cov_ub",
        "kl_cov_ratio",
        "ppo_kl_coef",
        "dro_beta",
    )
    for name in (*knobs, "tau_pos", "tau_neg"):
        yield same(f"{ACTOR}.policy_loss.{name}", f"{loss}.{name}")
    for name in knobs:
        yield same(f"{ACTOR}.{name}", f"{loss}.{name}")
    for name in ("tau_pos", "tau_neg", "sppo_eta", "dpo_beta", "dpo_label_smoothing"):
        yield same(f"{ACTOR}.{name}", f"{loss}.{name}")
    yield within(f"{ACTOR}.calculate_sum_pi_squared", "computed when the estimator reads it")
    yield within(f"{ACTOR}.calculate_entropy", "always in the metrics")
    yield same(f"{ACTOR}.fsdp_config.param_offload", "model.param_offload")
    yield same(f"{ACTOR}.fsdp_config.optimizer_offload", "actor.optim.offload")
    for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        yield same(f"{ACTOR}.{name}", "model.ulysses_sequence_parallel_size")
    yield rule(f"{ACTOR}.use_rollout_log_probs", to.own_log_probs)
    for name in ("megatron", "veomni", "torchtitan"):
        yield same(f"{ACTOR}.{name}.optimizer_offload", "actor.optim.offload")
        yield same(f"{ACTOR}.{name}.param_offload", "model.param_offload")
        yield rule(f"{ACTOR}.{name}.dtype", to.compute_type)
    yield from sections.quantized(f"{ACTOR}.qat")
    yield rule(f"{ACTOR}.router_replay.mode", sections.router_replay)
    yield refused(
        f"{ACTOR}.shuffle",
        "mini-batches are cut by uid order, the same on every machine",
        (None, False),
        False,
    )
    yield same(f"{ACTOR}.freeze_vision_tower", "model.freeze_vision_tower")


def _optimizer(verl: str, ours: str, lr: float) -> Iterator[KeyRule]:
    for name, default in (
        ("lr", lr),
        ("weight_decay", 0.01),
        ("eps", None),
        ("clip_grad", 1.0),
    ):
        yield (
            same(f"{verl}.{name}", f"{ours}.{name}")
            if default is None
            else same(f"{verl}.{name}", f"{ours}.{name}", default)
        )
    yield rule(f"{verl}.betas", to.pair(f"{ours}.betas"))
    yield same(f"{verl.removesuffix('.optim')}.grad_clip", f"{ours}.clip_grad")
    yield rule(f"{verl}.lr_warmup_steps", to.warmup_steps(ours, verl))
    yield rule(f"{verl}.lr_warmup_steps_ratio", to.warmup_ratio(ours, verl))
    yield rule(f"{verl}.lr_scheduler_type", to.scheduler(ours))
    yield rule(f"{verl}.warmup_style", to.scheduler(ours))
    yield same(f"{verl}.min_lr_ratio", f"{ours}.min_lr_ratio")
    yield refused(f"{verl}.num_cycles", "a cosine falls once", (None, 0.5), 0.5)
    yield ignored(f"{verl}.total_training_steps", "trainer.total_training_steps")
    yield from sections.optimizer(verl, ours)
    yield unnamed(verl)
    if verl.startswith(ACTOR):
        yield from sections.engines(ACTOR, "fsdp_config")
        yield from ignored_below(
            ACTOR,
            (*WORKER_KEYS, "rollout_n", "ppo_infer_max_token_len_per_gpu"),
            "the trainer has no such setting; it changes speed, memory or debugging only",
        )
        yield unnamed(ACTOR)


def _critic() -> Iterator[KeyRule]:
    yield rule("critic.model.path", to.critic_only(to.path_to("critic.path")))
    for found in _optimizer("critic.optim", "critic.optim", 1e-5):
        yield KeyRule(
            key=found.key,
            convert=to.critic_only(found.convert),
            default=found.default,
            take_default=found.take_default,
        )
    for verl, ours in (
        ("model.fsdp_config.optimizer_offload", "optim.offload"),
        ("fsdp_config.optimizer_offload", "optim.offload"),
        ("cliprange_value", "cliprange_value"),
        ("ppo_epochs", "ppo_epochs"),
        ("loss_agg_mode", "loss_agg_mode"),
    ):
        yield rule(f"critic.{verl}", to.critic_only(same("", f"critic.{ours}").convert))
    yield rule("critic.ppo_mini_batch_size", to.critic_only(to.critic_mini_batch))
    yield within("critic.ppo_micro_batch_size_per_gpu", "the actor's packs")
    yield within("critic.ppo_max_token_len_per_gpu", "the actor's packs")
    yield within("critic.enable", "made when the estimator needs values")
    for name in (
        "ppo_micro_batch_size",
        "forward_max_token_len_per_gpu",
        "forward_micro_batch_size",
        "forward_micro_batch_size_per_gpu",
    ):
        yield within(f"critic.{name}", "the actor's packs")
    critic_model = (
        "enable_gradient_checkpointing",
        "use_remove_padding",
        "tokenizer_path",
        "use_shm",
        "trust_remote_code",
        "enable_activation_offload",
        "use_liger",
        "use_fused_kernels",
        "fused_kernel_options.impl_backend",
        "tiled_mlp.enabled",
        "tiled_mlp.num_shards",
        "lora_alpha",
        "target_modules",
        "exclude_modules",
        "lora_adapter_path",
    )
    yield from ignored_below("critic.model", critic_model, "the critic is made as the actor is")
    for name in ("lora_rank", "lora.rank"):
        yield refused(f"critic.model.{name}", "the critic is trained whole", (None, 0), 0)
    yield unless("rank", "critic.model.lora", "no adapters: lora.rank is 0", "it is trained whole")
    for name in ("custom_chat_template", "external_lib", "hf_config_path", "override_config"):
        yield refused(f"critic.model.{name}", "put it into the checkpoint's own files")
    yield refused("critic.model.override_config.*", sections.MODEL_CHANGES)
    yield from sections.tokens_ahead("critic.model.mtp")
    yield refused("critic.shuffle", "mini-batches are cut by uid order", (None, False), False)
    yield refused("critic.loss_scale_factor", "the critic's losses are means", (None,))
    for name in ("param_offload", "ulysses_sequence_parallel_size", "dtype"):
        for at in ("fsdp", "fsdp_config", "model.fsdp_config"):
            yield ignored(f"critic.{at}.{name}", "the critic is made as the actor is")
    engines = ("megatron", "veomni", "torchtitan")
    offload = [f"{engine}.{part}_offload" for engine in engines for part in ("param", "optimizer")]
    for name in ("megatron.dtype", "torchtitan.dtype", "fsdp.optimizer_offload", *offload):
        yield ignored(f"critic.{name}", "the critic is made as the actor is")
    yield from sections.engines("critic", "fsdp_config", "model.fsdp_config")
    yield from ignored_below(
        "critic",
        (
            *WORKER_KEYS,
            "strategy",
            "rollout_n",
            "use_dynamic_bsz",
            "ulysses_sequence_parallel_size",
        ),
        "the critic is made as the actor is",
    )
    yield unnamed("critic")


def _reference() -> Iterator[KeyRule]:
    dynamic = f"{REF}.log_prob_use_dynamic_bsz"
    yield rule(
        f"{REF}.log_prob_micro_batch_size_per_gpu",
        to.row_budget("reference.max_tokens_per_batch", dynamic),
    )
    yield rule(
        f"{REF}.log_prob_max_token_len_per_gpu",
        to.token_budget("reference.max_tokens_per_batch", dynamic),
    )
    for key in (dynamic, f"{REF}.log_prob_micro_batch_size"):
        yield within(key, PACKS)
    yield rule(f"{REF}.model.path", to.path_to("reference.path"))
    yield within(
        f"{REF}.fsdp_config.param_offload",
        "the reference is a process of its own: nothing to make room for",
    )
    alone = "the reference is a process of its own, which trains nothing"
    engine = ("dtype", "ulysses_sequence_parallel_size", "optimizer_offload")
    yield from ignored_below(f"{REF}.fsdp_config", engine, alone)
    for section in ("megatron", "veomni", "torchtitan"):
        keys = ("dtype", "param_offload", "optimizer_offload")
        yield from ignored_below(f"{REF}.{section}", keys, alone)
    yield from sections.engines(REF, "fsdp_config")
    trained = (
        "optimizer",
        "name",
        "lr",
        "lr_warmup_steps",
        "lr_warmup_steps_ratio",
        "betas",
        "eps",
    )
    yield from ignored_below(f"{REF}.optim", trained, alone)
    schedule = ("total_training_steps", "weight_decay", "clip_grad", "decay_type", "min_lr_factor")
    yield from ignored_below(f"{REF}.optim", schedule, alone)
    yield from ignored_below(
        REF,
        (*WORKER_KEYS, "strategy", "rollout_n", "ulysses_sequence_parallel_size"),
        "the reference is a process of its own",
    )
    yield unnamed(REF)
