"""Settings of other systems: VLM-R1, EasyR1, verl with verl-agent and VAGEN, ms-swift, and arguments of TRL's trainer.

A row has the advice of error messages, and the conversion of `rl-vlm migrate`. `trl_fields.py` has TRL's other
settings, which VLM-R1 and ms-swift have too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rl_vlm.config import conversions as convert
from rl_vlm.config.conversions import Convert, FoundSettings, Given
from rl_vlm.config.trl_fields import QLORA

NESTED = (
    "worker", "trainer", "actor_rollout_ref", "reward_model", "custom_reward_function", "env", "rollout_manager",
    "generator",
)  # fmt: skip
"""Sections of EasyR1, verl, verl-agent, VAGEN and SkyRL that do not exist here."""


class Counterpart(NamedTuple):
    """Treatment of another system's setting."""

    advice: str
    """Advice for the user."""
    converts: Convert | None
    """The conversion of the value, or None if the user has to decide."""
    needs_environment: bool = False
    """Whether the advice leads to `rollout.environment`."""


def to(setting: str, note: str = "", converts: Convert | None = None) -> Counterpart:
    """Build the row of a setting that has another name here. Without `converts`, the value is the same."""
    leaf = setting.rpartition(".")[2]
    return Counterpart(f"write `{setting}`{note}", converts or (lambda value, given: {leaf: value}))


def needless(reason: str, *values: Any) -> Counterpart:
    """Build the row of a setting to leave out. With `values`, another value has no equivalent."""

    def check(value: Any, given: Given) -> FoundSettings:
        if values and value is not None and value not in values:
            raise ValueError(reason)
        return {}

    return Counterpart(f"leave it out: {reason}", check)


def by_hand(advice: str, needs_environment: bool = False) -> Counterpart:
    """Build the row of a setting without a conversion."""
    return Counterpart(advice, None, needs_environment)


def off(reason: str) -> Counterpart:
    """Build the row of a setting that must be off."""
    return needless(reason, False, 0, "", [], "disable")


def by_name(rows: Mapping[str, Counterpart]) -> dict[str, Counterpart]:
    """Return the rows by the name of a setting. Several names of a row are separated by spaces."""
    return {name: row for names, row in rows.items() for name in names.split()}


BATCH = ", and `train.steps_per_generation` for several steps"
SPLITS = ": a name, also with @split, or a list of them"
FUNCTION = "write `rewards.reward_funcs: file.py:function`"
HELD_OUT = by_hand("write held-out rows to a file of their own, and name it in `eval_dataset_name`")
MICRO_BATCHES = "`memory.micro_batch_tokens` sets the physical batch and changes no result"
PROCESSES = "`rl-vlm launch` or `accelerate launch` starts the processes"
OF_FUNCTION = Counterpart("write `kwargs` of the function in `rewards.reward_funcs`", needless("").converts)
"""Read with the function."""
TOKENS = Counterpart("write `memory.micro_batch_tokens`", needless("").converts)
SHARDED = Counterpart(
    "write `--sharding fsdp2` or `zero3_offload` of `rl-vlm launch` (docs/distributed.md)", convert.sharded
)
TOOLS = by_hand(
    "write `rollout.tools`, functions with type hints and docstrings, or `rollout.environment`, a class with such "
    "methods",
    needs_environment=True,
)
ENVIRONMENT = by_hand(
    "write `rollout.environment`, with `rollout.environment_protocol: steps`; arguments are "
    "`rollout.environment_kwargs`",
    needs_environment=True,
)
WHOLE_CONTEXT = by_hand("leave it out: the model sees the whole conversation at every turn")
ONE_MODEL = "GRPO has no critic"
OWN_ENGINE = "the engine chooses it"

# fmt: off
TRL: dict[str, Counterpart] = {
    "peft_config": by_hand("write `use_peft=True`, with `lora_r`, `lora_alpha` and `lora_target_modules`"),
    "processing_class": needless("the processor is the checkpoint's, with `min_pixels` and `max_pixels`"),
    "reward_processing_classes": needless("a reward is a function, and `reward_model` is a built-in one"),
    "optimizers": needless("see `optim` and `lr_scheduler_type`"),
    "callbacks": needless("`metrics.jsonl` has a line for every step, and `report_to` names trackers"),
    "rollout_func": needless("`rollout.engine` samples, and `rollout.environment` is for several turns"),
    "environment_factory": to("rollout.environment", ": `file.py:Class`, or several classes by name"),
    "quantization_config": by_hand(QLORA),
}
"""Arguments of TRL's GRPOTrainer."""

COMPLETIONS: dict[str, Counterpart] = by_name({
    "per_device_train_batch_size gradient_accumulation_steps":
        to("train.prompts_per_step", "", convert.completions_to_prompts),
    "steps_per_generation generation_batch_size": to("train.steps_per_generation", "", convert.completions_to_prompts),
    "attn_implementation": to("model.attn_implementation", "", convert.attention),
    "deepspeed": Counterpart("write --sharding of `rl-vlm launch` (docs/distributed.md)", convert.deepspeed),
})
"""Settings of VLM-R1 and ms-swift that mean the same in TRL, and get another form."""

VLM_R1: dict[str, Counterpart] = {
    "is_reward_customized_from_vlm_module": Counterpart("name the functions in `reward_funcs`", needless("").converts),
    "reward_method": Counterpart("name a function for each kind of answer in `reward_funcs`, such as choice or numeric",
                         needless("").converts),
    "task_type": by_hand("write the question into `prompt_template`, and name functions in `reward_funcs`"),
    "max_anyres_num": needless("the checkpoint's processor decides how an image is tiled"),
    "val_split_ratio": Counterpart(HELD_OUT.advice, off("write held-out rows to a file").converts),
    "arrow_cache_dir": needless("files are read where they are"),
    "image_root": to("data.image_root"),
    "dataset_name": to("data.dataset_name", "", convert.vlm_r1_data),
    "reward_funcs": to("rewards.reward_funcs", "", convert.vlm_r1_rewards),
}
"""`trl_fields.py` converts `data_file_paths`, `image_folders` and `freeze_vision_modules`."""

EASYR1_AND_VERL: dict[str, Counterpart] = by_name({
    "train_files": to("data.dataset_name", SPLITS),
    "val_files": to("data.eval_dataset_name", SPLITS),
    "prompt_key": Counterpart("leave it out for `problem` and `prompt`, else write `data.columns`, such as "
                              "{prompt: question}",
                      convert.column("prompt", "problem", "prompt")),
    "answer_key": Counterpart("leave it out for `answer`, else write `data.columns`, such as {solution: label}",
                      convert.column("solution", "answer", "solution")),
    "image_key": Counterpart("leave it out for `images`, else write `data.columns`, such as {image: photo}",
                     convert.column("image", "images", "image")),
    "video_key": Counterpart("leave it out for `videos`, else write `data.columns`, such as {video: clip}",
                     convert.column("video", "videos", "video")),
    "video_fps": to("data.fps", "; 2 is the default", lambda value, given: {} if value == 2 else {"fps": value}),
    "image_dir": to("data.image_root"),
    "format_prompt": by_hand("write `data.prompt_template`, with columns in braces"),
    "override_chat_template": off("the chat template is the checkpoint's; see `data.chat_template_kwargs`"),
    "data.system_prompt": to("data.system_prompt"),
    "data.max_prompt_length": to("data.max_prompt_length"),
    "data.min_pixels": to("data.min_pixels"),
    "data.max_pixels": to("data.max_pixels"),
    "data.seed": to("train.seed"),
    "data.shuffle": to("data.shuffle_dataset"),
    "max_response_length": to("rollout.max_completion_length"),
    "rollout_batch_size train_batch_size": to("train.prompts_per_step", BATCH, convert.prompts_of_window_and_step),
    "mini_rollout_batch_size": needless("a window is sampled at once"),
    "val_batch_size": needless("`rollout.max_num_seqs` completions are decoded at a time"),
    "actor.global_batch_size global_batch_size ppo_mini_batch_size":
        to("train.prompts_per_step", "", convert.prompts_of_window_and_step),
    "ppo_epochs": to("algorithm.num_iterations"),
    "filter_overlong_prompts filter_overlong_prompts_workers":
        needless("longer prompts than `data.max_prompt_length` are always dropped"),
    "truncation": needless("prompts are never truncated; longer ones are dropped"),
    "adv_estimator": Counterpart("leave it out for GRPO, and write `algorithm.turn_advantages: gigpo` for GiGPO",
                         convert.choice_of({None: {}, "grpo": {}, "gigpo": {"turn_advantages": "gigpo"}},
                         "advantages are GRPO's; see `algorithm.scale_rewards` and `algorithm.turn_advantages`")),
    "norm_adv_by_std_in_grpo": to("algorithm.scale_rewards", "", convert.choice_of(
        {True: {}, False: {"scale_rewards": "none"}}, "it should be true or false")),
    "gamma": to("algorithm.turn_discount", ", with `algorithm.turn_advantages`", convert.with_gigpo(
        lambda value, given: {"turn_discount": value}, "all tokens of a completion have its advantage")),
    "gigpo.step_advantage_w": to("algorithm.turn_weight", "", convert.with_gigpo(
        lambda value, given: {"turn_weight": value})),
    "gigpo.mode": to("algorithm.scale_rewards", "", convert.with_gigpo(convert.choice_of(
        {"mean_std_norm": {}, "mean_norm": {"scale_rewards": "none"}}, "it should be mean_std_norm or mean_norm"))),
    "gigpo.enable_similarity": off("turns begin alike if their observations are equal"),
    "gigpo.similarity_thresh": needless("turns begin alike if their observations are equal"),
    "high_level_gamma": by_hand("write `algorithm.turn_advantages: return` and `algorithm.turn_discount`; GRPO has no "
                                "critic"),
    "use_invalid_action_penalty": off("`step` of the environment gives the reward of a turn without an action"),
    "invalid_action_penalty_coef": needless("`step` of the environment gives the reward of a turn without an action"),
    "env.max_steps rollout_manager.max_turns": to("rollout.max_turns"),
    "env.rollout.n rollout_manager.n_trajectory rollout.n": to("rollout.num_generations"),
    "env.seed rollout.seed": needless("the seed is `train.seed`"),
    "env.history_length rollout_manager.window_size": WHOLE_CONTEXT,
    "env.resources_per_worker.*": needless("environments run in threads or processes of the training processes"),
    "env.* rollout_manager.*": ENVIRONMENT,
    "rollout_manager.use_loss_mask": needless("only sampled tokens train", True),
    "rollout_manager.use_gae_mask critic.* max_critic_ckpt_to_keep": needless(ONE_MODEL),
    "rollout_manager.use_multi_turn_reward": off("`algorithm.turn_advantages: return` trains with rewards of turns"),
    "lam": needless("all tokens of a completion have its advantage", 1),
    "disable_kl": needless("without `algorithm.beta` there is no KL term"),
    "use_kl_loss": Counterpart("write `algorithm.beta`, the weight of the KL term in the loss", needless("").converts),
    "use_kl_in_reward": to("algorithm.beta", ", the weight of the KL term in the loss", convert.kl_in_reward),
    "algorithm.kl_coef kl_loss_coef": to("algorithm.beta", "", convert.kl_in_loss),
    "kl_coef": Counterpart("write `algorithm.beta`", needless("").converts),
    "kl_loss_type kl_penalty": needless("the KL term is estimated by k3 (low_var_kl)"),
    "kl_ctrl.*": needless("there is no KL term in the reward"),
    "kl_type": needless("the coefficient is constant", "fixed"),
    "clip_ratio clip_ratio_low": to("algorithm.epsilon", "", convert.clip_range),
    "clip_ratio_high": to("algorithm.epsilon_high", "", convert.clip_range),
    "clip_ratio_c clip_ratio_dual": to("algorithm.delta"),
    "loss_agg_mode": to("algorithm.loss_type", "", convert.choice_of({
        "token-mean": {}, "seq-mean-token-mean": {"loss_type": "grpo"},
        "seq-mean-token-sum-norm": {"loss_type": "dr_grpo"}}, "choose `algorithm.loss_type` (docs/losses.md)")),
    "loss_avg_mode": to("algorithm.loss_type", "", convert.choice_of(
        {"token": {}, "seq": {"loss_type": "grpo"}}, "choose `algorithm.loss_type` (docs/losses.md)")),
    "loss_mode": to("algorithm.importance_sampling_level", "", convert.choice_of({
        "vanilla": {}, "default": {}, "gspo": {"importance_sampling_level": "sequence"},
        "gspo_token": {"importance_sampling_level": "sequence"}},
        "choose `algorithm.loss_type` (docs/losses.md)")),
    "loss_type": Counterpart("write `algorithm.loss_type`", convert.choice_of({
        "default": {}, "gspo": {"importance_sampling_level": "sequence"}},
        "choose `algorithm.loss_type` (docs/losses.md)")),
    "entropy_coeff": off("entropy is not part of the loss; see `algorithm.top_entropy_quantile`"),
    "online_filtering filter_groups.enable":
        off("`rollout.max_resampling_rounds` generates groups without advantages again"),
    "max_try_make_batch": needless("it is a limit of `online_filtering`"),
    "model.model_path model.path": to("model.model_name_or_path"),
    "tokenizer_path": needless("the tokenizer is the checkpoint's", None),
    "trust_remote_code": to("model.trust_remote_code"),
    "freeze_vision_tower": to("model.freeze_vision_tower"),
    "lora.rank model.lora_rank": to("model.lora_r", "", convert.adapter),
    "lora.alpha model.lora_alpha": to("model.lora_alpha", "", convert.with_adapter("lora_alpha")),
    "lora.target_modules model.target_modules":
        to("model.lora_target_modules", "", convert.with_adapter("lora_target_modules")),
    "lora.exclude_modules model.exclude_modules":
        to("model.lora_exclude_modules", "", convert.with_adapter("lora_exclude_modules")),
    "enable_gradient_checkpointing": to("memory.gradient_checkpointing"),
    "enable_activation_offload": to("memory.activation_offloading"),
    "max_grad_norm grad_clip": to("train.max_grad_norm"),
    "optim.lr": to("train.learning_rate"),
    "optim.weight_decay": to("train.weight_decay"),
    "optim.strategy": to("train.optim", "", convert.choice_of({"adamw": {}}, "the optimizer has a float32 state")),
    "optim.betas": Counterpart("write `train.adam_beta1` and `train.adam_beta2`",
                       lambda value, given: {"adam_beta1": value[0], "adam_beta2": value[1]}),
    "lr_warmup_ratio": to("train.warmup_steps", ": below 1 it is a fraction of all steps", convert.warmup),
    "lr_warmup_steps": to("train.warmup_steps", "", convert.warmup),
    "lr_scheduler_type warmup_style": to("train.lr_scheduler_type", "", convert.schedule),
    "use_torch_compile": needless("`model.fused` compiles layers"),
    "fsdp.torch_dtype": to("model.dtype", "", convert.choice_of(
        {"bf16": {"dtype": "bfloat16"}, "bfloat16": {"dtype": "bfloat16"}, "fp32": {"dtype": "float32"},
         "float32": {"dtype": "float32"}}, "the precisions are bfloat16 and float32")),
    "use_remove_padding padding_free": needless("micro-batches have no padding to remove"),
    "dynamic_batching use_dynamic_bsz ppo_micro_batch_size_per_gpu ppo_micro_batch_size "
    "log_prob_micro_batch_size_per_gpu log_prob_micro_batch_size ppo_max_token_len_per_gpu "
    "log_prob_max_token_len_per_gpu log_prob_use_dynamic_bsz":
        needless(MICRO_BATCHES),
    "micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience": TOKENS,
    "ulysses_size ulysses_sequence_parallel_size": needless("sequences are not split over devices", 1),
    "actor.strategy offload.* fsdp.* fsdp_config.*": SHARDED,
    "worker.ref.* actor_rollout_ref.ref.*": needless("the reference model is sharded as the policy is"),
    "rollout.name": to("rollout.engine", "", convert.engine),
    "rollout.mode rollout.limit_images rollout.load_format rollout.layered_summon max_num_batched_tokens "
    "enable_chunked_prefill disable_log_stats engine_kwargs.*":
        needless(OWN_ENGINE),
    "rollout.temperature": to("rollout.temperature"),
    "rollout.top_p": to("rollout.top_p"),
    "rollout.top_k": to("rollout.top_k", "", lambda value, given: {"top_k": max(value, 0)}),
    "rollout.dtype": needless("the engine has the precision of `model.dtype`"),
    "rollout.ignore_eos": off("a completion ends with its end token"),
    "rollout.disable_tqdm": needless("see `log.disable_tqdm`"),
    "multi_turn.enable": off("with `rollout.tools` or `rollout.environment`, a completion has several turns")
        ._replace(needs_environment=True),
    "multi_turn.max_assistant_turns": to("rollout.max_turns", "", convert.turns),
    "multi_turn.max_user_turns": needless("`rollout.max_turns` counts the turns of the model", None),
    "multi_turn.max_parallel_calls": needless("all calls of a turn are run"),
    "multi_turn.format": needless("the chat template decides; see `rollout.tool_format`"),
    "multi_turn.tokenization_sanity_check_mode": needless("sampled tokens are kept as they are"),
    "multi_turn.*": TOOLS,
    "rollout.max_model_len": to("vllm.vllm_max_model_length"),
    "max_num_seqs": to("rollout.max_num_seqs"),
    "enforce_eager": to("vllm.vllm_enforce_eager"),
    "free_cache_engine": to("vllm.vllm_enable_sleep_mode"),
    "gpu_memory_utilization": to("vllm.vllm_gpu_memory_utilization"),
    "tensor_parallel_size tensor_model_parallel_size": to("vllm.vllm_tensor_parallel_size"),
    "val_override_config.temperature val_kwargs.temperature": to("rollout.eval_temperature"),
    "val_override_config.n val_kwargs.n": to("rollout.num_generations_eval"),
    "val_override_config.top_p val_kwargs.top_p": needless("`rollout.top_p` is for evaluations too", 1),
    "val_kwargs.top_k": needless("`rollout.top_k` is for evaluations too", -1, 0),
    "val_kwargs.do_sample": needless("`rollout.eval_temperature` decides"),
    "score_function reward_function": Counterpart(FUNCTION, convert.easyr1_function),
    "score_function_kwargs.* reward_function_kwargs.* custom_reward_function.reward_kwargs.*": OF_FUNCTION,
    "reward_type": needless("the function's arguments say how it is called"),
    "reward_manager": needless("the function's arguments say how it is called", "naive", "batch", "prime"),
    "reward.num_cpus": needless("functions run in the process of their rank"),
    "custom_reward_function.path": Counterpart(FUNCTION, convert.function_in_file),
    "custom_reward_function.name": Counterpart("write it into `rewards.reward_funcs`", convert.function_in_file),
    "reward_model.enable": off("a model as judge is the function `reward_model` (docs/built_in_rewards.md)"),
    "reward_model.model.*": needless("a model as judge is the function `reward_model` (docs/built_in_rewards.md)"),
    "launch_reward_fn_async": needless("rewards are computed while the next groups are sampled"),
    "total_episodes total_epochs": to("train.num_train_epochs"),
    "trainer.max_steps total_training_steps": to("train.max_steps", "", convert.rollouts_to_steps("max_steps", None)),
    "val_freq test_freq": to("train.eval_steps", "", convert.rollouts_to_steps("eval_steps")),
    "val_before_train": to("train.eval_on_start"),
    "val_only": off("`rl-vlm eval` evaluates without training"),
    "val_generations_to_log log_val_generations": needless("`completions/` has every completion"),
    "save_freq": to("train.save_steps", "", convert.rollouts_to_steps("save_steps")),
    "save_limit": to("train.save_total_limit", "", lambda value, given: {} if value == -1 else
                     {"save_total_limit": value}),
    "save_model_only": needless("a checkpoint holds the whole state of the run"),
    "max_actor_ckpt_to_keep": to("train.save_total_limit"),
    "critic_warmup": needless(ONE_MODEL, 0),
    "save_checkpoint_path default_local_dir": to("train.output_dir"),
    "load_checkpoint_path": to("train.resume_from_checkpoint"),
    "find_last_checkpoint": Counterpart("write `train.resume_from_checkpoint: auto`", convert.choice_of(
        {True: {"resume_from_checkpoint": "auto"}, False: {}}, "it should be true or false")),
    "resume_mode": to("train.resume_from_checkpoint", "", convert.resumed),
    "experiment_name": to("log.run_name"),
    "project_name": needless("a tracker gets `log.run_name`"),
    "logger": to("log.report_to", "", convert.trackers),
    "n_gpus_per_node": Counterpart("leave it out: `accelerate launch` starts the processes",
                           lambda value, given: {"--gpus": value}),
    "nnodes": Counterpart("leave it out: `accelerate launch` starts the processes",
                          lambda value, given: {"--nodes": value}),
    "trainer.device ray_kwargs.* ray_init.*": needless(PROCESSES),
    "hydra.* defaults": needless("it configures Hydra"),
    "reward_fn_key": needless("the column `data_source` stays for the function"),
    "return_raw_chat return_raw_input_ids": needless("functions get the prompt as messages"),
})

SWIFT: dict[str, Counterpart] = by_name({
    "attn_impl": to("model.attn_implementation", "", convert.attention),
    "rlhf_type": Counterpart("leave it out: training is GRPO",
                     needless("this project has GRPO alone", "grpo").converts),
    "model": to("model.model_name_or_path"),
    "model_type": needless("the checkpoint says it"),
    "template": needless("the chat template is the checkpoint's"),
    "train_type tuner_type": to("model.use_peft", ": true for lora, false for full", convert.tuner),
    "lora_rank": to("model.lora_r"),
    "target_modules": to("model.lora_target_modules", "", lambda value, given: {
        "lora_target_modules": "all-linear" if value in ("all-linear", ["all-linear"]) else
        value if isinstance(value, list) else [value]}),
    "freeze_vit": to("model.freeze_vision_tower", "", convert.frozen_tower),
    "freeze_llm": off("name the modules to train in `model.trainable_modules`"),
    "freeze_aligner": needless("name the modules to train in `model.trainable_modules`"),
    "dataset": to("data.dataset_name", "", convert.swift_data("dataset_name")),
    "val_dataset": to("data.eval_dataset_name", "", convert.swift_data("eval_dataset_name")),
    "split_dataset_ratio": Counterpart(HELD_OUT.advice, off("write held-out rows to a file").converts),
    "dataset_shuffle train_dataloader_shuffle": to("data.shuffle_dataset"),
    "dataset_num_proc load_from_cache_file lazy_tokenize": needless("rows are read as they are needed"),
    "strict": needless("`data.on_bad_row` decides"),
    "system": to("data.system_prompt", ", the text itself", convert.swift_system),
    "max_length": to("data.max_prompt_length", ": longer prompts are dropped, never cut"),
    "truncation_strategy": needless("prompts are never truncated; longer ones are dropped"),
    "external_plugins": Counterpart(
        "write the file into `reward_funcs`, as `file.py:name`, with the registered name", needless("").converts),
    "reward_funcs": to("rewards.reward_funcs", "", convert.swift_rewards),
    "sleep_level": to("vllm.vllm_enable_sleep_mode", "", lambda value, given: {
        "vllm_enable_sleep_mode": bool(value)}),
    "vllm_max_model_len": to("vllm.vllm_max_model_length"),
    "vllm_limit_mm_per_prompt": needless(OWN_ENGINE),
    "vllm_enforce_eager": to("vllm.vllm_enforce_eager"),
    "offload_optimizer offload_model": needless("the trainer's states stay where the sharding has them"),
    "move_model_batches": needless("weights are sent one by one"),
    "gc_collect_after_offload": needless("memory is freed when it is needed"),
    "async_generate": off("`rollout.max_staleness: 1` samples the next window meanwhile, on `engine: vllm_server`"),
    "dynamic_sample": off("`rollout.max_resampling_rounds` generates groups without advantages again"),
    "padding_free": needless("micro-batches have no padding to remove"),
    "log_entropy": needless("`metrics.jsonl` has the entropy"),
    "max_resample_times": needless("`rollout.max_resampling_rounds` generates groups without advantages again"),
    "multi_turn_scheduler": TOOLS,
    "use_gym_env gym_env": ENVIRONMENT,
    "agent_template": needless("the chat template decides; see `rollout.tool_format`"),
    "overlong_filter": to("algorithm.mask_truncated_completions"),
    "use_hf": needless("names are those of the Hugging Face hub; a name of ModelScope alone is not found"),
    "logging_dir": needless("the run directory has the logs"),
    "create_checkpoint_symlink": needless("checkpoints have fixed names"),
    "add_version": needless("`train.output_dir` is used as it is"),
})

SKYRL: dict[str, Counterpart] = {
    "env_class": Counterpart("write `rollout.environment: skyrl:ID`, with `rollout.environment_protocol: steps`", None),
    "skyrl_gym.*": by_hand("write `rollout.environment_kwargs`"),
    "generator.max_turns": to("rollout.max_turns"),
    "max_generate_length": by_hand("write `rollout.max_turn_tokens` for one turn, and `rollout.max_completion_length` "
                                   "for all turns with their observations"),
    "n_samples_per_prompt": to("rollout.num_generations"),
    "eval_n_samples_per_prompt": to("rollout.num_generations_eval"),
}
"""Settings of SkyRL, for advice alone: `rl-vlm migrate` does not read its scripts."""

ROWS: dict[str, dict[str, Counterpart]] = {
    "TRL": TRL,
    "VLM-R1": COMPLETIONS | VLM_R1,
    "EasyR1": EASYR1_AND_VERL,
    "verl": EASYR1_AND_VERL,
    "ms-swift": COMPLETIONS | SWIFT,
}
"""Rows by system and by the end of a key. `name.*` stands for all keys below `name`."""

LEFT_OUT: dict[str, dict[str, Any]] = {
    "VLM-R1": {
        "num_train_epochs": 3, "beta": 0.04, "loss_type": "grpo", "max_completion_length": 256, "num_generations": 8,
        "per_device_train_batch_size": 8, "reward_funcs": ["accuracy", "format"],
    },
    "EasyR1": {
        "worker.rollout.name": "vllm", "worker.actor.clip_ratio_low": 0.2, "worker.actor.clip_ratio_high": 0.3,
        "worker.actor.clip_ratio_dual": 3.0, "worker.actor.optim.lr_scheduler_type": "constant",
        "worker.actor.optim.weight_decay": 0.01, "worker.rollout.free_cache_engine": True, "algorithm.kl_coef": 0.001,
    },
    "verl": {
        "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.actor.clip_ratio_c": 3.0,
        "actor_rollout_ref.actor.optim.warmup_style": "constant", "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "data.train_batch_size": 1024, "actor_rollout_ref.actor.ppo_mini_batch_size": 256, "trainer.total_epochs": 30,
        "trainer.save_freq": -1, "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.rollout.free_cache_engine": True,
    },
    "ms-swift": {
        "train_type": "lora", "lora_rank": 8, "beta": 0.04, "loss_type": "grpo", "temperature": 0.9,
        "num_train_epochs": 3, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "adam_beta2": 0.95,
        "gradient_checkpointing": True, "per_device_train_batch_size": 1, "num_generations": 8,
    },
}
"""Defaults of other systems that differ from the ones here and change the training. Versions differ in them."""
# fmt: on


def row_of(key: str, rows: Mapping[str, Counterpart]) -> Counterpart | None:
    """Return the row of the longest end of a key, or of a section that contains the key."""
    parts = key.split(".")
    ends = [parts[start:] for start in range(len(parts))]
    for end in ends:
        for name in (".".join(end), *(".".join([*end[:stop], "*"]) for stop in range(len(end) - 1, 0, -1))):
            if name in rows:
                return rows[name]
    return None


FLASH = (
    "flash-attn is not used: leave it out. On CUDA, `sdpa` has PyTorch's own flash kernels, and rows that share a "
    "prompt can have them (`memory.shared_attention`)"
)
VALUES: dict[str, dict[str, str]] = {
    "model.attn_implementation": dict.fromkeys(
        ("flash_attention_2", "flash_attention_3", "flash_attention_4", "flash_attn", "flash_attn_2"), FLASH
    ),
    "algorithm.loss_type": {
        "gspo": "GSPO is `importance_sampling_level: sequence` with any of these losses (docs/losses.md)"
    },
}
"""Advice by the full name of a setting and another system's value."""


def instead_of(key: str) -> str | None:
    """Return the advice for another system's setting, or None if its name is unknown."""
    rows = {name: row for table in (SKYRL, *reversed(ROWS.values())) for name, row in table.items()}
    row = row_of(key, rows)
    return row.advice if row else None


def value_instead(setting: str, value: object) -> str | None:
    """Return the advice for another system's value of a setting, or None if it is unknown."""
    return VALUES.get(setting, {}).get(value) if isinstance(value, str) else None
