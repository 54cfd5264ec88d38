"""Every setting of a run. A field's docstring is its help text; names are TRL's wherever TRL has the setting.

Leaf names are unique over all sections, so `max_steps=10` on the command line and a flat TRL YAML are unambiguous.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from rl_vlm.config.conflicts import conflicts_of


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


def _as_list(value: Any) -> Any:
    """One name stands for a list of one, and `none` for an empty list."""
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


class ModelConfig(Section):
    model_name_or_path: str
    """Hub name, local directory (a model or a PEFT adapter), or `module:function`, called as `f(directory, seed)`
    to make a checkpoint."""
    model_revision: str = "main"
    """Hub revision: branch, tag or commit."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute precision. `bfloat16` keeps trainable weights and optimizer state in float32."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention of the vision tower and of the dense path."""
    freeze_vision_tower: bool = False
    """Train the language model only; the vision tower then runs without gradients."""
    use_peft: bool = False
    """Train a LoRA adapter instead of the full weights."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the LoRA matrices."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA scale: the update is multiplied by `lora_alpha / lora_r`."""
    lora_target_modules: list[str] | str = "all-linear"
    """Modules that get a new adapter: a list of names, `all-linear`, or a regular expression for whole module paths."""
    lora_exclude_modules: list[str] | str | None = None
    """Modules that get none: a list of names or a regular expression. Default: the vision tower and its projector."""
    init_lora_weights: bool | Literal["gaussian", "pissa", "olora", "orthogonal"] = True
    """PEFT's initialisation of a new adapter; `true` starts at the base model exactly."""
    use_rslora: bool = False
    """Scale by `lora_alpha / sqrt(lora_r)` instead."""


class DataConfig(Section):
    dataset_name: str | None = None
    """Training data: hub name, local directory, .parquet, .json or .jsonl file, or `module:function`."""
    dataset_config: str | None = None
    """Name of the hub dataset's configuration."""
    dataset_train_split: str = "train"
    """Split to train on."""
    eval_dataset_name: str | None = None
    """Held-out data, in the same forms as `dataset_name`. Default: none."""
    dataset_test_split: str = "test"
    """Split to evaluate on."""
    prompt_template: str | None = None
    """Makes the prompt of raw rows from their columns, as in `"{question} Answer in <answer> tags."`."""
    system_prompt: str | None = None
    """System message put before every prompt that has none."""
    image_root: str | None = None
    """Folder that relative image paths start from. Default: the folder of the data file, else the working directory."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, such as `enable_thinking`."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Prompts with more tokens, images included, are dropped before the run and listed; none is ever truncated."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Images are enlarged to at least this many pixels (processors that support it)."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Images are shrunk to at most this many pixels (processors that support it)."""
    max_image_pixels: int = Field(default=32_000_000, ge=1)
    """An image file with more pixels than this is refused before it is decoded."""
    shuffle_dataset: bool = True
    """Draw rows in a new random order each epoch."""
    dataloader_num_workers: int = Field(default=0, ge=0)
    """Processes per device that read, decode and tokenize the next windows' rows during training; 0: the main process
    does it when they are needed. Each worker takes seconds to start, so that small images are faster without."""
    dataloader_prefetch_factor: int | None = Field(default=None, ge=1)
    """Generation windows that are built ahead, per worker. Default: 1."""


class RolloutConfig(Section):
    engine: Literal["hf", "vllm", "vllm_server"] = "hf"
    """What samples: `hf`, the trained model itself; `vllm`, vLLM in this process; `vllm_server`, one or several servers
    on this or other machines. `docs/rollouts.md` compares them."""
    weight_sync_steps: int = Field(default=1, ge=1)
    """Optimizer steps after which vLLM is due new weights; it gets them before the next rollout or evaluation."""
    max_staleness: int = Field(default=0, ge=0, le=1)
    """Generation windows that sampling may be behind training: at 1, servers sample the next window while this one is
    trained on; the importance weights account for it. 0 waits for the newest weights."""
    lora_sync: Literal["adapter", "merge"] = "adapter"
    """What vLLM is sent of a LoRA run: the adapter, or base weights freshly merged with it. Merging is for adapters
    that vLLM cannot load: on the vision tower, with DoRA, or with fully trained modules."""
    max_rollout_tokens: int | None = Field(default=None, ge=1)
    """Partial rollouts: tokens after which a completion is paused, to go on in the next rollout, by newer weights; a
    window trains on the groups that are finished. The importance weights account for it. Default: none is paused."""
    num_generations: int = Field(default=8, ge=1)
    """G: completions sampled per prompt in training."""
    num_generations_eval: int = Field(default=1, ge=1)
    """Completions per prompt in evaluation."""
    max_completion_length: int = Field(default=512, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts; log-probs are taken at this temperature."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluation; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this much probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most probable tokens; 0 is off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens with at least this share of the best token's probability."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Completions that the engine decodes at once on one device."""
    max_resampling_rounds: int = Field(default=0, ge=0)
    """Times that prompts whose completions all got the same reward, which teaches nothing, are sampled again; a new
    group takes the place of the old one if its rewards differ."""

    @property
    def is_off_policy(self) -> bool:
        """Whether completions are sampled by other weights, or with other arithmetic, than the policy is trained."""
        return self.engine != "hf" or self.max_rollout_tokens is not None


class VLLMConfig(Section):
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    """Model code: vLLM's own, or that of transformers."""
    vllm_gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Share of a GPU's memory for vLLM's weights and cache."""
    vllm_max_model_length: int | None = Field(default=None, ge=1)
    """Longest prompt with its completion, in tokens. Default: `max_prompt_length` + `max_completion_length`, or what
    the model allows."""
    vllm_tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one model of vLLM is spread over."""
    vllm_enforce_eager: bool = False
    """Run without CUDA graphs: a quicker start and slower rollouts."""
    vllm_enable_sleep_mode: bool = False
    """Free vLLM's memory while the trainer trains (engine `vllm`, on GPUs)."""
    vllm_server_base_url: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Running servers to join, as `http://host:port`; none: the run starts its own."""
    vllm_num_servers: int = Field(default=1, ge=1)
    """Servers that the run starts, where it joins none."""
    vllm_server_devices: list[str] = []
    """`CUDA_VISIBLE_DEVICES` of each server that is started. Default: that of the trainer."""
    vllm_server_timeout: float = Field(default=240.0, gt=0)
    """Seconds that a server may take to be up, whether the run starts it or joins it."""
    vllm_request_timeout: float = Field(default=240.0, gt=0)
    """Seconds that a server may take for one answer, before it counts as lost."""
    vllm_max_logp_difference: float = Field(default=0.1, gt=0)
    """Mean difference of log-probs between vLLM and the trainer above which a run ends before its first step."""
    vllm_weight_transfer: Literal["auto", "nccl", "shared_directory"] = "auto"
    """How servers that are started get weights: `nccl` between GPUs, or files in the run directory. `auto`: `nccl`
    where `vllm_server_devices` gives them GPUs of their own. Servers that are joined have their own setting."""


class RewardSpec(Section):
    function: str
    """Built-in name, `module:function`, `file.py:function`, or entry point of the group `rl_vlm.rewards`."""
    name: str | None = None
    """Name in metrics. Default: the function's own."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to every call."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds a call may take; the function then runs in a worker process that is killed when it hangs."""


class RewardsConfig(Section):
    reward_funcs: Annotated[list[str | RewardSpec], BeforeValidator(_as_list)] = []
    """Reward functions: names, or mappings with `function`, `name`, `weight`, `kwargs` and `timeout`."""
    reward_weights: list[float] | None = None
    """One weight per function, instead of a `weight` in each."""


class AlgorithmConfig(Section):
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """How token losses are formed and averaged; see `rl_vlm/losses.py`."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or per completion (GSPO)."""
    vllm_importance_sampling_correction: bool = True
    """Weigh the loss by how probable what vLLM sampled is in the trained model: their log-probs differ by rounding, and
    where vLLM has older weights."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "sequence_mask"
    )
    """One weight per token, or per completion, where they multiply; a weight out of bounds becomes the bound
    (`truncate`) or 0 (`mask`)."""
    vllm_importance_sampling_clip_max: float = Field(default=3.0, ge=0)
    """Upper bound of the weight; 0 is off."""
    vllm_importance_sampling_clip_min: float = Field(default=0.0, ge=0)
    """Lower bound of the weight."""
    epsilon: float = Field(default=0.2, ge=0)
    """Lower clip of the ratio."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper clip of the ratio, default `epsilon`. `cispo` needs it: it is the largest weight itself, as in 5.0."""
    delta: float | None = Field(default=None, gt=0)
    """Upper bound of the unclipped ratio (two-sided clipping); None is off."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """SAPO's temperature for completions with a negative advantage."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """SAPO's temperature for completions with a positive advantage."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term (k3 estimate); at 0 no reference model is loaded."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the importance ratio (DeepSeek-V3.2)."""
    sync_ref_model: bool = False
    """Move the reference model towards the policy every `ref_model_sync_steps` steps; not with LoRA."""
    ref_model_mixup_alpha: float = Field(default=0.6, ge=0, le=1)
    """Share of the policy in that move: `ref = alpha * policy + (1 - alpha) * ref`."""
    ref_model_sync_steps: int = Field(default=512, ge=1)
    """Optimizer steps between two such moves."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the whole generation batch, or not."""
    num_iterations: int = Field(default=1, ge=1)
    """Times that each generated window is trained on."""
    mask_truncated_completions: bool = False
    """Leave completions that hit `max_completion_length` out of the loss."""
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)
    """Train only on this share of tokens, those with the highest entropy; 1 is off."""


class TrainConfig(Section):
    output_dir: str = "runs/default"
    """Run directory; see the README for what is written there."""
    overwrite_output_dir: bool = False
    """Start anew in a directory that holds an earlier run, deleting it, unless `resume_from_checkpoint` goes on."""
    resume_from_checkpoint: str | None = None
    """Checkpoint directory to go on from, or `auto` for the newest complete one in `output_dir` (none: start anew)."""
    seed: int = 42
    """Seed of initialisation, data order and sampling."""
    prompts_per_step: int | None = Field(default=None, ge=1)
    """Prompts per optimizer step over all devices."""
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    """Completions per device and micro-step, as in TRL; only its product with accumulation matters."""
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    """Micro-steps per optimizer step, as in TRL."""
    steps_per_generation: int | None = Field(default=None, ge=1)
    """Micro-steps per generation, as in TRL. Default: `gradient_accumulation_steps`."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the training data, when `max_steps` is not set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run; wins over epochs."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "constant",
        "constant_with_warmup",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "warmup_stable_decay",
    ] = "linear"
    """Schedule of the learning rate, by its name in transformers."""
    lr_scheduler_kwargs: dict[str, Any] = {}
    """Arguments of the schedule: `cosine_with_min_lr` needs `min_lr` or `min_lr_rate`, `warmup_stable_decay` needs
    `num_decay_steps`."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """Steps of linear warm-up; below 1, a share of all steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay, on all weights but biases and norms."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second-moment decay."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 is off."""
    save_steps: int = Field(default=500, ge=0)
    """Optimizer steps between checkpoints; 0 saves at the end only."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Checkpoints kept, the best one included when `load_best_model_at_end`."""
    eval_steps: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 evaluates only before and after, if there is held-out data."""
    eval_on_start: bool = True
    """Evaluate before the first step."""
    load_best_model_at_end: bool = False
    """Save the best evaluated checkpoint and end with it instead of the last weights."""
    metric_for_best_model: str = "reward"
    """Evaluation metric that decides, such as `rewards/exact_match/mean`."""
    greater_is_better: bool = True
    """Whether a larger value of that metric is better."""


class EvaluationConfig(Section):
    endpoint_url: str | None = Field(default=None, pattern="^https?://")
    """Address of a served model with OpenAI's chat completions, such as `http://localhost:8000/v1`. `rl-vlm eval` then
    samples there instead of loading a model, `model_name_or_path` is the served model's name, and the API key is that
    of the environment variable OPENAI_API_KEY. Default: evaluate with `rollout.engine`."""
    endpoint_max_concurrency: int = Field(default=16, ge=1)
    """Requests to the endpoint at once, per process."""
    endpoint_timeout: float = Field(default=300.0, gt=0)
    """Seconds that the endpoint may take for one completion."""
    endpoint_max_retries: int = Field(default=4, ge=0)
    """Times that a request is sent again when the endpoint is overloaded, fails or cannot be reached."""


class MemoryConfig(Section):
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Language tokens that one forward and backward holds; the loss and gradient do not depend on it."""
    prefix_sharing: Literal["auto", "shared", "dense"] = "auto"
    """Compute a prompt and its images once per group (`shared`), once per completion (`dense`), or as pays (`auto`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""


class LogConfig(Section):
    logging_steps: int = Field(default=1, ge=1)
    """Optimizer steps between reports to `report_to`; `metrics.jsonl` has every step."""
    report_to: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Trackers of accelerate: `tensorboard`, `wandb`, `mlflow`, …."""
    run_name: str | None = None
    """Name of the run in trackers. Default: the last part of `output_dir`."""
    log_completions: bool = True
    """Write every completion with its rewards to `completions/*.parquet`."""
    num_completions_to_print: int = Field(default=0, ge=0)
    """Completions printed after each generation."""
    disable_tqdm: bool = False
    """Print plain lines instead of a progress bar."""


class RunConfig(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    vllm: VLLMConfig = VLLMConfig()
    rewards: RewardsConfig = RewardsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    memory: MemoryConfig = MemoryConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> "RunConfig":
        if conflicts := list(conflicts_of(self)):
            raise ValueError("\n".join(conflicts))
        return self


SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in RunConfig.model_fields.items()}  # pyright: ignore[reportAssignmentType]

SETTINGS: dict[str, FieldInfo] = {
    f"{section}.{leaf}": field for section, model in SECTIONS.items() for leaf, field in model.model_fields.items()
}
"""Every setting by its full name, `section.leaf`."""
