"""Construction of a chat service: processor, engine and batches of a served checkpoint."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rl_vlm.data.prompts import PromptBuilder, has_max_pixels, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import DataError
from rl_vlm.model.loading import base_of, context_length
from rl_vlm.passes.proof import ROWS, Proof, ProofCheck
from rl_vlm.rollout.build import evaluation_engine
from rl_vlm.rollout.proving import EngineCheck
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.tools.serving.batches import Batches
from rl_vlm.tools.serving.checkpoint import Served
from rl_vlm.tools.serving.service import ChatService
from rl_vlm.types import RolloutRequest, Sample, Sampling

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
QUESTIONS = ("Describe the image.", "Which colours are there?")
"""Texts of the prompts of a proof. Each has an image."""
PROVEN_TOKENS = 16
"""Maximum tokens of a completion of a proof."""
SHAPES = ((1, 1), (1, 2), (1, 4), (1, 12), (1, 36))
"""Sides of small images, in units of `SIDE`. Processors enlarge some of them, and cut others into many tiles."""
SIDE = 16
MAX_INPUT_BYTES = 3 * 2**30
"""Bytes that small images of all requests may become at once, as many as Qwen's processors make of `MAX_PIXELS`."""


def chat_service(served: Served, name: str) -> ChatService:
    """Load the model and return a service that calls it `name`. Close `batches.engine` after use."""
    config, checkpoint = served.config, served.checkpoint
    processor = load_processor(processor_of(checkpoint), config.model, config.data)
    builder = PromptBuilder(processor, config.data, most_videos=0)
    engine = evaluation_engine(config, checkpoint, builder, Ranks())
    limits = [context_length(config.model, checkpoint)]
    if isinstance(engine, VLLMEngine):
        limits.append(engine.max_model_length)
    context = min((limit for limit in limits if limit is not None), default=None)
    batches = Batches(engine, config.rollout.max_num_seqs)
    most_images = max(1, MAX_INPUT_BYTES // bytes_of_small_image(builder))
    default = config.rollout.max_completion_length
    return ChatService(name, builder, batches, config.data, context, default, most_images)


def bytes_of_small_image(builder: PromptBuilder) -> int:
    """Return the bytes that the processor makes of a small image, for the largest of some shapes."""
    sizes = [1]
    for short, long in SHAPES:
        for width, height in ((short, long), (long, short)):
            with suppress(DataError):  # a processor may refuse long images
                prompt = builder.build(noise_sample(0, QUESTIONS[0], width * SIDE, height * SIDE))
                sizes.append(sum(value.nbytes for value in prompt.mm_inputs.values()))
    return max(sizes)


def prove_served(served: Served, service: ChatService) -> Proof:
    """Prove the served model with two prompts of this function, before the first request.

    Raises ModelError if a check does not hold.
    """
    check = EngineCheck(served.config, service.batches.engine)
    if not check.is_due:
        return check.proof
    try:
        prompts = [service.builder.build(noise_sample(seed, text)) for seed, text in enumerate(QUESTIONS)]
    except DataError as error:
        check.proof.checks.append(ProofCheck(ROWS, untried=str(error)))
        return check.proof
    limit = min(served.config.rollout.max_completion_length, PROVEN_TOKENS)
    sampling = Sampling(num_generations=2, max_completion_length=limit, temperature=1.0, seed=0)
    requests = [RolloutRequest(prompt.sample.sample_id, prompt) for prompt in prompts]
    check.run(service.batches.engine.generate(requests, sampling))
    return check.proof


def noise_sample(seed: int, text: str, width: int = 64, height: int = 64) -> Sample:
    """Make a sample with an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    return Sample(f"proof {seed}", messages, [Image.fromarray(pixels)], {}, messages)


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
