"""Fields of TRL 1.16 that this project does not have, grouped by the reason.

A field may have the value given here, or one of a tuple of values, because these values change nothing. A reason
completes the sentence "…; leave it out".
"""

from typing import Any

# fmt: off
NOT_HERE: dict[str, dict[str, Any]] = {
    "the loss `vespo` is not in this project": {
        "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    },
    "entropy is not part of the loss; see `top_entropy_quantile`": {
        "entropy_coef": 0.0, "use_adaptive_entropy": False, "entropy_coef_min": 0.0, "entropy_coef_max": 1.0,
        "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    },
    "completions are sampled without constraints, so that log-probs are those of the policy": {
        "vllm_structured_outputs_regex": None,
    },
    "the run chooses the port through which servers get weights": {"vllm_group_port": 51216},
    "completions far from the policy are left out by `vllm_importance_sampling_mode`": {
        "off_policy_mask_threshold": None,
    },
    "the Hugging Face engine has a cache of its own": {
        "use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None,
        "use_transformers_paged": False, "cache_implementation": None, "use_cache": (False, True),
    },
    "log-probs are those of the plain softmax at `temperature`": {
        "repetition_penalty": 1.0, "generation_kwargs": (None, {}),
    },
    "rewards are summed by weight, then made advantages": {"multi_objective_aggregation": "sum_then_normalize"},
    "a reward is a function; name it in `reward_funcs`": {"reward_model_name_or_path": None},
    "the optimizer has the settings `optim`, `adam_…` and `weight_decay`": {
        "optim_args": None, "optim_target_modules": None,
    },
    "with noise in the embeddings, the run would not train the policy that it samples from": {
        "neftune_noise_alpha": None
    },
    "the loss has no labels": {"label_smoothing_factor": 0.0, "label_names": None},
    "the loss is normalised over all processes": {"average_tokens_across_devices": True},
    # `disable_dropout: false` is TRL's default, so it is accepted. Dropout is off all the same.
    "dropout is off, so that all log-probs are those of one policy": {
        "lora_dropout": 0.0, "disable_dropout": (False, True),
    },
    "precision is `dtype`, with fp32 trainable weights, optimizer state, log-softmax and loss": {
        "fp16": False, "bf16_full_eval": False, "fp16_full_eval": False, "tf32": None, "cast_lm_head_to_fp32": False,
    },
    "adapters are LoRA on the modules of `lora_target_modules`": {
        "lora_target_parameters": None, "lora_modules_to_save": None, "lora_task_type": "CAUSAL_LM", "use_dora": False,
    },
    "base weights are quantized by `load_in_4bit`, and are not sharded": {
        "load_in_8bit": False, "bnb_4bit_quant_storage": (None, "uint8"),
    },
    "the loss of a mixture-of-experts router is not in this project": {
        "router_aux_loss_coef": None, "ignore_bias_buffers": False,
    },
    "`micro_batch_tokens` sets the physical batch and changes no result": {
        "auto_find_batch_size": False, "pad_to_multiple_of": "auto", "torch_empty_cache_steps": None,
        "gradient_checkpointing_kwargs": (None, {}, {"use_reentrant": False}),
    },
    # Layers are fused for both values of `use_liger_kernel`.
    "decoder layers are compiled by `model.fused`": {
        "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None,
        "use_liger_kernel": (False, True), "liger_kernel_config": None,
    },
    "rows are read by their number; download the data, or write them to a file": {"dataset_streaming": False},
    "rows are read as they are needed, in an order that follows from `seed`": {
        "data_seed": None, "dataloader_drop_last": False,
        "dataloader_pin_memory": True, "dataloader_persistent_workers": False,
        "dataloader_multiprocessing_context": None, "dataloader_in_order": True, "remove_unused_columns": False,
        "train_sampling_strategy": "random", "length_column_name": "length",
    },
    "evaluation counts every sample once and decodes `max_num_seqs` completions at a time": {
        "per_device_eval_batch_size": 8, "eval_delay": 0, "prediction_loss_only": False, "eval_do_concat_batches": True,
        "eval_use_gather_object": False, "eval_accumulation_steps": None, "include_for_metrics": [],
        "batch_eval_metrics": False, "do_train": (False, True), "do_eval": (False, True), "do_predict": False,
    },
    "every step is in `metrics.jsonl`, every completion in `completions/`": {
        "logging_strategy": "steps", "logging_first_step": (True, False), "log_on_each_node": True,
        "logging_nan_inf_filter": (True, False), "include_num_input_tokens_seen": ("no", False), "log_level": "passive",
        "log_level_replica": "warning", "skip_memory_metrics": True, "log_multimodal": (True, False),
        "log_unique_prompts": False, "project": "huggingface", "trackio_space_id": None, "trackio_bucket_id": None,
        "trackio_static_space_id": None, "debug": ("", []),
    },
    "a checkpoint holds the whole state of the run, and a resumed run continues exactly": {
        "save_only_model": False, "save_on_each_node": False, "enable_jit_checkpoint": False, "ignore_data_skip": False,
        "restore_callback_states_from_checkpoint": False, "full_determinism": False,
    },
    "a run of the command line pushes nothing; use `rl-vlm export` and `hf upload`, or GRPOTrainer": {
        "push_to_hub": False, "hub_token": None, "hub_private_repo": None, "hub_model_id": None,
        "hub_strategy": "every_save", "hub_always_push": False, "hub_revision": None, "log_completions_hub_repo": None,
    },
    "the file of `accelerate launch --config_file` says how processes share the model, such as "
    "launch/accelerate/zero3.yaml; it can name a DeepSpeed JSON (docs/distributed.md)": {
        "deepspeed": None, "fsdp": (None, "", []), "fsdp_config": None, "parallelism_config": None,
    },
    "`accelerate launch` starts the processes and chooses their devices": {
        "use_cpu": False, "local_rank": -1, "accelerator_config": None, "ddp_backend": None,
    },
    "the run decides how gradients are exchanged": {
        "ddp_find_unused_parameters": None, "ddp_bucket_cap_mb": None, "ddp_broadcast_buffers": None,
        "ddp_static_graph": None,
    },
}
# fmt: on

CHANGE_NO_RESULT = (
    "the run chooses the port through which servers get weights",
    "the Hugging Face engine has a cache of its own",
    "`micro_batch_tokens` sets the physical batch and changes no result",
    "decoder layers are compiled by `model.fused`",
    "rows are read as they are needed, in an order that follows from `seed`",
    "evaluation counts every sample once and decodes `max_num_seqs` completions at a time",
    "every step is in `metrics.jsonl`, every completion in `completions/`",
    "a checkpoint holds the whole state of the run, and a resumed run continues exactly",
    "a run of the command line pushes nothing; use `rl-vlm export` and `hf upload`, or GRPOTrainer",
    "`accelerate launch` starts the processes and chooses their devices",
    "the run decides how gradients are exchanged",
)
"""Reasons of `NOT_HERE` whose fields do not change the trained weights."""

NOT_CALLED = frozenset(
    """
    _build_accelerator_args _calculate_rewards _clip_grad_norm _compute_loss _determine_best_metric
    _enable_gradient_checkpointing _evaluate _finalize_training _finish_current_push _generate
    _generate_and_score_completions _generate_single_turn _get_collator_with_removed_columns _get_dataloader
    _get_eval_sampler _get_grad_norm _get_last_hidden_state _get_learning_rate _get_num_items_in_batch
    _get_output_dir _get_per_token_logps _get_per_token_logps_and_entropies _get_tool_suffix_ids
    _get_train_sampler _has_mixed_mesh_grads _hp_search_setup _init_training_state _inner_training_loop
    _issue_warnings_after_load _load_best_model _load_callback_state _load_from_checkpoint
    _load_optimizer_and_scheduler _load_rng_state _load_scaler _log_completion_extra _log_metric
    _maybe_log_save_evaluate _mixed_mesh_grad_norm _move_model_to_device _move_model_to_vllm
    _prepare_context_parallel_inputs _prepare_for_training _prepare_input _prepare_inputs _push_from_checkpoint
    _remove_unused_columns _report_to_hp_search _run_epoch _save _save_checkpoint _save_optimizer_and_scheduler
    _save_rng_state _save_scaler _send_telemetry _set_signature_columns_if_needed
    _sync_replicated_trainable_parameters _tokenize_prompts _tool_call_loop _track_num_input_tokens
    _tune_save_checkpoint _update_auto_batch_size _validate_args _wrap_model
    autocast_smart_context_manager call_model_init compute_loss compute_loss_context_manager
    create_accelerator_and_postprocess create_model_card create_optimizer create_optimizer_and_scheduler
    create_scheduler end evaluation_loop floating_point_ops get_batch_samples get_cp_size
    get_decay_parameter_names get_eval_dataloader get_gamma_weights get_high_entropy_mask get_learning_rates
    get_num_trainable_parameters get_off_policy_mask get_optimizer_cls_and_kwargs get_optimizer_group
    get_sp_size get_test_dataloader get_total_train_batch_size get_tp_size get_train_dataloader
    hyperparameter_search init_hf_repo is_local_process_zero is_world_process_zero log log_metrics
    loss_is_scaled_for_ga metrics_format num_examples pop_callback predict prediction_step
    remove_callback save_metrics save_model save_state set_initial_training_values store_flos training_step
    """.split()
)
"""Methods of TRL's GRPOTrainer and of transformers' Trainer, in this or earlier versions, that no run calls."""
