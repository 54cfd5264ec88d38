"""Advice for settings of other systems: VLM-R1, EasyR1, verl, ms-swift, and the arguments of TRL's trainer.

`trl_fields.py` converts TRL's other settings.
"""

NESTED = ("worker", "trainer", "actor_rollout_ref", "reward_model", "custom_reward_function")
"""Sections of EasyR1 and verl that do not exist here."""

# fmt: off
WRITE: dict[str, str] = {
    # TRL's GRPOTrainer
    "peft_config": "write `use_peft=True`, with `lora_r`, `lora_alpha` and `lora_target_modules`",
    "processing_class": "leave it out: the processor is the checkpoint's, with `min_pixels` and `max_pixels`",
    "reward_processing_classes": "leave it out: a reward is a function, and `reward_model` is a built-in one",
    "optimizers": "leave it out: see `optim` and `lr_scheduler_type`",
    "callbacks": "leave it out: `metrics.jsonl` has a line for every step, and `report_to` names trackers",
    "rollout_func": "leave it out: `rollout.engine` samples",
    "environment_factory": "leave it out: multi-turn is not in this project",
    # VLM-R1; `trl_fields.py` converts `data_file_paths` and `image_folders`
    "is_reward_customized_from_vlm_module": "name the functions in `reward_funcs`",
    "reward_method": "name a function for each kind of answer in `reward_funcs`, such as choice or numeric",
    "task_type": "write the question into `prompt_template`, and name functions in `reward_funcs`",
    "max_anyres_num": "leave it out: the checkpoint's processor decides how an image is tiled",
    "val_split_ratio": "write held-out rows to a file of their own, and name it in `eval_dataset_name`",
    "arrow_cache_dir": "leave it out: files are read where they are",
    # EasyR1 and verl
    "train_files": "write `data.dataset_name`: a name, also with @split, or a list of them",
    "val_files": "write `data.eval_dataset_name`: a name, also with @split, or a list of them",
    "prompt_key": "leave it out for `problem` and `prompt`, else write `data.columns`, such as {prompt: question}",
    "answer_key": "leave it out for `answer`, else write `data.columns`, such as {solution: label}",
    "image_key": "leave it out for `images`, else write `data.columns`, such as {image: photo}",
    "format_prompt": "write `data.prompt_template`, with columns in braces",
    "max_response_length": "write `rollout.max_completion_length`",
    "rollout_batch_size": "write `train.prompts_per_step`, and `train.steps_per_generation` for several steps",
    "train_batch_size": "write `train.prompts_per_step`, and `train.steps_per_generation` for several steps",
    "global_batch_size": "write `train.prompts_per_step`",
    "ppo_mini_batch_size": "write `train.prompts_per_step`",
    "filter_overlong_prompts": "leave it out: longer prompts than `data.max_prompt_length` are always dropped",
    "adv_estimator": "leave it out: advantages are GRPO's; see `algorithm.scale_rewards`",
    "disable_kl": "leave it out: without `algorithm.beta` there is no KL term",
    "use_kl_loss": "write `algorithm.beta`, the weight of the KL term in the loss",
    "kl_coef": "write `algorithm.beta`",
    "kl_loss_coef": "write `algorithm.beta`",
    "clip_ratio_low": "write `algorithm.epsilon`",
    "clip_ratio_high": "write `algorithm.epsilon_high`",
    "model.model_path": "write `model.model_name_or_path`",
    "model.path": "write `model.model_name_or_path`",
    "enable_gradient_checkpointing": "write `memory.gradient_checkpointing`",
    "optim.lr": "write `train.learning_rate`",
    "lr_warmup_ratio": "write `train.warmup_steps`: below 1 it is a fraction of all steps",
    "micro_batch_size_per_device_for_update": "write `memory.micro_batch_tokens`",
    "micro_batch_size_per_device_for_experience": "write `memory.micro_batch_tokens`",
    "rollout.n": "write `rollout.num_generations`",
    "gpu_memory_utilization": "write `vllm.vllm_gpu_memory_utilization`",
    "tensor_parallel_size": "write `vllm.vllm_tensor_parallel_size`",
    "tensor_model_parallel_size": "write `vllm.vllm_tensor_parallel_size`",
    "score_function": "write `rewards.reward_funcs: file.py:function`",
    "reward_function": "write `rewards.reward_funcs: file.py:function`",
    "custom_reward_function.path": "write `rewards.reward_funcs: file.py:function`",
    "total_episodes": "write `train.num_train_epochs`",
    "total_epochs": "write `train.num_train_epochs`",
    "val_freq": "write `train.eval_steps`",
    "test_freq": "write `train.eval_steps`",
    "val_before_train": "write `train.eval_on_start`",
    "save_freq": "write `train.save_steps`",
    "save_limit": "write `train.save_total_limit`",
    "save_checkpoint_path": "write `train.output_dir`",
    "default_local_dir": "write `train.output_dir`",
    "load_checkpoint_path": "write `train.resume_from_checkpoint`",
    "experiment_name": "write `log.run_name`",
    "project_name": "leave it out: a tracker gets `log.run_name`",
    "logger": "write `log.report_to`",
    "n_gpus_per_node": "leave it out: `accelerate launch` starts the processes",
    "nnodes": "leave it out: `accelerate launch` starts the processes",
    # ms-swift
    "rlhf_type": "leave it out: training is GRPO",
    "train_type": "write `model.use_peft`: true for lora, false for full",
    "tuner_type": "write `model.use_peft`: true for lora, false for full",
    "lora_rank": "write `model.lora_r`",
    "target_modules": "write `model.lora_target_modules`",
    "freeze_vit": "write `model.freeze_vision_tower`",
    "dataset": "write `data.dataset_name`",
    "val_dataset": "write `data.eval_dataset_name`",
    "split_dataset_ratio": "write held-out rows to a file of their own, and name it in `eval_dataset_name`",
    "system": "write `data.system_prompt`, the text itself",
    "max_length": "write `data.max_prompt_length`: longer prompts are dropped, never cut",
    "external_plugins": "write the file into `reward_funcs`, as `file.py:function`",
    "sleep_level": "write `vllm.vllm_enable_sleep_mode`",
}
# fmt: on
"""Advice by the end of a key."""


def instead_of(key: str) -> str | None:
    """Return the advice for another system's setting, or None if its name is unknown."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((WRITE[end] for end in ends if end in WRITE), None)
