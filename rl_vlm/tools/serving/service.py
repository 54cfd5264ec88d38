"""A served model: requests of the API to prompts, and groups to answers.

body ─ check ─► messages with images ─ processor, limits ─► Prompt ─ Batches ─► Group ─ stop texts ─► answer
"""

from __future__ import annotations

import re
import secrets
import threading
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import pixel_limits, read_image
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import DataError
from rl_vlm.tools.serving.batches import Batches
from rl_vlm.tools.serving.protocol import APIError, ChatAnswer, ChatMessage, ChatRequest, Choice, ImagePart
from rl_vlm.types import Completion, Group, Prompt, RolloutRequest, Sample, Sampling

DATA_URL = re.compile(r"data:image/[^,\s]{1,99};base64,")


class ChatService:
    """Answers requests with one model. Methods may be called from any thread."""

    def __init__(
        self, name: str, builder: PromptBuilder, batches: Batches, data: DataConfig, context: int | None, default: int
    ) -> None:
        """`context` limits the tokens of a prompt with its completion. `default` limits the tokens of a completion if
        the request does not.
        """
        self.name = name
        self.builder = builder
        self.batches = batches
        self.data = data
        self.context = context
        self.default = default
        self.building = threading.Lock()  # tokenizers are not safe for threads

    def answer(self, request: ChatRequest) -> ChatAnswer:
        """Wait for the completions of a request.

        Raises APIError if the request cannot be answered, DataError if the engine refuses it, and Stopping if the
        endpoint stops.
        """
        check_served(request, self.name, self.data)
        sample = to_sample(request.messages, self.data.max_image_pixels)
        prompt = self.build(sample)
        draw = secrets.token_hex(8) if request.seed is None else f"seed {request.seed}"
        sampling = to_sampling(request, len(prompt.token_ids), self.context, self.default)
        future: Future[Group] = self.batches.submit(RolloutRequest(draw, prompt), sampling)
        completions = future.result().completions
        choices = [to_choice(one, request.stop, self.builder.processor.tokenizer) for one in completions]
        return ChatAnswer(self.name, choices, len(prompt.token_ids))

    def build(self, sample: Sample) -> Prompt:
        """Build the prompt. Raises APIError if the processor refuses it."""
        try:
            with self.building:
                return self.builder.build(sample)
        except DataError as error:
            raise APIError(400, str(error), "messages") from error


def check_served(request: ChatRequest, name: str, data: DataConfig) -> None:
    """Raise APIError if the request is for another model, or for other settings of the processor."""
    if request.model != name:
        message = f"there is no model {request.model!r}; this endpoint serves {name!r}"
        raise APIError(404, message, "model", "model_not_found")
    template_kwargs, limits = data.chat_template_kwargs, pixel_limits(data)
    for param, own in (("chat_template_kwargs", template_kwargs), ("mm_processor_kwargs", limits)):
        wanted = getattr(request, param) or {}
        if any(item not in own.items() for item in wanted.items()):
            message = f"{param} is {wanted}, and the endpoint has {own}; start it with these values"
            raise APIError(400, message, param)


def to_sampling(request: ChatRequest, num_prompt_tokens: int, context: int | None, default: int) -> Sampling:
    """Return the sampling settings of a request. The name of the draw has the seed, so that batches may mix seeds.

    `context` and `default` are as in `ChatService`. Raises APIError if prompt and completion do not fit.
    """
    limit = request.token_limit or default
    if context is not None:
        room = context - num_prompt_tokens
        if room < 1 or (request.token_limit or 1) > room:
            raise APIError(
                400,
                f"this model's maximum context length is {context} tokens, and the request has "
                f"{num_prompt_tokens} of a prompt, images included, and {limit} of a completion; shorten the "
                "prompt, or set max_tokens lower",
                "messages",
                "context_length_exceeded",
            )
        limit = min(limit, room)
    return Sampling(
        num_generations=request.n, max_completion_length=limit, temperature=request.temperature, seed=0,
        top_p=request.top_p, top_k=max(request.top_k, 0), min_p=request.min_p or None,
    )  # fmt: skip


def to_sample(messages: Sequence[ChatMessage], max_image_pixels: int) -> Sample:
    """Convert messages to a sample with decoded images.

    Raises APIError if an image is no data URL, cannot be decoded, or has more than `max_image_pixels`.
    """
    images: list[Image.Image] = []
    converted = []
    for i, message in enumerate(messages):
        blocks: list[dict[str, Any]] = []
        for j, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                images.append(decode(part.image_url.url, f"messages[{i}].content[{j}].image_url.url", max_image_pixels))
                blocks.append({"type": "image"})
            else:
                blocks.append({"type": "text", "text": part.text})
        converted.append({"role": message.role, "content": blocks})
    return Sample("of the request", converted, images, {}, converted)


def decode(url: str, param: str, max_image_pixels: int) -> Image.Image:
    """Decode the image of a data URL like images of data sets. Raises APIError for anything else."""
    if not DATA_URL.match(url):
        raise APIError(
            400,
            f"{param} is no data URL; send the image itself as data:image/png;base64,… (nothing is fetched or opened)",
            param,
            "invalid_image_url",
        )
    try:
        image, _ = read_image(url, Path(), max_image_pixels, param)
    except DataError as error:
        raise APIError(400, str(error), param, "invalid_image") from error
    return image


def to_choice(completion: Completion, stops: Sequence[str], tokenizer: Any) -> Choice:
    """Cut a completion before its first stop text. The tokens up to the end of that text are counted."""
    assert completion.finish_reason != "paused", "only training pauses completions"
    text, num_tokens = completion.text, len(completion.token_ids)
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    if not starts:
        return Choice(text, completion.finish_reason, num_tokens)

    def has_stop(num: int) -> bool:
        ids = completion.token_ids[:num]
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(stop in decoded for stop in stops)

    return Choice(text[: min(starts)], "stop", bisect_left(range(num_tokens), True, key=has_stop))
