"""Fields of TRL 1.16 that this project does not have, by the reason why.

A field may have the value given here, or one of a tuple of values, which ask for what holds anyway. A reason completes
the sentence "…; leave it out".
"""

from typing import Any

# fmt: off
NOT_HERE: dict[str, dict[str, Any]] = {
    "tools and multi-turn are not in this project": {"max_tool_calling_iterations": None},
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
    "noise in the embeddings would make the trained policy another one than the sampled": {"neftune_noise_alpha": None},
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
    "compilation and kernels are not chosen here": {
        "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None, "use_liger_kernel": False,
        "liger_kernel_config": None,
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
    "nothing is pushed to a hub": {
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
