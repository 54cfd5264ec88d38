"""Rollouts with vLLM in the trainer's processes, on the same devices.

Each rank has its own vLLM. With tensor parallelism, neighbouring ranks share a model and must compute the same. So each
of them sends the requests of all and keeps its own responses.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from rl_vlm.checkpoint.random_states import random_states, restore_random_states
from rl_vlm.data.images import decode_image
from rl_vlm.distributed.sign_of_life import mark_alive
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import ConfigError, DataError, ModelError, RLVLMError, RolloutError, Stopped, shorten
from rl_vlm.model.families import TokenRules
from rl_vlm.rollout.engine import WeightSource
from rl_vlm.rollout.vllm.arguments import ADAPTER_NAME, ENVIRONMENT, MODEL_RUNNER, model_runner
from rl_vlm.rollout.vllm.preemptions import METRIC, Preemptions, total_in_process
from rl_vlm.rollout.vllm.requests import (
    GeneratedTokens,
    GenerateRequest,
    GenerateResponse,
    PromptRenderer,
    check_length,
    sampling_arguments,
    to_groups,
    version_label,
)
from rl_vlm.types import Group, RolloutRequest, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

T = TypeVar("T")

WEIGHTS, KV_CACHE = "weights", "kv_cache"
"""vLLM's tags of memory that sleep mode frees."""


class VLLMEngine:
    """A `RolloutEngine` on `vllm.LLM`."""

    def __init__(
        self,
        arguments: dict[str, Any],
        tokens: TokenRules,
        renderer: PromptRenderer,
        adapter: Path | None = None,
        keeps_weights: bool = True,
        model_runner: str = "auto",
    ) -> None:
        """`arguments` are passed to `vllm.LLM`. `adapter` is the initial PEFT adapter. `model_runner` is the setting.

        If `keeps_weights` is False, sleep mode discards the weights instead of copying them to the host. Every weight
        must then be sent again before the next call.

        Raises ConfigError if vLLM is not installed, if sleep mode has no GPU, or if vLLM has another model runner.
        Raises ModelError if vLLM cannot run the model.
        """
        self.tokens = tokens
        self.renderer = renderer
        self.sleeps = arguments.get("enable_sleep_mode", False)
        self.sleep_level = 1 if keeps_weights else 2
        self.asleep: set[str] = set()
        """vLLM's tags of the memory that is freed."""
        self.has_weights = True
        """False once sleep mode has discarded the weights, and while others are loaded."""
        self.is_one_of_several = arguments.get("distributed_executor_backend") == "external_launcher"
        self.is_parallel = self.is_one_of_several and arguments["tensor_parallel_size"] > 1
        self.llm: Any = start_vllm(
            arguments | {"weight_transfer_config": {"backend": "rl_vlm"}, "disable_log_stats": False}, model_runner
        )
        # Ranks that share a model take each step together, so none can stop alone.
        before_steps(self.llm.llm_engine, mark_alive if self.is_parallel else stop.check)
        self.preemptions = Preemptions({"": total_in_process(self.llm)})
        self.max_model_length: int = self.llm.model_config.max_model_len
        self.adapter: Any = None
        self.counters: Counter[str] = Counter()
        self.set_version(-1)  # no weights have been sent
        if adapter is not None:
            self.load_adapter(adapter)

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group per request, in order. vLLM does the batching. Ranks that share a model call it together.

        Raises DataError if a prompt is too long, RolloutError if vLLM's prompt tokens differ from the trainer's.
        """

        def send(parts: list[GenerateRequest]) -> list[GenerateResponse]:
            return self.responses(lambda: [self.vllm_arguments(part, sampling) for part in parts])

        groups = to_groups(requests, send, sampling, self.policy_version, self.renderer.processor.tokenizer)
        self.count_preemptions()
        return groups

    def count_preemptions(self) -> None:
        """Count new preemptions. Ranks that share a model schedule alike, so only the first of them counts."""
        if self.is_parallel and not is_first_of_model():
            return
        if count := self.preemptions.new({"": total_in_process(self.llm)}):
            self.counters[METRIC] += count

    def vllm_arguments(self, request: GenerateRequest, sampling: Sampling) -> tuple[dict[str, Any], dict[str, Any]]:
        """Build vLLM's prompt and sampling parameters for a request. Raises DataError if the prompt is too long."""
        check_length(request.rollout_request, sampling, self.max_model_length)
        prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids(self.renderer)}
        images = [*request.sample.images, *map(decode_image, request.observed_images)]
        if media := {kind: values for kind, values in (("image", images), ("video", request.videos)) if values}:
            prompt["multi_modal_data"] = media
        return prompt, sampling_arguments(request, sampling, self.tokens)

    def responses(self, arguments: Callable[[], list[tuple[dict[str, Any], dict[str, Any]]]]) -> list[GenerateResponse]:
        """Sample for all ranks that share a model, and return this rank's responses."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError

        if not self.has_weights:
            raise RolloutError("vLLM has discarded its weights, and no others were sent")
        everyones, mine = gather(arguments) if self.is_parallel else (arguments(), slice(None))
        prompts = [prompt for prompt, _ in everyones]
        params = [SamplingParams(**sampling) for _, sampling in everyones]
        self.wake_up(WEIGHTS, KV_CACHE)
        try:
            outputs = self.llm.generate(prompts, params, lora_request=self.adapter, use_tqdm=False)
        except (ValueError, VLLMValidationError) as error:
            raise DataError(f"vLLM refuses a prompt: {error}") from error
        except Stopped:
            self.llm.llm_engine.abort_request(list(self.llm.llm_engine.output_processor.request_states), internal=True)
            raise
        return [
            GenerateResponse(output.prompt_token_ids, [generated_tokens(c) for c in output.outputs])
            for output in outputs[mine]
        ]

    def sync(self, source: WeightSource, version: int) -> int:
        """Load the adapter, or the trained weights, reset the caches, and return the number of bytes moved.

        The memory of the KV cache stays free meanwhile, for the weights that are gathered.
        """
        self.wake_up(WEIGHTS)
        self.has_weights = source.sends_adapter
        if source.sends_adapter:
            with tempfile.TemporaryDirectory() as directory:
                num_bytes = source.save_adapter(Path(directory))
                self.load_adapter(Path(directory))
        else:
            num_bytes = self.load_weights(source)
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM cannot clear its prefix cache of older weights, because it is in use.")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.set_version(version)
        self.has_weights = True
        return num_bytes

    def load_adapter(self, directory: Path) -> None:
        """Replace the adapter by the one in `directory`, which is read immediately.

        Raises ConfigError if the adapter is on modules that vLLM's model cannot adapt, such as many LM heads.
        """
        from vllm.lora.request import LoRARequest

        try:
            self.llm.llm_engine.add_lora(LoRARequest(ADAPTER_NAME, 1, str(directory), load_inplace=True))
        except ValueError as error:
            raise ConfigError(
                f"vLLM cannot load this adapter: {shorten(error)}. Set rollout.lora_sync: merge, leave these modules "
                "out of lora_target_modules, or set rollout.engine: hf"
            ) from error
        self.adapter = LoRARequest(ADAPTER_NAME, 1, str(directory))

    def load_weights(self, source: WeightSource) -> int:
        """Replace the trained weights, and return their size in bytes."""
        from rl_vlm.rollout.vllm.receiver import WeightReceiver

        num_bytes = 0

        def weights() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, weight in source.trained_weights():
                num_bytes += weight.nbytes
                yield name, weight

        WeightReceiver.handed_over = weights()
        try:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {}})
            self.llm.finish_weight_update()
        finally:
            WeightReceiver.handed_over = ()
        return num_bytes

    def set_version(self, version: int) -> None:
        """Set the version of the weights. vLLM labels its completions with it."""
        self.policy_version = version
        self.llm.update_weight_version(version_label(version))

    def wake_up(self, *tags: str) -> None:
        """Reallocate the memory that sleep mode freed, by vLLM's tags."""
        if due := [tag for tag in tags if tag in self.asleep]:
            self.llm.wake_up(due)
            self.asleep -= set(due)

    def sleep(self) -> bool:
        """Free the device's memory for training, if sleep mode is set. Return whether the weights are kept."""
        if self.sleeps and self.has_weights and self.asleep != {WEIGHTS, KV_CACHE}:
            self.wake_up(WEIGHTS, KV_CACHE)  # vLLM cannot sleep while it is half awake
            self.llm.sleep(level=self.sleep_level)
            self.asleep = {WEIGHTS, KV_CACHE}
            self.has_weights = self.sleep_level == 1
        return self.has_weights

    def close(self) -> None:
        if self.is_one_of_several:  # a full shutdown, now or at exit, would end the trainer's process group
            self.llm.llm_engine.model_executor.shutdown()
            self.llm.llm_engine.engine_core._finalizer.detach()
        else:
            self.llm.llm_engine.engine_core.shutdown()


def start_vllm(arguments: dict[str, Any], runner: str = "auto") -> Any:
    """Start `vllm.LLM` in this process, with this model runner."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= ENVIRONMENT | os.environ
    try:
        from vllm import LLM

        from rl_vlm.rollout.vllm.receiver import register
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: vllm needs the package vllm, which cannot be imported ({error}). "
            "Set up GPUs with `make gpu`, or use the engine hf."
        ) from error
    register()
    if arguments.get("enable_sleep_mode") and not torch.cuda.is_available():
        raise ConfigError("vllm.vllm_enable_sleep_mode needs a GPU; set it to false")
    num_threads, states = torch.get_num_threads(), random_states()
    try:
        with model_runner_set(runner):
            return LLM(**arguments)
    except ValueError as error:
        raise ModelError(
            f"vLLM does not run {arguments['model']} as it is set up: {error}\n"
            "The engine hf runs every supported family."
        ) from error
    finally:
        restore_random_states(states)  # vLLM seeds the global generators
        if torch.get_num_threads() != num_threads:  # vLLM sets it to 1, and the trainer prepares images here
            torch.set_num_threads(num_threads)


@contextmanager
def model_runner_set(choice: str) -> Iterator[None]:
    """Set vLLM's environment variable for `vllm_model_runner` in this context.

    vLLM reads it when it first starts, and keeps the value. Raises ConfigError if it has read another one.
    """
    from vllm import envs

    added = model_runner(choice).items() - os.environ.items()
    os.environ.update(added)
    try:
        if wants_v2(os.environ.get(MODEL_RUNNER)) != envs.VLLM_USE_V2_MODEL_RUNNER:
            raise ConfigError(
                f"vllm.vllm_model_runner: {choice} has no effect, because vLLM has already started in this process, "
                "with another one; start a new process"
            )
        yield
    finally:
        for name, _ in added:
            del os.environ[name]


def wants_v2(value: str | None) -> bool | None:
    """Convert the environment variable as vLLM does."""
    return None if value is None else bool(int(value))


def before_steps(engine: Any, check: Callable[[], None]) -> None:
    """Make vLLM's engine call `check` before each step."""
    step = engine.step

    def checked_step() -> Any:
        check()
        return step()

    engine.step = checked_step


def gather(make: Callable[[], list[T]]) -> tuple[list[T], slice]:
    """Concatenate the lists that `make` returns on the ranks of a tensor-parallel group. Also return this rank's slice.

    If one rank raises an RLVLMError, all ranks raise it, so that none waits for another.
    """
    from torch.distributed import all_gather_object
    from vllm.distributed.parallel_state import get_tp_group

    try:
        mine: list[T] | RLVLMError = make()
    except RLVLMError as error:
        mine = error
    ranks: list[Any] = [None] * get_tp_group().world_size
    all_gather_object(ranks, mine, group=get_tp_group().cpu_group)
    for failure in (found for found in ranks if isinstance(found, RLVLMError)):
        raise failure
    start = sum(len(found) for found in ranks[: get_tp_group().rank_in_group])
    return [one for found in ranks for one in found], slice(start, start + len(ranks[get_tp_group().rank_in_group]))


def is_first_of_model() -> bool:
    """Return whether this rank is the first of its tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().rank_in_group == 0


def generated_tokens(completion: CompletionOutput) -> GeneratedTokens:
    """Convert one of vLLM's completions."""
    positions: Any = completion.logprobs
    logprobs = [position[token].logprob for token, position in zip(completion.token_ids, positions, strict=True)]
    versions = [span.version for span in completion.weight_versions or ()]
    return GeneratedTokens(list(completion.token_ids), logprobs, str(completion.finish_reason), versions)
