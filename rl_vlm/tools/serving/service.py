"""A served model: requests of the API to prompts, and groups to answers.

body ─ check ─► messages with images ─ processor, limits ─► Prompt ─ Batches ─► Group ─ stop texts ─► answer
"""

from __future__ import annotations

import re
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import check_image, pixel_limits, read_image
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import DataError
from rl_vlm.tools.serving.batches import Batches
from rl_vlm.tools.serving.budget import Budget
from rl_vlm.tools.serving.protocol import APIError, ChatAnswer, ChatMessage, ChatRequest, Choice, ImagePart
from rl_vlm.types import Completion, Prompt, RolloutRequest, Sample, Sampling

T = TypeVar("T")
GREEDY_BELOW = 1e-5
"""Temperature below which sampling is greedy, as in vLLM: logits divided by it would exceed fp32."""
PIECE = 2**16
"""Characters of a text that are tokenized at once to count its tokens."""
ANY_CONTEXT = 2**20
"""Assumed maximum number of tokens of a model without a limit."""
DATA_URL = re.compile(r"data:image/[^,\s]{1,99};base64,")
MAX_PIXELS = 2**27
"""Pixels of the images of all requests at once, and of one request. A larger `data.max_image_pixels` replaces it."""


class ChatService:
    """Answers requests with one model. Methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        builder: PromptBuilder,
        batches: Batches,
        data: DataConfig,
        context: int | None,
        default: int,
        most_images: int,
    ) -> None:
        """`context` limits the tokens of a prompt with its completion. `default` limits the tokens of a completion if
        the request does not. `most_images` limits the images of all requests at once, and of one request.
        """
        self.name = name
        self.builder = builder
        self.batches = batches
        self.data = data
        self.context = context
        self.default = default
        self.images = Budget(most_images)
        self.pixels = Budget(max(MAX_PIXELS, data.max_image_pixels))
        self.building = Budget(1)  # tokenizers are not safe for threads

    def answer(self, request: ChatRequest, end: float, is_gone: Callable[[], bool]) -> ChatAnswer:
        """Wait for the completions of a request until `end`, a time of `time.monotonic`, or until its client `is_gone`.

        Raises APIError if the request cannot be answered, DataError if the engine refuses it, NotInTime after `end`,
        ConnectionError if the client is gone, and Stopping if the endpoint stops.
        """
        check_served(request, self.name, self.data)
        num_images = sum(isinstance(part, ImagePart) for message in request.messages for part in message.content)
        refuse_above(self.images, num_images, f"the messages have {num_images} images", "too_many_images")
        num_pixels = count_pixels(request.messages, self.data.max_image_pixels)
        refuse_above(self.pixels, num_pixels, f"the images have {num_pixels} pixels", "too_many_pixels")
        with (
            self.images.held(num_images, end - time.monotonic()),
            self.pixels.held(num_pixels, end - time.monotonic()),
        ):
            prompt = self.build(to_sample(request.messages, self.data.max_image_pixels), end)
            draw = secrets.token_hex(8) if request.seed is None else f"seed {request.seed}"
            sampling = to_sampling(request, len(prompt.token_ids), self.context, self.default)
            completions = self.batches.group(RolloutRequest(draw, prompt), sampling, end, is_gone).completions
        choices = [to_choice(one, request.stop, self.builder.processor.tokenizer) for one in completions]
        return ChatAnswer(self.name, choices, len(prompt.token_ids))

    def build(self, sample: Sample, end: float) -> Prompt:
        """Build the prompt. Raises APIError if the processor refuses it, NotInTime if others build until `end`."""
        try:
            with self.building.held(1, end - time.monotonic()):
                refuse_long(sample, self.builder.processor.tokenizer, self.context or ANY_CONTEXT)
                return self.builder.build(sample)
        except DataError as error:
            raise APIError(400, str(error), "messages") from error


def refuse_above(budget: Budget, amount: int, found: str, code: str) -> None:
    """Raise APIError if a request alone needs more than there is for all."""
    if amount > budget.total:
        raise APIError(400, f"{found}, and the endpoint takes at most {budget.total}", "messages", code)


def refuse_long(sample: Sample, tokenizer: Any, context: int) -> None:
    """Raise APIError if the text has more than twice the tokens of the context.

    The processor takes hundreds of bytes for each token, and only its result is checked. This function counts tokens of
    pieces, which have a few more than the whole. A text has no more tokens than UTF-8 bytes.
    """
    text = "".join(block.get("text", "") for message in sample.messages for block in message["content"])
    if len(text.encode()) <= 2 * context:
        return
    num_tokens = 0
    for start in range(0, len(text), PIECE):
        num_tokens += len(tokenizer(text[start : start + PIECE], add_special_tokens=False)["input_ids"])
        if num_tokens > 2 * context:
            found = f"this model's maximum context length is {context} tokens, and the text has over {2 * context}"
            raise APIError(400, found, "messages", "context_length_exceeded")


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
    temperature = 0.0 if request.temperature < GREEDY_BELOW else request.temperature
    return Sampling(
        num_generations=request.n, max_completion_length=limit, temperature=temperature, seed=0,
        top_p=request.top_p, top_k=max(request.top_k, 0), min_p=request.min_p or None,
    )  # fmt: skip


def to_sample(messages: Sequence[ChatMessage], max_image_pixels: int) -> Sample:
    """Convert messages to a sample with decoded images. Raises APIError if an image cannot be decoded."""
    images = [checked(read_image, url, max_image_pixels, param)[0] for url, param in data_urls(messages)]
    converted = [
        {
            "role": message.role,
            "content": [
                {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
                for part in message.content
            ],
        }
        for message in messages
    ]
    return Sample("of the request", converted, images, {}, converted)


def count_pixels(messages: Sequence[ChatMessage], max_image_pixels: int) -> int:
    """Return the number of pixels of all images, from their headers.

    Raises APIError if an image is no data URL, has a bad header, or has more than `max_image_pixels`.
    """
    return sum(checked(check_image, url, max_image_pixels, param) for url, param in data_urls(messages))


def data_urls(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, str]]:
    """Yield each image's data URL and its place in the request. Raises APIError for any other URL."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content):
            if not isinstance(part, ImagePart):
                continue
            param = f"messages[{i}].content[{j}].image_url.url"
            if not DATA_URL.match(part.image_url.url):
                raise APIError(
                    400,
                    f"{param} is no data URL; send the image itself as data:image/png;base64,… (nothing is fetched or "
                    "opened)",
                    param,
                    "invalid_image_url",
                )
            yield part.image_url.url, param


def checked(read: Callable[..., T], url: str, max_image_pixels: int, param: str) -> T:
    """Call a function that reads an image of data sets. Raises APIError instead of DataError."""
    try:
        return read(url, Path(), max_image_pixels, param)
    except DataError as error:
        raise APIError(400, str(error), param, "invalid_image") from error


def to_choice(completion: Completion, stops: Sequence[str], tokenizer: Any) -> Choice:
    """Cut a completion before its first stop text. The tokens up to the end of that text are counted."""
    reason, text, num_tokens = completion.finish_reason, completion.text, len(completion.token_ids)
    assert reason == "stop" or reason == "length", "single turns that are not paused end so"
    starts = [start for stop in stops if (start := text.find(stop)) >= 0]
    if not starts:
        return Choice(text, reason, num_tokens)

    def has_stop(num: int) -> bool:
        ids = completion.token_ids[:num]
        decoded = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(stop in decoded for stop in stops)

    return Choice(text[: min(starts)], "stop", bisect_left(range(num_tokens), True, key=has_stop))
