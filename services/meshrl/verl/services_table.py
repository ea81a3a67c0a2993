"""Rules for verl's keys outside the algorithm: rollout, reward, trainer, and what has no place here."""

from __future__ import annotations

from collections.abc import Iterator

from meshrl.verl import conversions as to
from meshrl.verl import names, sections, tools
from meshrl.verl.conversions import BUDGET, ROLLOUT
from meshrl.verl.rules import (
    ANY_NAME,
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

NO_MEANING = "a service of its own, nothing to share"


def rollout() -> Iterator[KeyRule]:
    """Sampling and the engine."""
    yield rule(f"{ROLLOUT}.name", to.engine)
    yield same(f"{ROLLOUT}.n", "rollout.n", 1)
    yield same(f"{ROLLOUT}.temperature", "rollout.temperature", 1.0)
    yield same(f"{ROLLOUT}.top_p", "rollout.top_p", 1.0)
    yield same(f"{ROLLOUT}.top_k", "rollout.top_k", -1)
    yield same(f"{ROLLOUT}.repetition_penalty", "rollout.repetition_penalty", 1.0)
    yield rule(f"{ROLLOUT}.do_sample", to.do_sample("rollout.temperature"))
    yield same(f"{ROLLOUT}.val_kwargs.n", "rollout.val_kwargs.n", 1)
    yield rule(f"{ROLLOUT}.val_kwargs.do_sample", to.do_sample("rollout.val_kwargs.temperature"))
    yield rule(f"{ROLLOUT}.val_kwargs.temperature", to.sampled_temperature)
    yield same(f"{ROLLOUT}.val_kwargs.top_p", "rollout.val_kwargs.top_p", 1.0)
    yield same(f"{ROLLOUT}.val_kwargs.top_k", "rollout.val_kwargs.top_k", -1)
    yield within(f"{ROLLOUT}.calculate_log_probs", "every sampled token comes with its log-prob")
    for name in (
        "micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "max_token_len_per_gpu",
        "micro_batch_size",
    ):
        yield within(
            f"{ROLLOUT}.log_prob_{name}", f"old log-probs are computed in the packs of {BUDGET}"
        )
    yield rule(
        f"{ROLLOUT}.tensor_model_parallel_size", to.engine_argument("--tensor-parallel-size")
    )
    yield rule(
        f"{ROLLOUT}.pipeline_model_parallel_size", to.engine_argument("--pipeline-parallel-size")
    )
    yield rule(f"{ROLLOUT}.gpu_memory_utilization", to.engine_argument("--gpu-memory-utilization"))
    yield rule(f"{ROLLOUT}.max_num_batched_tokens", to.engine_argument("--max-num-batched-tokens"))
    yield rule(f"{ROLLOUT}.enforce_eager", to.engine_argument("--enforce-eager", switch=True))
    yield rule(
        f"{ROLLOUT}.enable_chunked_prefill",
        to.engine_argument("--enable-chunked-prefill", switch=True),
    )
    yield rule(
        f"{ROLLOUT}.enable_prefix_caching",
        to.engine_argument("--enable-prefix-caching", switch=True),
    )
    yield rule(f"{ROLLOUT}.max_model_len", to.engine_option("max_model_len"))
    yield rule(f"{ROLLOUT}.dtype", to.engine_option("dtype"))
    yield same(
        f"{ROLLOUT}.max_num_seqs", "rollout.slots", note="requests that one engine runs at once"
    )
    for name in ("nnodes", "n_gpus_per_node"):
        yield rule(f"{ROLLOUT}.{name}", to.rollout_gpus)
    yield rule(f"{ROLLOUT}.data_parallel_size", to.engine_argument("--data-parallel-size"))
    yield rule(f"{ROLLOUT}.expert_parallel_size", to.expert_parallel)
    yield rule(f"{ROLLOUT}.seed", to.sampling_seed)
    for name in ("vllm", "sglang", "trtllm"):
        yield within(f"{ROLLOUT}.engine_kwargs.{name}", "none")
        yield rule(f"{ROLLOUT}.engine_kwargs.{name}.*", to.engine_keyword(name))
    sampled = "log-probs are those of the distribution that is sampled from"
    yield refused(
        f"{ROLLOUT}.logprobs_mode", sampled, (None, "processed_logprobs"), "processed_logprobs"
    )
    yield refused(f"{ROLLOUT}.over_sample_rate", "no row is left out", (None, 0, 0.0), 0)
    yield rule(f"{ROLLOUT}.quantization", to.quantization)
    yield refused(f"{ROLLOUT}.quantization_config_file", "see rollout.quantization")
    yield rule(f"{ROLLOUT}.enable_rollout_routing_replay", to.routing_replay)
    yield refused(f"{ROLLOUT}.router_config_path", "workers pull rows: there is no router")
    for name in ("mtp", "qat"):
        yield refused(f"{ROLLOUT}.{name}", "see actor_rollout_ref.model and actor")
        yield ignored(f"{ROLLOUT}.{name}.*", "see actor_rollout_ref.model and actor")
    apart = "prefill and decoding share an engine here"
    yield refused(f"{ROLLOUT}.disaggregation.enabled", apart, (None, False), False)
    yield unless("enabled", f"{ROLLOUT}.disaggregation", "disaggregation is off", apart)
    for name in ("path", "name"):
        own = "an engine of your own is a file: docs/how-to/extend.md"
        yield refused(f"{ROLLOUT}.agent.custom_async_server.{name}", own)
    agents = "an agent loop is a program here: rollout.program, docs/how-to/write-a-program.md"
    yield rule(f"{ROLLOUT}.multi_turn.enable", tools.multi_turn)
    for name in ("tool_config_path", "function_tool_path"):
        yield rule(f"{ROLLOUT}.multi_turn.{name}", tools.tool_files(name))
    yield rule(f"{ROLLOUT}.multi_turn.max_assistant_turns", tools.of_tools("max_turns"))
    yield rule(f"{ROLLOUT}.multi_turn.max_parallel_calls", tools.of_tools("max_calls"))
    yield rule(f"{ROLLOUT}.multi_turn.tool_response_truncate_side", tools.of_tools("cut"))
    yield rule(f"{ROLLOUT}.multi_turn.format", tools.tool_format)
    user = "there is no simulated user: write a program, docs/how-to/write-a-program.md"
    for name in ("max_user_turns", "num_repeat_rollouts"):
        yield refused(f"{ROLLOUT}.multi_turn.{name}", user)
    for name in ("use_inference_chat_template", "tokenization_sanity_check_mode"):
        yield ignored(f"{ROLLOUT}.multi_turn.{name}", "no turn is tokenized a second time")
    yield rule(f"{ROLLOUT}.multi_turn.max_tool_response_length", tools.tool_result)
    yield refused(f"{ROLLOUT}.agent.agent_loop_config_path", agents)
    yield rule(f"{ROLLOUT}.agent.default_agent_loop", tools.agent_loop(agents))
    yield refused(f"{ROLLOUT}.ignore_eos", "responses end at the end token", (None, False), False)
    yield unless("enable", f"{ROLLOUT}.multi_turn", "multi_turn.enable is off", tools.OWN)
    yield from ignored_below(
        ROLLOUT,
        (
            "free_cache_engine",
            "load_format",
            "layered_summon_param",
            "layered_summon",
            "mode",
            "prompt_length",
            "response_length",
            "disable_log_stats",
            "multi_stage_wake_up",
            "update_weights_bucket_megabytes",
            "skip_tokenizer_init",
            "full_determinism",
            "cudagraph_capture_sizes",
            "agent.num_workers",
            "standalone_gpu_memory_utilization",
            "scheduling_policy",
            "enable_sleep_mode",
            "moe_load_balance_metrics_interval",
            *(f"trace.{name}" for name in names.TRACE),
            *(f"checkpoint_engine.{name}" for name in names.CHECKPOINT_ENGINE),
            *(f"prometheus.{name}" for name in names.PROMETHEUS),
            *(f"profiler.{name}" for name in names.PROFILER),
        ),
        "of verl's engine in the trainer's process; here it is " + NO_MEANING,
    )
    yield unnamed(ROLLOUT)


def reward() -> Iterator[KeyRule]:
    """Reward functions and models."""
    for at in ("reward.custom_reward_function", "custom_reward_function"):
        yield rule(f"{at}.path", to.path_to("reward.custom_reward_function.path"))
        yield same(
            f"{at}.name", "reward.custom_reward_function.name", note="the file runs unchanged"
        )
        yield same(f"{at}.reward_kwargs.*", "reward.custom_reward_function.reward_kwargs.*")
    for key in ("reward.reward_manager.name", "reward_model.reward_manager"):
        yield rule(key, to.reward_manager)
    yield refused(
        "reward.reward_manager.source",
        "write `compute_score`: docs/how-to/reward.md",
        (None, "register"),
        "register",
    )
    for at in ("reward.reward_kwargs", "reward_model.reward_kwargs"):
        yield rule(f"{at}.max_resp_len", to.overlong_limit)
        yield from _overlong(f"{at}.overlong_buffer_cfg")
    yield from _overlong("reward_model.overlong_buffer")
    yield rule("reward.reward_model.enable", to.reward_model(("reward.reward_model.model_path",)))
    yield rule("reward_model.enable", to.reward_model(("reward_model.model.path",)))
    own = "write `compute_score` for one sample: docs/how-to/reward.md"
    unused = "custom_reward_manager"
    yield refused("reward.reward_manager.module.path", own)
    yield refused("reward.reward_manager.module.name", own, (None, unused), unused)
    for name in ("source", "module_path", "class_name"):
        yield refused(f"reward_model.reward_loop_{name}", own)
    for key in ("path", "name"):
        mine = f"reward.custom_reward_function.{key}"
        yield rule(
            f"reward_model.reward_fn.{key}",
            to.path_to(mine) if key == "path" else same("", mine).convert,
        )
    yield rule("reward_model.style", to.reward_style)
    yield rule("reward_model.model.beta_train", to.prime("algorithm.prime.beta_train"))
    yield rule("reward_model.model.update", to.prime("algorithm.prime.update"))
    for key in ("lr", "weight_decay"):
        ours = f"algorithm.prime.optim.{key}"
        yield rule(f"reward_model.model.optim.{key}", to.prime(ours))
    yield rule("reward_model.model.optim.grad_clip", to.prime("algorithm.prime.optim.clip_grad"))
    for key in ("reward.num_workers", "reward_model.num_workers"):
        yield same(key, "reward.workers")
    for at in ("reward.sandbox_fusion", "sandbox_fusion"):
        yield refused(
            f"{at}.url",
            "programs are graded in a sandbox: reward.recipe_sandbox=strict and the reward `code`",
        )
        yield unless(
            "url", at, "no sandbox_fusion.url", "a local sandbox has limits: reward.limits"
        )
    yield refused(
        "reward.reward_kwargs.*",
        "pass it to the function: reward.custom_reward_function.reward_kwargs",
    )
    for at in ("reward", "reward_model"):
        yield from ignored_below(
            at,
            (
                "launch_reward_fn_async",
                "use_reward_loop",
                "nccl_timeout",
                *(f"profiler.{name}" for name in names.PROFILER),
                *(f"reward_model.rollout.{name}" for name in names.REWARD_SERVER),
                *(f"rollout.{name}" for name in names.REWARD_SERVER),
                *(f"model.fsdp_config.{name}" for name in names.FSDP),
                "model.fsdp_config.param_offload",
                "micro_batch_size",
                "micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "strategy",
                "forward_max_token_len_per_gpu",
                "ulysses_sequence_parallel_size",
                "enable_resource_pool",
                "n_gpus_per_node",
                "nnodes",
                "reward_model.model_path",
                "reward_model.enable_resource_pool",
                "reward_model.n_gpus_per_node",
                "reward_model.nnodes",
                "model.path",
                "model.use_shm",
                "model.trust_remote_code",
                "model.external_lib",
                "model.input_tokenizer",
                "model.use_remove_padding",
            ),
            "the reward is " + NO_MEANING,
        )
        yield unnamed(at)


def _overlong(at: str) -> Iterator[KeyRule]:
    for name in ("enable", "len", "penalty_factor"):
        yield same(f"{at}.{name}", f"algorithm.overlong_buffer.{name}")
    yield ignored(f"{at}.log", "metrics always hold it")


def trainer() -> Iterator[KeyRule]:
    """Length and bookkeeping of a run."""
    yield rule("async_training.staleness_threshold", to.staleness_threshold)
    yield within("async_training.trigger_parameter_sync_step", "see staleness_threshold")
    yield within("async_training.require_batches", "see data.train_batch_size", 1)
    yield rule("async_training.partial_rollout", to.partial_rollout)
    yield within(
        "async_training.fault_tolerance.*",
        "always on: what a dead worker was sampling continues with another, and workers come and go",
    )
    yield rule("rollout.total_rollout_steps", to.total_rollouts)
    for name in ("nnodes", "n_gpus_per_node"):
        yield rule(f"rollout.{name}", to.rollout_gpus)
    yield ignored("rollout.n", "actor_rollout_ref.rollout.n decides")
    yield rule("trainer.v1.trainer_mode", to.trainer_mode, "sync")
    yield within("trainer.use_v1", "trainer.v1.trainer_mode decides")
    yield within(
        "trainer.v1.sampler.max_off_policy_threshold",
        "queue.max_staleness, where the mode is asynchronous",
    )
    yield within(
        "trainer.v1.sampler.max_off_policy_strategy",
        "queue.stale_policy, where the mode is asynchronous",
    )
    yield same("trainer.total_epochs", "trainer.total_epochs", 30)
    yield same("trainer.total_training_steps", "trainer.total_training_steps")
    yield same("trainer.project_name", "trainer.project_name")
    yield rule("trainer.experiment_name", to.experiment)
    yield rule("trainer.logger", to.logger)
    yield same(
        "trainer.n_gpus_per_node",
        "trainer.nproc",
        note="training ranks; give the engines GPUs of their own: rollout.engine.env",
    )
    yield rule("trainer.nnodes", to.machines)
    for name in ("save_freq", "test_freq", "val_before_train"):
        yield same(f"trainer.{name}", f"trainer.{name}")
    yield same("trainer.critic_warmup", "critic.warmup_steps")
    yield within("trainer.balance_batch", "ranks get near equal numbers of tokens always")
    yield rule("trainer.default_local_dir", to.path_to("trainer.default_local_dir"))
    yield rule("trainer.resume_mode", to.resume_mode)
    yield same("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep")
    yield within("trainer.max_critic_ckpt_to_keep", "one checkpoint holds both")
    yield rule("trainer.device", to.device)
    yield rule("trainer.ref_update_freq", to.reference_updates)
    yield refused("trainer.val_only", "meshrl eval RECIPE", (None, False), False)
    for name in ("rollout_data_dir", "validation_data_dir", "log_val_generations"):
        yield within(f"trainer.{name}", "rows are kept in the run's directory: trainer.log_rows")
    yield within(
        "trainer.v1.separate_async.parameter_sync_step",
        "versions are published every step: queue.max_staleness bounds their age",
    )
    yield within("trainer.v1.sync", "none")
    for name in ("custom_sampler.path", "custom_sampler.name"):
        own = "an order of prompts is a function: data.curriculum; a sampler of rows: queue.sampler"
        yield refused(f"trainer.v1.sampler.{name}", own)
    yield refused(
        "trainer.v1.sampler.sync_refill_failed_groups",
        "rows that fail are sampled again always",
        (None, False, True),
        False,
    )
    yield refused("trainer.checkpoint_callback_class", "want a function: trainer.after_checkpoint")
    warm_up = ("colocate_async.num_warmup_batches", "separate_async.num_warmup_batches")
    yield refused("trainer.v1.sampler.sampler_kwargs", "there is no sampler of your own")
    mode = (*warm_up, *names.HYBRID)
    yield from ignored_below("trainer.v1", mode, "when verl's engines start and share GPUs")
    yield from ignored_below(
        "trainer",
        (
            "ray_wait_register_center_timeout",
            "del_local_ckpt_after_load",
            "default_hdfs_dir",
            "esi_redundant_time",
            "use_legacy_worker_impl",
            "resume_from_path",
            "profile_steps",
            "rollout_wait_timeout",
            *(f"npu_profile.{name}" for name in names.PROFILER),
        ),
        "bookkeeping of verl's own",
    )
    yield unnamed("trainer")


def elsewhere() -> Iterator[KeyRule]:
    """Sections of verl that concern nothing here."""
    yield rule("distillation.enabled", to.teacher)
    read = "with distillation.enabled"
    for name in (
        "loss_mode",
        "use_policy_gradient",
        "use_task_rewards",
        "distillation_loss_coef",
        "loss_max_clamp",
        "topk",
        "log_prob_min_clamp",
    ):
        yield within(f"distillation.distillation_loss.{name}", read)
    yield refused(
        "distillation.distillation_loss.policy_loss_mode",
        "rewards and teacher share a loss: actor.policy_loss.loss_mode",
        (None, "vanilla"),
    )
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        yield within(f"distillation.distillation_loss.{name}", "rewards and teacher share a clip")
    for name in ("use_chunked_topk", "chunked_topk_chunk_size"):
        yield ignored(f"distillation.distillation_loss.{name}", "logits are never held whole")
    one = f"{to.TEACHERS}.{ANY_NAME}"
    yield within(f"{one}.model_path", read)
    yield ignored(f"{one}.num_replicas", "the teacher is one process: the reference service")
    for key in (f"{one}.key", "distillation.teacher_key"):
        yield ignored(
            key, "one teacher is asked for every row, whatever its key; several are refused"
        )
    for key in ("nnodes", "n_gpus_per_node"):
        yield ignored(f"distillation.{key}", "the reference service has a place of its own")
    yield from ignored_below(
        f"{one}.inference", names.TEACHER, "the teacher is the reference service, with no engine"
    )
    yield unless(
        "enabled", "distillation", "distillation.enabled is off", "no such key of a teacher"
    )
    yield from ignored_below("async_training", names.DYNAMIC_GPUS, "how verl shares its GPUs")
    for kind in ("rollout", "rollout_tq", "async_rollout"):
        stored = "rows are never replaced by stored ones"
        yield refused(f"skip.{kind}.enable", stored, (None, False), False)
        yield unless("enable", f"skip.{kind}", f"skip.{kind} is off", stored)
    for section in ("async_training", "skip"):
        yield unnamed(section)
    yield ignored("teacher_key", "of several teachers only, which are refused")
    starts = "how verl starts and watches its processes"
    yield from ignored_below("ray_kwargs", names.RAY, starts)
    own = "services have the environment of `meshrl up`: set it there"
    yield refused("ray_kwargs.ray_init.runtime_env.env_vars.*", own)
    yield from ignored_below("global_profiler", names.GLOBAL_PROFILER, starts)
    yield from ignored_below("transfer_queue", names.TRANSFER_QUEUE, starts)
    yield from ignored_below("prometheus", names.PROMETHEUS, "every service has /metrics")
    yield rule("model_engine", sections.schedule_of("actor.optim", "critic.optim"))
    for key in ("ray_init.num_cpus", "hydra.run.dir", "hydra.searchpath"):
        yield ignored(key, starts)
    for name in ("hybrid_engine", "nccl_timeout"):
        yield ignored(f"actor_rollout_ref.{name}", starts)
