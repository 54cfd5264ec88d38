"""Every setting of a run, by section. A field's docstring is its help text. Names are TRL's if TRL has the setting.

Leaf names are unique over all sections, so `max_steps=10` on the command line and a flat TRL YAML are unambiguous.
"""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
)

from rl_vlm.config.data_names import Which, split_name
from rl_vlm.config.engines import ENGINES, Engine, EngineName
from rl_vlm.config.function_names import names_function

BuiltInLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
BUILT_IN_LOSSES: tuple[BuiltInLoss, ...] = get_args(BuiltInLoss)

SharedAttention = Literal["auto", "flex", "flash", "sdpa"]
PRECISION = "a run computes in bfloat16 on CUDA and in float32 elsewhere, and trained weights stay in float32"
"""Precision of a run without `model.dtype`, in words."""


class Section(BaseModel):
    """Settings of one part of a run. Numbers are finite, and text is not empty."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        str_min_length=1,
    )


def _as_list(value: Any) -> Any:
    """Convert one name to a list of one, and `none` to an empty list."""
    if isinstance(value, str):
        return [] if value == "none" else [value]
    return value


def size_in_bytes(text: str) -> int:
    """Return the bytes of a size with a unit, such as 4GiB. Raises ValueError for any other text."""
    if not re.fullmatch(r"\d+(\.\d+)?\s*[KMGT]i?B", text):
        raise ValueError(f"{text!r} is not a size; write a number and a unit, as in 512MiB or 4GiB")
    return int(TypeAdapter(ByteSize).validate_python(text))


def _checked_size(text: str) -> str:
    """Return a size unchanged. Raises ValueError if it is not a size, or is 0."""
    if not size_in_bytes(text):
        raise ValueError(f"{text!r} is 0, which leaves no memory; null means no limit")
    return text


class ModelConfig(Section):
    model_name_or_path: str
    """Hub name, local directory (a model or a PEFT adapter), or function `file.py:function` or `module:function`,
    called as `f(directory, seed)` to write a checkpoint."""
    model_revision: str = "main"
    """Hub revision: branch, tag or commit."""
    trust_remote_code: bool = False
    """Run the Python code of the checkpoint, which its `auto_map` names, for config, model and processor. With a hub
    name, set `model_revision` to the commit whose code you have read."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute precision. `bfloat16` keeps trainable weights and optimizer state in float32. Default: `bfloat16` on
    CUDA, `float32` elsewhere."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of the vision tower and of the dense path. flash-attn is not used: `sdpa` has PyTorch's
    flash kernels, which rows that share a prompt can use as well (`shared_attention`)."""
    fused: Literal["auto", "off"] = "auto"
    """Compile decoder layers and the LM head's log-probs with `torch.compile`, so that fewer operators read and write
    memory, and the first passes take longer. `auto`: on CUDA; docs/memory.md has the exceptions."""
    verify: Literal["auto", "full", "off"] = "auto"
    """Check a few of the run's completions before the first step: its rows equal the model's own forward, images and
    prompts have an effect, completions do not see each other, and trained weights have gradients. If shared rows fail,
    the run continues with a slower way. If another check fails, it ends. `full` takes all completions of the first
    step, and makes up longer ones."""
    verify_length: int | None = Field(default=None, ge=1)
    """Tokens of the longest completion that `verify: full` makes up, if more than 512. Default:
    `rollout.max_completion_length`."""
    freeze_vision_tower: bool = False
    """Train the language model only; the vision tower then runs without gradients. Not with an adapter in the tower."""
    trainable_modules: list[str] | str | None = None
    """Modules to train; all others are frozen. A list of names, or a regular expression for whole module paths. The
    names `lm_head`, `language_model`, `projector` and `vision_tower` mean these parts in every family. Default: all."""
    use_peft: bool = False
    """Train a LoRA adapter instead of the full weights."""
    lora_r: int = Field(default=16, ge=1)
    """Rank of the LoRA matrices."""
    lora_alpha: int = Field(default=32, ge=1)
    """LoRA scale: the update is multiplied by `lora_alpha / lora_r`."""
    lora_target_modules: list[str] | str = "all-linear"
    """Modules that get a new adapter: a list of names, `all-linear`, or a regular expression for whole module paths.
    The names of `trainable_modules` mean the linear layers of these parts; the LM head is in `lm_head` alone."""
    lora_exclude_modules: list[str] | str | None = None
    """Modules that get none: a list of names or a regular expression. Default: the vision tower and its projector,
    or none if `lora_target_modules` names a part."""
    init_lora_weights: bool | Literal["gaussian", "pissa", "olora", "orthogonal"] = True
    """PEFT initialisation of a new adapter. With `true`, training starts exactly from the base model."""
    use_rslora: bool = False
    """Scale the update by `lora_alpha / sqrt(lora_r)` instead."""
    load_in_4bit: bool = False
    """QLoRA: hold the language model's linear layers in 4 bits, with bitsandbytes. The vision tower, its projector,
    embeddings, LM head and routed experts keep the precision of `dtype`. Needs `use_peft` and `engine` hf."""
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """The 16 values of a 4-bit weight: NF4, quantiles of a normal distribution, or FP4, floating-point numbers."""
    use_bnb_nested_quant: bool = False
    """Hold the scales of the 4-bit blocks in 8 bits as well (double quantization): 0.52 bytes per weight, not 0.56."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _refuse_auto(cls, value: Any) -> Any:
        if value == "auto":
            raise ValueError(f"leave it out instead: {PRECISION}")
        return value

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """Return `dtype`. If it is left out, and `with_precision` has not set it, return a CPU's precision."""
        return self.dtype or "float32"


class DataSource(Section):
    name: str
    """Data, in one of the forms of `dataset_name`."""
    dataset_config: str | None = None
    """Name of the hub dataset's configuration. Default: `data.dataset_config`."""
    split: str | None = None
    """Split to use. Default: `data.dataset_train_split` or `data.dataset_test_split`."""
    weight: float | None = Field(default=None, gt=0)
    """Share of this entry in the training draws, relative to the others'. Default: each row is drawn once an epoch."""
    columns: dict[str, str] = {}
    """Columns that have another name in these data. Default: `data.columns`."""
    ignore_columns: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Columns of these data to leave out. Default: `data.ignore_columns`."""
    image_root: str | None = None
    """Folder of relative image paths. Default: `data.image_root`, else the folder of the data file."""
    video_root: str | None = None
    """Folder of relative video paths. Default: `data.video_root`, else the folder of images."""

    def with_split(self) -> "DataSource":
        """Move the split at the end of the name to `split`."""
        name, split = split_name(self.name)
        return self if split is None else self.model_copy(update={"name": name, "split": split})


class DataConfig(Section):
    dataset_name: str | list[str | DataSource] | None = None
    """Training data: hub name, local directory, .parquet, .json or .jsonl file, `file.py:function` or
    `module:function`. `name@split` selects a split. A list of names, or of mappings with `name`, `split`, `weight`,
    `columns` and `ignore_columns`, is a mixture. `draws:N` are N rows without content, for environments with
    tasks of their own."""
    dataset_config: str | None = None
    """Name of the hub dataset's configuration."""
    dataset_train_split: str = "train"
    """Split to train on."""
    eval_dataset_name: str | list[str | DataSource] | None = None
    """Held-out data, in the same forms as `dataset_name`. Default: none."""
    dataset_test_split: str = "test"
    """Split to evaluate on."""
    columns: dict[str, str] = {}
    """Columns that have another name in the data: `{image: photo, prompt: problem, solution: answer}` reads column
    `photo` as `image`, and so on. Everything else, templates and reward functions too, uses the new names."""
    ignore_columns: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Columns of the data to leave out, by their names there: for instance images that the model is not to see."""
    text_only: bool = False
    """Train or evaluate on text alone. Data without any image or video is refused unless this is set."""
    prompt_template: str | None = None
    """Template that builds the prompt from the columns of a row, as in `"{question} Answer in <answer> tags."`."""
    system_prompt: str | None = None
    """System message added at the start of every prompt that has none."""
    image_root: str | None = None
    """Folder of relative image paths. Default: the folder of the data file, else the working directory."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, such as `enable_thinking`."""
    on_bad_row: Literal["raise", "drop"] = "raise"
    """What to do with rows that cannot be used, such as one whose image is missing: end with an error, or leave them
    out and list them in `dropped_prompts.jsonl`. Every row and
    the header of every image and video are checked before the run."""
    max_prompt_length: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in a prompt, images included. Training and held-out rows with longer prompts are
    dropped before the run and listed; prompts are never truncated. This builds every prompt once."""
    min_pixels: int | None = Field(default=None, ge=1)
    """Enlarge images to at least this many pixels. Needs a processor with this limit."""
    max_pixels: int | None = Field(default=None, ge=1)
    """Shrink images to at most this many pixels. Needs a processor with this limit."""
    max_image_pixels: int = Field(default=32_000_000, ge=1)
    """Maximum number of pixels in an image file; larger files are refused before they are decoded."""
    video_root: str | None = None
    """Folder of relative video paths. Default: `image_root`, else the folder of the data file."""
    fps: float | None = Field(default=None, gt=0)
    """Frames per second to sample from videos. Default: the checkpoint's, else 2."""
    num_frames: int | None = Field(default=None, ge=1)
    """Number of frames to sample from each video, instead of `fps`."""
    min_frames: int = Field(default=4, ge=1)
    """Smallest number of frames of a video. A shorter video gives all its frames."""
    max_frames: int = Field(default=64, ge=1)
    """Largest number of frames of a video. More frames are thinned evenly."""
    video_min_pixels: int | None = Field(default=None, ge=1)
    """Enlarge frames of videos to at least this many pixels, whatever the model. Default: the checkpoint's."""
    video_max_pixels: int | None = Field(default=None, ge=1)
    """Shrink frames of videos to at most this many pixels, whatever the model. Default: the checkpoint's."""
    video_total_pixels: int | None = Field(default=None, ge=1)
    """Maximum number of pixels of all frames of one video. Frames are shrunk, and none is left out."""
    max_video_seconds: float = Field(default=3600, gt=0)
    """Maximum length of a video, or of its part from `video_start` to `video_end`; longer ones are refused."""
    video_format: Literal["auto", "native", "frames"] = "auto"
    """Give videos to the model's own input for them (`native`), or each frame as an image (`frames`). `auto`: `native`
    if the model has such an input."""
    shuffle_dataset: bool = True
    """Draw rows in a new random order each epoch."""
    dataloader_num_workers: int = Field(default=0, ge=0)
    """Processes per device that read, decode and tokenize the rows of the next windows during training. With 0 the main
    process does this on demand. Each worker takes seconds to start, so 0 is faster for small images."""
    dataloader_prefetch_factor: int | None = Field(default=None, ge=1)
    """Generation windows to prefetch per worker. Default: 1."""

    def entries(self, which: Which) -> list[DataSource]:
        """Return the training or held-out data as entries. A split at the end of a name is moved to `split`."""
        given = self.dataset_name if which == "train" else self.eval_dataset_name
        listed = given if isinstance(given, list) else [given] if given is not None else []
        return [(DataSource(name=entry) if isinstance(entry, str) else entry).with_split() for entry in listed]


class RolloutConfig(Section):
    engine: EngineName = "hf"
    """Engine that samples completions: `hf`, the trained model itself; `vllm`, vLLM in this process; `vllm_server`, one
    or more servers on this or other machines. `docs/rollouts.md` compares them."""
    weight_sync_steps: int = Field(default=1, ge=1)
    """Optimizer steps between weight updates of vLLM. A due update is sent before the next rollout. An evaluation
    always gets the latest weights."""
    agreement_steps: int = Field(default=50, ge=0)
    """Optimizer steps between checks that vLLM and the trainer compute the same log-probs. With 0, only the first
    rollouts are checked. `vllm.vllm_max_logp_difference` is the limit."""
    max_staleness: int = Field(default=0, ge=0, le=1)
    """Maximum number of generation windows by which sampling may use older weights than training. With 1, servers
    sample the next window while the current one is trained on, and importance weights correct for the older weights. 0
    waits for the latest weights."""
    lora_sync: Literal["adapter", "merge"] = "adapter"
    """What a LoRA run sends to vLLM: the adapter, or the base weights merged with it. Merging is for adapters that vLLM
    cannot load: on the vision tower, with DoRA, or with fully trained modules."""
    max_rollout_tokens: int | None = Field(default=None, ge=1)
    """Partial rollouts: tokens after which a completion is paused and continued in the next rollout, with newer
    weights. A window trains on finished groups. Importance weights correct for the older weights. Default: no limit."""
    num_generations: int = Field(default=8, ge=1)
    """G: completions generated per prompt in training."""
    num_generations_eval: int = Field(default=1, ge=1)
    """Completions generated per prompt in evaluation."""
    max_completion_length: int = Field(default=512, ge=1)
    """Maximum number of tokens in a completion."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of training rollouts; log-probs are computed at this temperature."""
    eval_temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of evaluation; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of most probable tokens with at least this total probability."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most probable tokens; 0 is off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens with at least this fraction of the highest token probability."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of completions that the engine decodes at once on one device."""
    ds3_gather_for_generation: bool = True
    """With ZeRO-3 or FSDP2, gather all weights on every rank for a rollout of engine `hf`. With false, weights are
    gathered layer by layer for every token: slow, for models that do not fit on one device."""
    tools: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Functions that the model can call, as `file.py:function` or `module:function`. `docs/environments.md` has the
    contract."""
    environment: str | dict[str, str] | None = None
    """Environment class as `file.py:Class`, or a mapping of names to classes. Its public methods are tools, or it takes
    steps (`environment_protocol`). With several, the column `environment` of a row names its class. `gymnasium:`,
    `openenv:`, `vagen:` and `skyrl:` before a name are adapters."""
    environment_protocol: Literal["tools", "steps"] = "tools"
    """Use of a turn: `tools` runs the methods that the model calls, `steps` passes the text to `step(text)`, as in
    Gymnasium."""
    environment_kwargs: dict[str, Any] = {}
    """Arguments of the class with `environment_protocol` steps. With `tools` it is made without arguments."""
    max_turns: int = Field(default=10, ge=1)
    """Turns of a completion with tools or steps. The calls of the last turn are not run, and its step is."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the model may sample in one turn. `max_completion_length` counts all tokens after the prompt.
    Default: no limit."""
    max_environments: int | None = Field(default=None, ge=1)
    """Instances of the environment per process. Default: one for each completion of a window."""
    environment_isolation: Literal["thread", "process"] = "thread"
    """Run instances of the environment in threads of the run, or each in a separate process. A crash, a leak or a hang
    then ends only that process."""
    environment_memory: Annotated[str, AfterValidator(_checked_size)] | None = "4GiB"
    """Memory of an instance with `environment_isolation` process, with all processes that it starts. If it uses more,
    it is killed, and the completion is masked. null: no limit."""
    tool_timeout: float = Field(default=60.0, gt=0)
    """Seconds for a call of a tool, of `reset` or of `get_reward`. After it, the completion is masked."""
    tool_errors: Literal["tell", "mask"] = "tell"
    """What an exception in a tool does: `tell` shows it to the model, `mask` leaves the completion out of the loss."""
    observation_role: Literal["auto", "tool", "user"] = "auto"
    """Role of the messages that hold results of tools. `auto` is `tool` if the chat template writes all of them."""
    tool_format: Literal["auto", "template", "text"] = "auto"
    """How tools and calls are written: by the chat template, or as text in a system message and `<tool_call>` tags.
    `auto` is `template` if the chat template writes tools and calls, and the tokenizer can read calls."""
    keep_images: int | None = Field(default=None, ge=1)
    """Images of observations that stay in a long context. Older ones are replaced by a text. The images of the prompt
    stay. `max_completion_length` is then a limit of each context. Default: all images stay."""
    edit_every: int = Field(default=5, ge=1)
    """With `keep_images`, turns between two edits of a context. Between them it holds more images."""
    max_resampling_rounds: int = Field(default=0, ge=0)
    """Maximum number of times to generate a group again if its advantages are all 0, as with equal rewards, which gives
    no learning signal. A new group replaces the old one if it has one."""

    @property
    def has_tools(self) -> bool:
        """Return whether completions are trajectories of several turns."""
        return bool(self.tools) or self.environment is not None

    @property
    def max_contexts(self) -> int:
        """Return the most contexts of a completion: one, and one for each edit."""
        return 1 if self.keep_images is None else -(-self.max_turns // self.edit_every)

    @property
    def environment_bytes(self) -> int | None:
        """Return the limit of an instance's memory, None without one."""
        return None if self.environment_memory is None else size_in_bytes(self.environment_memory)

    @property
    def functions(self) -> list[str]:
        """Return the names of the tools and of the classes of environments."""
        environment = self.environment or {}
        return [*self.tools, *([environment] if isinstance(environment, str) else environment.values())]

    @property
    def facts(self) -> Engine:
        """Return the properties of the engine."""
        return ENGINES[self.engine]

    @property
    def is_off_policy(self) -> bool:
        """Return whether completions come from other weights or other arithmetic than the policy is trained with."""
        return not self.facts.samples_from_policy or self.max_rollout_tokens is not None


class VLLMConfig(Section):
    vllm_model_impl: Literal["auto", "vllm", "transformers"] = "auto"
    """Implementation of the model: vLLM's own, or that of transformers."""
    vllm_model_runner: Literal["auto", "v1", "v2"] = "auto"
    """Version of vLLM's model runner, which prepares batches and samples. With `auto` vLLM decides: `v2` on most
    GPUs, `v1` without Triton."""
    vllm_gpu_memory_utilization: float = Field(default=0.3, gt=0, le=1)
    """Fraction of a GPU's memory for vLLM's weights and cache."""
    vllm_max_model_length: int | None = Field(default=None, ge=1)
    """Maximum number of tokens in a prompt with its completion. Default: `max_prompt_length` + `max_completion_length`,
    or the model's own limit."""
    vllm_tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs over which vLLM splits one model."""
    vllm_enforce_eager: bool = False
    """Run without CUDA graphs: faster start, slower rollouts."""
    vllm_enable_sleep_mode: bool = False
    """Free vLLM's memory while the trainer trains (engine `vllm`, on GPUs)."""
    vllm_server_base_url: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Running servers to join, as `http://host:port`. Default: the run starts its own."""
    vllm_num_servers: int = Field(default=1, ge=1)
    """Servers that the run starts if it joins none."""
    vllm_server_devices: list[str] = []
    """`CUDA_VISIBLE_DEVICES` of each server that the run starts. Default: that of the trainer."""
    vllm_server_timeout: float = Field(default=1800.0, gt=0)
    """Seconds to wait for a server to be ready, whether the run starts it or joins it. At its first start it loads the
    weights and compiles kernels."""
    vllm_request_timeout: float = Field(default=1800.0, gt=0)
    """Seconds to wait for a response from a server before it counts as lost. A response may wait for a whole window of
    long completions, or for weights that the server loads. A server that hangs is noticed earlier."""
    vllm_max_logp_difference: float = Field(default=0.1, gt=0)
    """Maximum mean difference of log-probs between vLLM and the trainer. Above it, a run ends."""
    vllm_weight_transfer: Literal["auto", "nccl", "shared_directory"] = "auto"
    """How servers that the run starts get weights: `nccl` between GPUs, or files in the run directory. `auto` is `nccl`
    if `vllm_server_devices` gives them GPUs of their own. Servers that the run joins have their own setting."""


class RewardSpec(Section):
    function: str
    """Built-in name, `module:function`, `file.py:function`, or entry point of the group `rl_vlm.rewards`."""
    name: str | None = None
    """Name in metrics. Default: the name of the function."""
    weight: float = 1.0
    """Weight of this reward in the sum."""
    solved_from: float = 1.0
    """Score from which a completion counts as solved: for pass@k, difficulty filtering and the report."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed to every call."""
    completions: Literal["auto", "messages", "text"] = "auto"
    """Form in which the function gets completions and prompts. `auto` calls it once before the run to find a form that
    it can read; the form of the data comes first."""
    timeout: float | None = Field(default=None, gt=0)
    """Maximum seconds per call. The function then runs in a worker process, which is killed on a timeout."""
    calls: Literal["window", "group"] = "window"
    """Call the function once for all completions of a generation window, or once for the completions of each prompt."""
    applies_to: dict[str, Any] = {}
    """Rows that the function scores. Each column maps to the value, or the list of values, that a row must have, as in
    `{data_source: [geometry3k, clevr]}`. It does not apply to other rows. Default: all rows."""
    on_error: Literal["mask", "raise"] = "mask"
    """What to do with a fault of the function in training: leave the completion out, or end the run."""


class RewardsConfig(Section):
    reward_funcs: Annotated[list[str | RewardSpec], BeforeValidator(_as_list)] = []
    """Reward functions: names, or mappings with `function`, `name`, `weight`, `solved_from`, `kwargs`,
    `completions`, `timeout`, `calls`, `applies_to` and `on_error`."""
    reward_weights: list[float] | None = None
    """One weight per function, instead of a `weight` in each entry of `reward_funcs`."""
    max_fault_fraction: float = Field(default=1.0, ge=0, le=1)
    """Largest fraction of a generation window's completions that reward functions or environments may fail on; above it
    the run stops. 0 stops at the first fault. A window without any reward always stops the run."""

    @property
    def specs(self) -> list[RewardSpec]:
        """Return the entries of `reward_funcs`. A name alone becomes an entry with defaults."""
        return [RewardSpec(function=spec) if isinstance(spec, str) else spec for spec in self.reward_funcs]


class AlgorithmConfig(Section):
    loss_type: BuiltInLoss | str = "dapo"
    """How token losses are computed and averaged, or a token loss of your own: `file.py:function` or
    `module:function` (docs/losses.md). GSPO is `importance_sampling_level: sequence`."""
    loss_weights: Literal["token", "completion", "budget"] = "token"
    """Average of the tokens' losses with your own `loss_type`. `token`: mean over all tokens of the step, as in `dapo`.
    `completion`: mean over completions of their means, as in `grpo`. `budget`: sum divided by completions ×
    `max_completion_length`, as in `dr_grpo`."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Compute the ratio per token, or per completion (GSPO)."""
    vllm_importance_sampling_correction: bool = True
    """Multiply the loss by importance weights. They correct for the difference of log-probs between vLLM and the
    trained model, which comes from rounding and from older weights in vLLM."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "sequence_mask"
    )
    """One weight per token, or per completion as the product over its tokens. A weight out of bounds is set to the
    bound (`truncate`) or to 0 (`mask`)."""
    vllm_importance_sampling_clip_max: float = Field(default=3.0, ge=0)
    """Upper bound of the importance weight; 0 is off."""
    vllm_importance_sampling_clip_min: float = Field(default=0.0, ge=0)
    """Lower bound of the importance weight."""
    epsilon: float = Field(default=0.2, ge=0)
    """Lower clip range: the ratio is clipped at `1 - epsilon`."""
    epsilon_high: float | None = Field(default=None, ge=0)
    """Upper clip range: the ratio is clipped at `1 + epsilon_high`. Default: `epsilon`. `cispo` requires it as the
    upper bound itself, such as 5.0."""
    delta: float | None = Field(default=None, gt=0)
    """Upper bound of the unclipped ratio (two-sided clipping). Default: off."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """SAPO's temperature for completions with a negative advantage."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """SAPO's temperature for completions with a positive advantage."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term (k3 estimate). With 0 no reference model is loaded."""
    use_bias_correction_kl: bool = True
    """Multiply the KL estimate by the importance ratio (DeepSeek-V3.2)."""
    sync_ref_model: bool = False
    """Move the reference model towards the policy every `ref_model_sync_steps` steps; not with LoRA."""
    ref_model_mixup_alpha: float = Field(default=0.6, ge=0, le=1)
    """Weight of the policy in a move of the reference model: `ref = alpha * policy + (1 - alpha) * ref`."""
    ref_model_sync_steps: int = Field(default=512, ge=1)
    """Optimizer steps between moves of the reference model."""
    loss_normalizer: Literal["step", "window"] = "step"
    """Number of tokens that `dapo` and `cispo` divide by. `step`: tokens of the optimizer step. `window`: mean over the
    steps of the generation window, as in TRL. They are equal if a window has one step."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of rewards in the group, in the generation batch, or not at all."""
    turn_advantages: Literal["none", "return", "gigpo"] = "none"
    """Advantages of the turns of a completion with tools. `none`: every turn has the completion's advantage. `return`:
    from the discounted rewards of this and later turns. `gigpo`: the completion's advantage, plus an advantage among
    turns that begin with an equal observation. docs/environments.md has the formulas."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """Discount per turn of later rewards, with `turn_advantages`."""
    turn_weight: float = Field(default=1.0, gt=0)
    """Weight of the advantage among turns that begin alike, with `turn_advantages: gigpo`."""
    num_iterations: int = Field(default=1, ge=1)
    """Number of training passes over each generated window."""
    mask_truncated_completions: bool = False
    """Exclude completions that reach `max_completion_length` or `max_turns` from the loss."""
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)
    """Train only on this fraction of the optimizer step's tokens, those with the highest entropy; 1 is off."""

    @field_validator("loss_type")
    @classmethod
    def _names_a_loss(cls, value: str) -> str:
        *others, last = map(repr, BUILT_IN_LOSSES)
        if value not in BUILT_IN_LOSSES and not names_function(value):
            own = "a function of your own, `file.py:function` or `module:function`"
            raise ValueError(f"it should be {', '.join(others)} or {last}, or {own}")
        return value

    @property
    def has_own_loss(self) -> bool:
        """Return whether `loss_type` names a function of the user."""
        return self.loss_type not in BUILT_IN_LOSSES

    @property
    def corrects_sequences(self) -> bool:
        """Return whether the loss has an importance weight per completion, and not per token."""
        return self.vllm_importance_sampling_correction and self.vllm_importance_sampling_mode.startswith("sequence")


class TrainConfig(Section):
    output_dir: str = "runs/default"
    """Run directory. docs/run_directory.md lists the files written there."""
    overwrite_output_dir: bool = False
    """Delete an earlier run in `output_dir` and start a new one, unless `resume_from_checkpoint` resumes it."""
    resume_from_checkpoint: str | None = None
    """Checkpoint directory to resume, or `auto` for the newest complete one in `output_dir` (none: start a new run)."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of initialisation, data order and sampling."""
    prompts_per_step: int | None = Field(default=None, ge=1)
    """Prompts per optimizer step over all devices."""
    per_device_train_batch_size: int | None = Field(default=None, ge=1)
    """Completions per device and micro-step, as in TRL. Only its product with `gradient_accumulation_steps` matters."""
    gradient_accumulation_steps: int | None = Field(default=None, ge=1)
    """Micro-steps per optimizer step, as in TRL."""
    steps_per_generation: int | None = Field(default=None, ge=1)
    """Micro-steps per generation, as in TRL. Default: `gradient_accumulation_steps`."""
    num_train_epochs: float = Field(default=1.0, gt=0)
    """Passes over the training data, if `max_steps` is not set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps of the run. Overrides `num_train_epochs`."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    optim: Literal["adamw_torch", "adamw_8bit", "adafactor"] = "adamw_torch"
    """Optimizer: AdamW, AdamW with moments of 8 bits (bitsandbytes), or Adafactor, whose second moments are kept by row
    and column. The last two save memory and need whole weights, so not ZeRO or FSDP2."""
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
    """Learning rate schedule, by its name in transformers."""
    lr_scheduler_kwargs: dict[str, Any] = {}
    """Arguments of the schedule: `cosine_with_min_lr` needs `min_lr` or `min_lr_rate`, `warmup_stable_decay` needs
    `num_decay_steps`."""
    warmup_steps: float = Field(default=0.0, ge=0)
    """Optimizer steps of linear warm-up; a value below 1 is a fraction of all steps, rounded up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay, applied to all weights except biases and norms."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay rate of AdamW."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Second-moment decay rate of AdamW."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Epsilon of AdamW."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Maximum gradient norm; larger gradients are scaled down to it. 0 is off."""
    save_steps: int = Field(default=500, ge=0)
    """Optimizer steps between checkpoints; 0 saves only at the end."""
    save_total_limit: int | None = Field(default=None, ge=1)
    """Maximum number of checkpoints to keep, including the best one with `load_best_model_at_end`. Default: all."""
    async_save: bool = True
    """Write checkpoints while training goes on, from a copy in host memory. A save waits for the one before, and the
    end of the run for the last one."""
    eval_steps: int = Field(default=0, ge=0)
    """Optimizer steps between evaluations; 0 evaluates only before and after training, if there is held-out data."""
    eval_on_start: bool = True
    """Evaluate before the first step."""
    load_best_model_at_end: bool = False
    """Save the best evaluated checkpoint, and load it at the end in place of the last weights."""
    metric_for_best_model: str = "reward"
    """Evaluation metric that selects the best checkpoint, such as `rewards/exact_match/mean`."""
    greater_is_better: bool = True
    """Whether a larger value of `metric_for_best_model` is better."""
    stop_grace_seconds: float = Field(default=600.0, gt=0)
    """Seconds after SIGTERM or Ctrl-C in which the run stops at a safe point and saves. Then it ends without."""
    lost_rank_seconds: float = Field(default=60.0, gt=0)
    """Seconds without a sign of life after which a process of the run is lost, and the others end."""
    ddp_timeout: float = Field(default=1800.0, gt=0)
    """Time limit of collectives, in seconds. If a process makes no progress for this long, it counts as hanging, and
    the others end. A process that waits for a slow reward function makes progress."""


class EvaluationConfig(Section):
    endpoint_url: str | None = Field(default=None, pattern="^https?://")
    """Base URL of a server with OpenAI's chat completions API, such as `http://localhost:8000/v1`. `rl-vlm eval` then
    samples from it instead of loading a model. `model_name_or_path` is the name of the served model, and the
    environment variable OPENAI_API_KEY holds the API key. Default: evaluate with `rollout.engine`."""
    endpoint_max_concurrency: int = Field(default=16, ge=1)
    """Maximum number of concurrent requests to the endpoint, per process."""
    endpoint_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for one completion from the endpoint."""
    endpoint_max_retries: int = Field(default=4, ge=0)
    """Maximum number of retries of a request if the endpoint is overloaded, fails or cannot be reached."""


class MemoryConfig(Section):
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Budget of one forward and backward pass in language tokens; the loss and gradient do not depend on it. `auto`:
    the largest budget that fits on the device by the memory plan (`rl-vlm plan`)."""
    prefix_sharing: Literal["auto", "shared", "dense"] = "auto"
    """Compute prompt and images once per group (`shared`) or completion (`dense`), or whichever is cheaper (`auto`)."""
    shared_attention: SharedAttention = "auto"
    """Attention over shared rows on CUDA: one call of FlexAttention (`flex`), or two calls of SDPA with masks (`sdpa`),
    which compile nothing. `auto` is `flex`, and `sdpa` on cards that have too little shared memory for its kernels.
    `flash` computes causal layers in 16 bits by FlashAttention, and others as `flex`."""
    gradient_checkpointing: bool | Literal["vision_tower", "language_model"] = False
    """Recompute activations in the backward pass instead of keeping them: of all layers, or of one part's."""
    activation_offloading: bool = False
    """Keep activations of a GPU in host memory until the backward pass: with `gradient_checkpointing` the inputs of
    layers, else all of them."""
    expandable_segments: bool | None = None
    """Let PyTorch's CUDA allocator grow its segments, which avoids fragmentation (`PYTORCH_ALLOC_CONF`; a value in the
    environment wins). vLLM switches it off for its own memory in sleep mode. Default: true with `engine` hf."""


class LogConfig(Section):
    logging_steps: int = Field(default=1, ge=1)
    """Optimizer steps between reports to `report_to`; `metrics.jsonl` has every step."""
    report_to: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Trackers of accelerate: `tensorboard`, `wandb`, `trackio`, `mlflow`, …. The first three get some rollouts too."""
    run_name: str | None = None
    """Name of the run in trackers. Default: the last part of `output_dir`."""
    log_completions: bool = True
    """Write every completion with its rewards to `completions/*.parquet`."""
    num_completions_to_print: int = Field(default=0, ge=0)
    """Completions to print after each generation."""
    report: bool = True
    """Write `report.html`, during the run and at its end. For it, save small copies of some prompts' images with the
    completions."""
    disable_tqdm: bool = False
    """Print plain lines instead of a progress bar."""
    memory_profile: bool = False
    """Measure the memory of the first steps by phase and module, and compare it with the memory plan:
    `memory_profile.json` and `memory_profile.png`."""


class Sections(Section):
    """All sections. `RunConfig` also checks the rules about several settings."""

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
