"""What other trainers call a key of isobit: for the message about an unknown key.

Names are those of `docs/from-trl.md`, `from-verl.md` and `from-nemo-rl.md`, whose tables a test
compares with these (tests/test_option_tables.py), and some that people type. A dotted name counts
by its end: `optim.lr` and `actor_rollout_ref.actor.optim.lr` are found under `lr`, and the longest
end that is listed wins.
"""

_NAMES = {
    "model.path": "model_name model_name_or_path actor_rollout_ref.model.path "
    "pretrained_model_name_or_path",
    "model.chat_template": "custom_chat_template chat_template_path",
    "model.chat_template_kwargs": "chat_template_kwargs apply_chat_template_kwargs",
    "task.files": "dataset_mixture datasets",
    "task.path": "train_dataset dataset dataset_name data train_files data_files "
    "train.data_path data_path",
    "task.held_out_path": "eval_dataset val_files validation.data_path",
    "task.columns": "prompt_key input_key output_key reward_fn_key",
    "task.max_prompt_tokens": "max_prompt_length max_input_seq_length rollout.prompt_length",
    "task.too_long": "filter_overlong_prompts truncation",
    "task.prompt_template": "prompt_file",
    "task.system": "system_prompt_file system_prompt",
    "task.shuffle": "shuffle_dataset train_sampling_strategy",
    "rewards.functions": "reward_funcs reward_functions reward_fn",
    "rewards.functions.function": "custom_reward_function.path custom_reward_function.name "
    "processor env_name",
    "rewards.functions.options": "custom_reward_function.reward_kwargs reward_kwargs",
    "rewards.functions.weight": "reward_weights",
    "environment.tools": "tools function_tool_path",
    "environment.factory": "environment_factory",
    "environment.max_turns": "max_tool_calling_iterations max_assistant_turns max_rollout_turns",
    "environment.parser": "multi_turn.format",
    "rewards.models.path": "reward_model.model_path reward_model",
    "precision": "bf16 fp16 cast_lm_head_to_fp32 quantization torch_dtype dtype vllm_cfg.precision "
    "kv_cache_dtype num_first_layers_in_bf16 num_last_layers_in_bf16 pow2_weight_scaling_factors "
    "calculate_kv_scales override_transformer_config.fp8 fp8_recipe fp8_cfg "
    "policy.precision model_init_kwargs model_dtype",
    "consistency": "full_determinism",
    "backend": "trainer.device",
    "prompts_per_step": "generation_batch_size per_device_train_batch_size train_batch_size "
    "batch_size num_prompts_per_step gen_batch_size",
    "steps": "max_steps total_training_steps max_num_steps num_steps train_steps",
    "epochs": "num_train_epochs total_epochs max_num_epochs",
    "seed": "data.seed grpo.seed random_seed data_seed data_loader_seed",
    "ranks": "n_gpus_per_node nnodes gpus_per_node num_nodes nproc_per_node num_processes cluster",
    "divided": "tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size",
    "partial.tokens_per_round": "partial_rollout",
    "partial.extra_prompts": "over_sampling_batch_size",
    "partial.max_staleness": "staleness_threshold",
    "rollouts_ahead": "max_trajectory_age_steps rollout.mode trainer_mode",
    "sampling.group_size": "num_generations num_generations_per_prompt num_samples_per_prompt n",
    "sampling.max_new_tokens": "max_completion_length max_response_length max_tokens max_length "
    "response_length",
    "sampling.temperature": "rollout.temperature generation.temperature",
    "sampling.stop": "stop_strings stop_sequences",
    "engine.kv_pages": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "engine.max_sequences": "max_num_seqs",
    "engine.max_batch_tokens": "max_num_batched_tokens",
    "engine.prefix_cache": "enable_prefix_caching",
    "engine.cuda_graphs": "enforce_eager",
    "engine.num_speculative_tokens": "speculative_config speculative_model "
    "speculative_num_draft_tokens speculative_algorithm",
    "engine.sleep": "vllm_enable_sleep_mode free_cache_engine enable_sleep_mode",
    "algorithm.preset": "algo algorithm.name",
    "algorithm.advantage": "scale_rewards adv_estimator adv_estimator.name normalize_rewards "
    "use_leave_one_out_baseline norm_adv_by_std_in_grpo",
    "algorithm.loss_aggregation": "loss_type loss_agg_mode token_level_loss",
    "algorithm.decoupled_rewards": "multi_objective_aggregation",
    "algorithm.updates_per_batch": "steps_per_generation gradient_accumulation_steps "
    "ppo_mini_batch_size train_global_batch_size",
    "algorithm.discount": "gamma",
    "algorithm.loss": "surrogate disable_ppo_ratio use_cispo loss_mode",
    "algorithm.epochs": "num_iterations ppo_epochs",
    "algorithm.ratio": "importance_sampling_level sequence_level_importance_ratios",
    "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low ratio_clip_min cliprange",
    "algorithm.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
    "algorithm.dual_clip": "delta clip_ratio_c ratio_clip_c",
    "algorithm.sapo_temperatures": "sapo_temperature_pos sapo_temperature_neg tau_pos tau_neg",
    "algorithm.vespo_k": "vespo_k_pos vespo_k_neg",
    "algorithm.vespo_lambda": "vespo_lambda_pos vespo_lambda_neg",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef use_kl_loss "
    "reference_policy_kl_penalty init_kl_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty reference_policy_kl_type "
    "use_bias_correction_kl use_on_policy_kl_approximation",
    "algorithm.kl_in_reward": "use_kl_in_reward",
    "algorithm.dynamic_sampling": "filter_groups.enable use_dynamic_sampling",
    "algorithm.max_resamples": "max_num_gen_batches dynamic_sampling_max_gen_batches",
    "algorithm.overlong_buffer": "overlong_buffer_length overlong_buffer.len "
    "overlong_buffer_cfg.len",
    "algorithm.overlong_penalty": "overlong_buffer_penalty overlong_buffer.penalty_factor "
    "overlong_buffer_cfg.penalty_factor",
    "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.top_entropy_quantile": "top_entropy_quantile",
    "algorithm.entropy_coefficient": "entropy_coeff entropy_coef",
    "algorithm.entropy_target": "use_adaptive_entropy entropy_target",
    "algorithm.entropy_coefficient_step": "entropy_coef_delta",
    "algorithm.entropy_coefficient_max": "entropy_coef_max",
    "algorithm.router_replay": "enable_rollout_routing_replay",
    "algorithm.router_aux_coefficient": "router_aux_loss_coef",
    "algorithm.recompute_old_logprobs": "bypass_mode",
    "algorithm.correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode "
    "rollout_is rollout_rs rollout_is_threshold rollout_is_batch_normalize rollout_correction "
    "use_importance_sampling_correction truncated_importance_sampling_ratio "
    "truncated_importance_sampling_type seq_logprob_error_threshold",
    "algorithm.correction.rejection.high": "rollout_rs_threshold",
    "algorithm.correction.floor": "vllm_importance_sampling_clip_min",
    "algorithm.correction.cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "adapter.rank": "lora_r lora_rank peft_config.r",
    "adapter.alpha": "lora_alpha",
    "adapter.rslora": "use_rslora rank_stabilized_lora",
    "adapter.targets": "lora_target_modules target_modules",
    "adapter.init": "lora_adapter_path",
    "optimizer.learning_rate": "lr",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "optimizer.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps_ratio",
    "optimizer.final_fraction": "min_lr_ratio lr_scheduler_kwargs min_lr_rate",
    "optimizer.betas": "adam_beta1 adam_beta2 adam_betas",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.max_grad_norm": "clip_grad grad_clip gradient_clip gradient_clipping",
    "optimizer.state": "optim",
    "optimizer.share_prompts": "use_prefix_grouper shared_prefix_training",
    "optimizer.micro_batch_tokens": "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu "
    "train_micro_batch_size train_mb_tokens micro_batch_size ppo_micro_batch_size use_dynamic_bsz",
    "optimizer.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "reference.sync_every": "sync_ref_model ref_model_sync_steps teacher_sync_steps "
    "sync_reference_every",
    "reference.sync_alpha": "ref_model_mixup_alpha teacher_update_rate",
    "replay.max_staleness": "max_off_policy_threshold",
    "evaluation.every": "eval_steps test_freq val_period eval_every eval_strategy eval_on_start "
    "val_before_train",
    "evaluation.samples": "max_val_samples val_max_samples",
    "evaluation.num_samples": "num_generations_eval val_kwargs.n val_kwargs.do_sample",
    "evaluation.temperature": "val_kwargs.temperature",
    "evaluation.top_p": "val_kwargs.top_p",
    "evaluation.top_k": "val_kwargs.top_k",
    "evaluation.patience": "early_stopping_patience",
    "evaluation.keep_best": "load_best_model_at_end",
    "evaluation.best_by": "metric_for_best_model metric_name",
    "run.dir": "output_dir default_local_dir checkpoint_dir log_dir save_dir",
    "run.checkpoint_every": "save_steps save_freq save_period save_every save_strategy",
    "run.keep_last": "save_total_limit max_actor_ckpt_to_keep keep_top_k",
    "run.completions": "rollout_data_dir",
    "run.rank_timeout_s": "ddp_timeout nccl_timeout",
    "tracking.trackers": "report_to logger wandb_enabled tensorboard_enabled mlflow_enabled "
    "use_wandb",
    "tracking.project": "project_name wandb_project project",
    "tracking.name": "run_name experiment_name",
    "tracking.completions": "log_completions num_completions_to_print log_unique_prompts "
    "log_val_generations",
    "tracking.trackio.space_id": "trackio_space_id",
}
"""A key of isobit, and what it is called elsewhere."""

_NONE = (
    "generation_kwargs "
    "use_vllm vllm_mode reward_scaling "
    "force_on_policy_ratio max_total_sequence_length dtensor_cfg megatron_cfg rollout.name "
    "vllm_model_impl vllm_max_model_length vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port "
    "use_transformers_continuous_batching transformers_continuous_batching_config "
    "use_transformers_paged cache_implementation vllm_structured_outputs_regex "
    "entropy_coef_min "
    "disable_dropout label_smoothing_factor neftune_noise_alpha optim_args "
    "optim_target_modules gradient_checkpointing_kwargs activation_checkpointing_kwargs "
    "torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config "
    "use_cache tf32 torch_empty_cache_steps skip_memory_metrics auto_find_batch_size "
    "average_tokens_across_devices use_cpu fsdp fsdp_config deepspeed ds3_gather_for_generation "
    "parallelism_config accelerator_config ddp_find_unused_parameters ddp_bucket_cap_mb "
    "ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank remove_unused_columns "
    "label_names length_column_name dataloader_drop_last dataloader_num_workers "
    "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
    "dataloader_multiprocessing_context dataloader_in_order pad_to_multiple_of ignore_data_skip "
    "per_device_eval_batch_size eval_accumulation_steps eval_delay bf16_full_eval fp16_full_eval "
    "prediction_loss_only include_for_metrics batch_eval_metrics eval_do_concat_batches "
    "eval_use_gather_object greater_is_better save_only_model save_on_each_node "
    "restore_callback_states_from_checkpoint enable_jit_checkpoint logging_nan_inf_filter "
    "log_multimodal debug push_to_hub hub_token hub_private_repo hub_model_id hub_strategy "
    "lora_dropout hub_always_push hub_revision log_completions_hub_repo trackio_bucket_id "
    "trackio_static_space_id rollout.nnodes rollout.n_gpus_per_node rollout_correction.loss_type"
)
"""Names to which nothing here corresponds."""

WHY_NOT = {
    "lora_dropout": "an adapter has no dropout: the learner would drop at random what the rollout "
    "had, and their log-probabilities would differ"
}
"""Why, of some of these, by the end of their names."""

_KEYS = {name: key for key, names in _NAMES.items() for name in names.split()} | dict.fromkeys(
    _NONE.split()
)


def counterpart(name: str) -> tuple[bool, str | None]:
    """Return (whether other trainers know such a name, the key that it is here or None where
    nothing corresponds to it)."""
    names = name.split(".")
    ends = [".".join(names[i:]) for i in range(len(names))]
    return next(((True, _KEYS[end]) for end in ends if end in _KEYS), (False, None))
