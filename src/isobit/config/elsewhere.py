"""What other trainers call a key of isobit: for the message about an unknown key.

Names are those of `docs/from-trl.md`, `from-verl.md` and `from-nemo-rl.md`, whose tables a test compares with these
(tests/test_option_tables.py), and some that people type. A dotted name counts by its end: `optim.lr` and
`actor_rollout_ref.actor.optim.lr` are found under `lr`, and the longest end that is listed wins.
"""

_NAMES = {
    "model.path": "model_name model_name_or_path actor_rollout_ref.model.path pretrained_model_name_or_path",
    "model.chat_template": "custom_chat_template chat_template_path",
    "task.path": "train_dataset dataset dataset_name data train_files data_files train.data_path data_path",
    "task.held_out_path": "eval_dataset val_files validation.data_path",
    "task.columns": "prompt_key input_key output_key",
    "task.max_prompt_tokens": "max_prompt_length max_input_seq_length",
    "task.too_long": "filter_overlong_prompts",
    "task.prompt_template": "prompt_file",
    "task.system": "system_prompt_file system_prompt",
    "task.shuffle": "shuffle_dataset",
    "rewards.functions": "reward_funcs reward_functions reward_fn",
    "rewards.functions.function": "custom_reward_function.path custom_reward_function.name processor env_name",
    "rewards.functions.weight": "reward_weights",
    "rewards.models.path": "reward_model.model_path reward_model",
    "precision": "bf16 fp16 cast_lm_head_to_fp32 quantization torch_dtype dtype vllm_cfg.precision kv_cache_dtype "
    "num_first_layers_in_bf16 num_last_layers_in_bf16 pow2_weight_scaling_factors policy.precision",
    "consistency": "full_determinism",
    "prompts_per_step": "generation_batch_size per_device_train_batch_size train_batch_size batch_size "
    "num_prompts_per_step",
    "steps": "max_steps total_training_steps max_num_steps num_steps train_steps",
    "seed": "data.seed grpo.seed random_seed data_seed",
    "ranks": "n_gpus_per_node nnodes gpus_per_node num_nodes nproc_per_node num_processes cluster",
    "rollouts_ahead": "max_trajectory_age_steps",
    "sampling.group_size": "num_generations num_generations_per_prompt num_samples_per_prompt n",
    "sampling.max_new_tokens": "max_completion_length max_response_length max_tokens max_length",
    "sampling.temperature": "rollout.temperature generation.temperature",
    "sampling.stop": "stop_strings stop_sequences",
    "engine.kv_pages": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "engine.max_sequences": "max_num_seqs",
    "engine.max_batch_tokens": "max_num_batched_tokens",
    "algorithm.preset": "algo algorithm.name",
    "algorithm.advantage": "scale_rewards adv_estimator adv_estimator.name normalize_rewards "
    "use_leave_one_out_baseline",
    "algorithm.loss_aggregation": "loss_type loss_agg_mode token_level_loss",
    "algorithm.decoupled_rewards": "multi_objective_aggregation",
    "algorithm.updates_per_batch": "steps_per_generation gradient_accumulation_steps ppo_mini_batch_size "
    "train_global_batch_size",
    "algorithm.discount": "gamma",
    "algorithm.loss": "surrogate disable_ppo_ratio use_cispo",
    "algorithm.epochs": "num_iterations ppo_epochs",
    "algorithm.ratio": "importance_sampling_level sequence_level_importance_ratios",
    "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low ratio_clip_min cliprange",
    "algorithm.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
    "algorithm.dual_clip": "delta clip_ratio_c ratio_clip_c",
    "algorithm.kl_coefficient": "beta kl_coef kl_loss_coef use_kl_loss reference_policy_kl_penalty init_kl_coef",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty reference_policy_kl_type",
    "algorithm.kl_in_reward": "use_kl_in_reward",
    "algorithm.dynamic_sampling": "filter_groups.enable use_dynamic_sampling",
    "algorithm.max_resamples": "max_num_gen_batches dynamic_sampling_max_gen_batches",
    "algorithm.overlong_buffer": "overlong_buffer_length overlong_buffer.len",
    "algorithm.overlong_penalty": "overlong_buffer_penalty overlong_buffer.penalty_factor",
    "algorithm.router_replay": "enable_rollout_routing_replay",
    "algorithm.recompute_old_logprobs": "bypass_mode",
    "algorithm.correction": "vllm_importance_sampling_correction vllm_importance_sampling_mode rollout_is rollout_rs "
    "rollout_is_threshold rollout_is_batch_normalize rollout_correction use_importance_sampling_correction "
    "truncated_importance_sampling_ratio truncated_importance_sampling_type seq_logprob_error_threshold",
    "adapter.rank": "lora_r lora_rank peft_config.r",
    "adapter.alpha": "lora_alpha",
    "adapter.targets": "lora_target_modules target_modules",
    "adapter.init": "lora_adapter_path",
    "optimizer.learning_rate": "lr",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "optimizer.warmup_steps": "lr_warmup_steps num_warmup_steps",
    "optimizer.final_fraction": "min_lr_ratio",
    "optimizer.betas": "adam_beta1 adam_beta2 adam_betas",
    "optimizer.eps": "adam_epsilon adam_eps",
    "optimizer.max_grad_norm": "clip_grad grad_clip gradient_clip gradient_clipping",
    "optimizer.state": "optim",
    "optimizer.share_prompts": "use_prefix_grouper shared_prefix_training",
    "optimizer.micro_batch_tokens": "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu train_micro_batch_size "
    "train_mb_tokens micro_batch_size",
    "optimizer.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "evaluation.every": "eval_steps test_freq val_period eval_every",
    "evaluation.samples": "max_val_samples",
    "evaluation.num_samples": "num_generations_eval val_kwargs.n",
    "evaluation.temperature": "val_kwargs.temperature",
    "evaluation.keep_best": "load_best_model_at_end",
    "evaluation.best_by": "metric_for_best_model metric_name",
    "run.dir": "output_dir default_local_dir checkpoint_dir log_dir save_dir",
    "run.checkpoint_every": "save_steps save_freq save_period save_every",
    "run.keep_last": "save_total_limit max_actor_ckpt_to_keep keep_top_k",
    "run.completions": "rollout_data_dir",
    "tracking.trackers": "report_to logger wandb_enabled tensorboard_enabled mlflow_enabled use_wandb",
    "tracking.project": "project_name wandb_project",
    "tracking.name": "run_name experiment_name",
}
"""A key of isobit, and what it is called elsewhere."""

_NONE = (
    "generation_kwargs num_train_epochs total_epochs max_num_epochs sync_ref_model "
    "max_rollout_turns mask_truncated_completions top_entropy_quantile off_policy_mask_threshold use_vllm vllm_mode "
    "entropy_coeff tensor_model_parallel_size overlong_filtering reward_scaling "
    "force_on_policy_ratio max_total_sequence_length dtensor_cfg megatron_cfg rollout.name"
)
"""Names to which nothing here corresponds."""

_KEYS = {name: key for key, names in _NAMES.items() for name in names.split()} | dict.fromkeys(_NONE.split())


def counterpart(name: str) -> tuple[bool, str | None]:
    """(whether other trainers know such a name, the key that it is here or None where nothing corresponds to it)."""
    parts = name.split(".")
    ends = [".".join(parts[i:]) for i in range(len(parts))]
    return next(((True, _KEYS[end]) for end in ends if end in _KEYS), (False, None))
