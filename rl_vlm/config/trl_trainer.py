"""Attributes of TRL's GRPOTrainer that this project's trainer does not have, grouped by advice.

A text completes the sentence "GRPOTrainer has no `…`: ".
"""

from rl_vlm.config.elsewhere import instead_of
from rl_vlm.config.schema import SETTINGS
from rl_vlm.config.trl_refused import NOT_CALLED, NOT_HERE

# fmt: off
INSTEAD: dict[str, str] = {
    "the loop is not TRL's, and keeps its models to itself. The trained weights are in the directory `checkpoint`; "
    "save_model() writes them as a plain model, which from_pretrained() loads":
        "model model_wrapped ref_model model_init generation_config is_model_parallel place_model_on_device "
        "call_model_init get_num_trainable_parameters",
    "the processor is the checkpoint's; save_model() writes it too, and AutoProcessor.from_pretrained() loads it":
        "processing_class tokenizer chat_template chat_template_kwargs",
    "the settings are `config`, in sections, such as `config.train.learning_rate`":
        "args hub_model_id is_distributed_loading_by_transformers",
    "the rows are your own arguments, and `config.data` names them": "train_dataset eval_dataset data_collator",
    "processes are accelerate's, while train() or evaluate() runs. For the main process, compare the environment "
    "variable RANK with 0; print() replaces `accelerator.print`":
        "accelerator is_world_process_zero is_local_process_zero is_deepspeed_enabled is_fsdp_enabled "
        "is_fsdp_xla_enabled is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled create_accelerator_and_postprocess "
        "deepspeed gather_function get_cp_size get_sp_size get_tp_size",
    "train() returns the summary of the run, and `metrics.jsonl` in the run's directory has a line for every step":
        "state control is_in_train log log_metrics save_metrics save_state metrics_format current_flos "
        "floating_point_ops store_flos num_examples compute_metrics preprocess_logits_for_metrics "
        "model_preparation_time",
    "the run makes its optimizer of the settings `optim`, `learning_rate`, `lr_scheduler_type` and their relatives":
        "optimizer lr_scheduler create_optimizer create_scheduler create_optimizer_and_scheduler "
        "get_optimizer_cls_and_kwargs get_optimizer_group get_decay_parameter_names get_learning_rates "
        "optimizer_cls_and_kwargs",
    "the loss is set in the section `algorithm`, and `loss_type` can be a function":
        "epsilon_low compute_loss compute_loss_func compute_loss_context_manager autocast_smart_context_manager "
        "training_step loss_is_scaled_for_ga get_high_entropy_mask get_off_policy_mask get_gamma_weights "
        "label_smoother model_accepts_loss_kwargs can_return_loss aux_loss_enabled neftune_hook_handle",
    "rewards are the argument `reward_funcs`, and `config.rewards` lists them": "reward_func_names",
    "held-out rows are the argument `eval_dataset`, and evaluate() samples and scores them":
        "predict evaluation_loop prediction_step",
    "rows are drawn by the settings of the section `data`":
        "get_train_dataloader get_eval_dataloader get_test_dataloader get_batch_samples get_total_train_batch_size "
        "set_initial_training_values current_gradient_accumulation_steps",
    "completions are sampled by `rollout.engine`, with the settings of the sections `rollout` and `vllm`":
        "vllm_generation use_vllm vllm_mode eos_token_ids continuous_batching_config",
    "a reward function gets the instances of the environment in its argument `environments`":
        "environments environment_factories async_loop_thread async_loop_ready_event",
    "it is the setting `config.rollout.max_turns`, one more than the rounds of tools": "max_tool_calling_iterations",
    "save_model() writes the model card": "create_model_card",
    "train() closes what it opens; leave it out": "end",
    "start several runs with other settings; there is no search":
        "hyperparameter_search hp_name hp_search_backend hp_space compute_objective objective",
    "a callback stays for the life of a trainer; make another one": "pop_callback remove_callback callback_handler",
    "nothing is pushed while a run trains": "init_hf_repo push_in_progress commit_scheduler",
}
# fmt: on
"""Names of attributes and methods by advice."""

INTERNAL = "it is internal to TRL's loop, which is not the one here. docs/python.md#subclasses lists replacements"


def reason_without(name: str) -> str | None:
    """Return why this project's trainer has no attribute of TRL's with this name, or None if TRL has none either."""
    for advice, names in INSTEAD.items():
        if name in names.split():
            return advice
    if setting := next((setting for setting in SETTINGS if setting.partition(".")[2] == name), None):
        return f"it is the setting `config.{setting}`"
    if refused := next((f"{reason}; leave it out" for reason, fields in NOT_HERE.items() if name in fields), None):
        return refused
    return instead_of(name) or (INTERNAL if name in NOT_CALLED else None)
