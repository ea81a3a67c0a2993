"""Names of verl's keys that several of its sections share, and that change speed, memory or bookkeeping only.

Every name is here or in the table; a section's other keys are refused, since their effect is unknown here.
"""

from __future__ import annotations


def _names(text: str, below: str = "") -> tuple[str, ...]:
    return tuple(below + name for name in text.split())


_HOOKS = "finish_hook_cmd finish_hook_all_ranks finish_hook_ranks"
_PROFILING_TOOLS = (
    *_names("discrete", "nsys."),
    *_names("contents level analysis discrete profile_token_start profile_token_end", "npu."),
    *_names("contents discrete profile_token_start profile_token_end", "torch."),
    *_names("skip_first wait warmup active repeat", "torch.schedule."),
    *_names(
        "trace_alloc_max_entries stack_depth memory_snapshot_num_steps context stacks kw_args",
        "torch_memory.",
    ),
    *_names("config_path steps stages strict", "precision_debugger."),
    *_names("trace cuda-memory-usage cuda-graph-trace", "nsys.controller_nsight_options."),
    *_names(
        "trace cuda-memory-usage cuda-graph-trace capture-range capture-range-end kill",
        "nsys.worker_nsight_options.",
    ),
)
_PROFILER = f"tool enable all_ranks ranks save_path relocate_results {_HOOKS} discrete"
PROFILER = _names(_PROFILER) + tuple(f"tool_config.{name}" for name in _PROFILING_TOOLS)
GLOBAL_PROFILER = (
    *_names(f"{_PROFILER} steps profile_continuous_steps"),
    *(f"global_tool_config.{name}" for name in _PROFILING_TOOLS),
)
CHECKPOINT = _names("save_contents load_contents async_save strict mbridge_config")
CHECKPOINT_ENGINE = _names(
    "backend update_weights_bucket_megabytes engine_kwargs custom_backend_module"
)
TRACE = _names("project_name experiment_name backend token2text max_samples_per_step_per_worker")
PROMETHEUS = _names("enable port file served_model_name")

TEACHER = _names("""
    cudagraph_capture_sizes data_parallel_size disable_log_stats dtype enable_chunked_prefill enable_prefix_caching
    enforce_eager engine_kwargs expert_parallel_size free_cache_engine gpu_memory_utilization limit_images load_format
    max_model_len max_num_batched_tokens max_num_seqs name prompt_length response_length skip_tokenizer_init
    temperature tensor_model_parallel_size
    """)

_COMPUTING = _names("""
    use_torch_compile entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing
    pad_to_length pad_to_length_bucket seed full_determinism forward_only strategy
    """)
FSDP = (
    *_COMPUTING,
    *_names("""
    offload_policy reshard_after_forward fsdp_size forward_prefetch use_orig_params
    use_no_sync_for_gradient_accumulation wrap_policy.min_num_params wrap_policy.transformer_layer_cls_to_wrap
    """),
    *_names(
        """
    fully_shard_parallel_size tensor_parallel_size expert_parallel_size expert_fully_shard_parallel_size
    ulysses_parallel_size fsdp_plan.output_dtype fsdp_plan.fsdp_implementation
    fsdp_plan.num_to_forward_prefetch fsdp_plan.num_to_backward_prefetch
    """,
        "turbo_config.distributed.",
    ),
)
MEGATRON = (
    *_COMPUTING,
    *_names("""
    grad_offload tensor_model_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
    context_parallel_size sequence_parallel use_distributed_optimizer use_dist_checkpointing
    dist_checkpointing_path dynamic_context_parallel max_seqlen_per_dp_cp_rank dist_checkpointing_prefix
    dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient override_ddp_config
    use_mbridge vanilla_mbridge use_remove_padding pad_bshd_to_minibatch_max use_megatron_fsdp
    """),
    *_names(
        "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather average_in_collective bucket_size",
        "override_ddp_config.",
    ),
    *_names(
        """
    recompute_granularity recompute_modules recompute_method recompute_num_layers attention_backend
    use_flash_attn context_parallel_size sequence_parallel num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split pipeline_model_parallel_layout moe_enable_deepep
    moe_token_dispatcher_type moe_flex_dispatcher_backend moe_permute_fusion moe_router_fusion
    moe_grouped_gemm moe_shared_expert_overlap overlap_moe_expert_parallel_comm apply_rope_fusion
    masked_softmax_fusion bias_activation_fusion bias_dropout_fusion gradient_accumulation_fusion
    deallocate_pipeline_outputs persist_layer_norm variable_seq_lengths cross_entropy_loss_fusion
    cross_entropy_fusion_impl swap_optimizer use_fused_rotary_pos_emb use_fused_swiglu use_fused_rmsnorm
    """,
        "override_transformer_config.",
    ),
)
VEOMNI = (
    *_COMPUTING,
    *_names("""
    fsdp_size ulysses_parallel_size expert_parallel_size
    init_device enable_full_shard ckpt_manager load_checkpoint_path forward_prefetch enable_fsdp_offload
    enable_reentrant attn_implementation moe_implementation cross_entropy_loss_implementation
    rms_norm_implementation swiglu_mlp_implementation rotary_pos_emb_implementation
    rms_norm_gated_implementation causal_conv1d_implementation chunk_gated_delta_rule_implementation
    load_balancing_loss_implementation dsa_indexer_implementation dsa_attention_implementation
    mhc_implementation qat_implementation force_use_huggingface enable_async_activation_offload
    activation_offload_modules activation_offload_host_cache_limit_gb basic_modules
    """),
)
TORCHTITAN = (
    *_COMPUTING,
    *_names("""
    wrap_policy.min_num_params reshard_after_forward forward_prefetch
    use_orig_params data_parallel_size data_parallel_replicate_size data_parallel_shard_size
    tensor_parallel_size expert_parallel_size pipeline_parallel_size context_parallel_size attn_type
    spmd_backend activation_checkpoint max_seq_len
    """),
)
AUTOMODEL = (
    *_COMPUTING,
    *_names("""
    distributed_strategy tp_size pp_size cp_size ep_size dp_replicate_size sequence_parallel
    defer_fsdp_grad_sync activation_checkpointing enable_compile attn_implementation mp_output_dtype
    """),
    *_names(
        "attn linear rms_norm rope_fusion dispatcher experts enable_hf_state_dict_adapter"
        " enable_fsdp_optimizations",
        "backend_config.",
    ),
    *_names("ignore_router_for_ac reshard_after_forward wrap_outer_model", "moe_config."),
)
ENGINES = {
    "fsdp": FSDP,
    "megatron": MEGATRON,
    "veomni": VEOMNI,
    "torchtitan": TORCHTITAN,
    "automodel": AUTOMODEL,
}
"""A section of each of verl's training engines to its keys."""
OPTIMIZER = (
    *_names("""
    optimizer_impl use_checkpoint_opt_param_scheduler use_precision_aware_optimizer
    main_grads_dtype exp_avg_dtype exp_avg_sq_dtype use_layer_wise_distributed_optimizer
    master_weights store_param_remainders master_weight_dtype
    """),
    *_names(
        """
    optimizer_offload_fraction optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d main_grads_dtype
    use_precision_aware_optimizer use_torch_optimizer_for_cpu_offload main_params_dtype exp_avg_dtype
    exp_avg_sq_dtype swap_optimizer
    """,
        "override_optimizer_config.",
    ),
)
MUON = _names(
    """
    momentum nesterov split_qkv scale_mode coefficient_type num_ns_steps tp_mode fp32_matmul_prec
    extra_scale_factor scalar_optimizer match_adamw_update_rms
    """,
    "muon_",
)
"""Read by verl where the optimizer is Muon."""

REWARD_SERVER = _names("""
    name dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine
    data_parallel_size expert_parallel_size tensor_model_parallel_size pipeline_model_parallel_size
    max_num_batched_tokens max_model_len max_num_seqs load_format layered_summon scheduling_policy
    full_determinism seed multi_stage_wake_up engine_kwargs limit_images enable_chunked_prefill
    enable_prefix_caching disable_log_stats skip_tokenizer_init ignore_eos temperature top_k top_p do_sample n
    prompt_length response_length quantization quantization_config_file mtp calculate_log_probs mode
    disaggregation.enabled disaggregation.prefill_replicas disaggregation.decode_replicas
    disaggregation.decode_tensor_model_parallel_size disaggregation.transfer_backend
    disaggregation.bootstrap_port disaggregation.ib_device
    """)
"""Keys of verl's server of a reward model, which samples nothing here."""
TRANSFER_QUEUE = (
    *_names("enable metrics.enabled metrics.port backend.storage_backend controller.polling_mode"),
    *_names("total_storage_size num_data_storage_units", "backend.SimpleStorage."),
    *_names(
        """
    auto_init metadata_server master_server_address local_hostname protocol global_segment_size
    local_buffer_size device_name
    """,
        "backend.MooncakeStore.",
    ),
)
HYBRID = _names(
    """
    enable_switch switch_threshold_ratio adaptive_switch_threshold switch_threshold_step_up
    switch_threshold_step_down switch_threshold_release_steps switch_cost_window_size
    """,
    "separate_async.hybrid_rollout.",
)
DYNAMIC_GPUS = _names("""
    use_trainer_do_validate use_dynamic_resource_scheduling dynamic_schedule_policy
    dynamic_schedule_deactivate_ratio dynamic_schedule_enable_rebalance concurrent_samples_per_replica
    """)
RAY = _names("ray_init.num_cpus ray_init.runtime_env.py_executable timeline_json_file")
