"""Construction of a chat service: processor, engine and batches of a served checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_vlm.data.prompts import PromptBuilder, has_max_pixels, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.loading import base_of, context_length
from rl_vlm.rollout.build import evaluation_engine
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.tools.serving.batches import Batches
from rl_vlm.tools.serving.checkpoint import Served
from rl_vlm.tools.serving.service import ChatService

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def chat_service(served: Served, name: str) -> ChatService:
    """Load the model and return a service that calls it `name`. Close `batches.engine` after use."""
    config, checkpoint = served.config, served.checkpoint
    builder = PromptBuilder(load_processor(processor_of(checkpoint), config.model, config.data), config.data)
    engine = evaluation_engine(config, checkpoint, builder, Ranks())
    limits = [context_length(config.model, checkpoint)]
    if isinstance(engine, VLLMEngine):
        limits.append(engine.max_model_length)
    context = min((limit for limit in limits if limit is not None), default=None)
    batches = Batches(engine, config.rollout.max_num_seqs)
    return ChatService(name, builder, batches, config.data, context, config.rollout.max_completion_length)


def processor_of(checkpoint: str) -> str:
    """Return the model with the processor: the checkpoint, or an adapter's base model if the adapter has none."""
    has_own = any((Path(checkpoint) / name).is_file() for name in PROCESSOR_FILES)
    return checkpoint if has_own else base_of(checkpoint)


def limits_in_words(served: Served, service: ChatService) -> list[str]:
    """Return a line for each limit and setting in use, with its source."""
    config, processor = served.config, service.builder.processor
    own: dict[str, Any] = {}
    if has_max_pixels(processor):
        size = dict(processor.image_processor.size)
        own = {"data.min_pixels": size["shortest_edge"], "data.max_pixels": size["longest_edge"]}
    lines = []
    for setting in ("data.min_pixels", "data.max_pixels", "data.chat_template_kwargs", "data.max_image_pixels",
                    "rollout.max_completion_length", "model.dtype"):  # fmt: skip
        section, leaf = setting.split(".")
        value, source = getattr(getattr(config, section), leaf), served.sources.get(setting, "the default")
        if value is None:
            value, source = own.get(setting, "none"), "the checkpoint's processor"
        lines.append(f"{leaf:22} {value!s:14} ({source})")
    context = "none" if service.context is None else service.context
    return [*lines, f"{'context':22} {context!s:14} (the model, or vLLM's limit)"]
