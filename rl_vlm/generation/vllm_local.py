"""Rollouts with vLLM in the trainer's process, which shares its device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_vlm.errors import ConfigError, DataError, ModelError, RolloutError
from rl_vlm.families import TokenRules
from rl_vlm.generation import WeightSource
from rl_vlm.generation.vllm_common import (
    ADAPTER_NAME,
    ENVIRONMENT,
    Answer,
    PromptRenderer,
    check_length,
    sampling_arguments,
    to_group,
    version_label,
)
from rl_vlm.types import Group, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class VLLMEngine:
    """A `RolloutEngine` on `vllm.LLM`."""

    def __init__(
        self, arguments: dict[str, Any], tokens: TokenRules, renderer: PromptRenderer, adapter: Path | None = None
    ) -> None:
        """`arguments` are those of `vllm.LLM`; `adapter` is a PEFT adapter to begin with.

        Raises ConfigError if vLLM is not installed or refuses its settings, ModelError if it does not run the model.
        """
        self.tokens = tokens
        self.renderer = renderer
        self.sleeps = arguments.get("enable_sleep_mode", False)
        self.llm: Any = start_vllm(arguments | {"weight_transfer_config": {"backend": "rl_vlm"}})
        self.max_model_length: int = self.llm.model_config.max_model_len
        self.adapter: Any = None
        self.set_version(-1)  # nothing has been sent
        if adapter is not None:
            self.load_adapter(adapter)

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """One group per request, in order. vLLM batches them itself.

        Raises DataError for prompts that are too long, RolloutError where vLLM reads another prompt than the trainer.
        """
        from vllm import SamplingParams

        for request in requests:
            check_length(request, sampling, self.max_model_length)
        prompts = [self.vllm_prompt(request.prompt.sample) for request in requests]
        rules = (self.tokens.stop, self.tokens.banned)
        params = [SamplingParams(**sampling_arguments(sampling, r.group_id, *rules)) for r in requests]
        self.wake_up()
        try:
            outputs = self.llm.generate(prompts, params, lora_request=self.adapter, use_tqdm=False)
        except ValueError as error:
            raise DataError(f"vLLM refuses a prompt: {error}") from error
        finally:
            if self.sleeps:
                self.llm.sleep(level=1)
        return [
            to_group(
                request,
                output.prompt_token_ids,
                [to_answer(completion) for completion in output.outputs],
                self.policy_version,
                self.renderer.processor.tokenizer,
            )
            for request, output in zip(requests, outputs, strict=True)
        ]

    def vllm_prompt(self, sample: Sample) -> dict[str, Any]:
        """The prompt with one placeholder per image, which vLLM expands."""
        prompt: dict[str, Any] = {"prompt_token_ids": self.renderer.unexpanded_ids(sample)}
        return prompt | ({"multi_modal_data": {"image": list(sample.images)}} if sample.images else {})

    def sync(self, source: WeightSource, version: int) -> int:
        """Take over the adapter, or the trained weights, and forget what was computed with the old ones."""
        self.wake_up()
        if source.sends_adapter:
            with tempfile.TemporaryDirectory() as directory:
                num_bytes = source.save_adapter(Path(directory))
                self.load_adapter(Path(directory))
        else:
            num_bytes = self.load_weights(source)
        if not self.llm.reset_prefix_cache():
            raise RolloutError("vLLM keeps what it computed with older weights: its prefix cache is in use.")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.set_version(version)
        return num_bytes

    def load_adapter(self, directory: Path) -> None:
        """Replace the adapter by the one in `directory`, which is read at once."""
        from vllm.lora.request import LoRARequest

        self.llm.llm_engine.add_lora(LoRARequest(ADAPTER_NAME, 1, str(directory), load_inplace=True))
        self.adapter = LoRARequest(ADAPTER_NAME, 1, str(directory))

    def load_weights(self, source: WeightSource) -> int:
        """Replace the weights that were trained; returns their bytes."""
        from rl_vlm.generation.vllm_weights import WeightReceiver

        weights = list(source.trained_weights())
        WeightReceiver.handed_over = weights
        try:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {}})
            self.llm.finish_weight_update()
        finally:
            WeightReceiver.handed_over = ()
        return sum(weight.nbytes for _, weight in weights)

    def set_version(self, version: int) -> None:
        """Name the weights that vLLM has; it labels completions with the version that sampled them."""
        self.policy_version = version
        self.llm.update_weight_version(version_label(version))

    def wake_up(self) -> None:
        """Take back the memory that was freed for training."""
        if self.sleeps:
            self.llm.wake_up()

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def start_vllm(arguments: dict[str, Any]) -> Any:
    """`vllm.LLM` in this very process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= ENVIRONMENT | os.environ
    try:
        from vllm import LLM

        from rl_vlm.generation.vllm_weights import register
    except ImportError as error:
        raise ConfigError(
            f"rollout.engine: vllm needs the package vllm, which cannot be imported ({error}). "
            "Install it with rl-vlm[vllm], or use the engine hf."
        ) from error
    register()
    if arguments.get("enable_sleep_mode") and not torch.cuda.is_available():
        raise ConfigError("vllm.vllm_enable_sleep_mode needs a GPU; set it to false")
    try:
        return LLM(**arguments)
    except ValueError as error:
        raise ModelError(
            f"vLLM does not run {arguments['model']} as it is set up: {error}\n"
            "The engine hf runs every supported family."
        ) from error


def to_answer(completion: CompletionOutput) -> Answer:
    """One of vLLM's completions."""
    positions: Any = completion.logprobs
    logprobs = [position[token].logprob for token, position in zip(completion.token_ids, positions, strict=True)]
    versions = [span.version for span in completion.weight_versions or ()]
    return Answer(list(completion.token_ids), logprobs, str(completion.finish_reason), versions)
