"""OpenAI's chat completions: the request bodies that the endpoint takes, its answers and its errors.

A parameter is used, or ignored if its value changes nothing, or refused.
"""

from __future__ import annotations

import json
import reprlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from rl_vlm.errors import shorten

MAX_CHOICES = 128
"""Largest `n`."""
NOTHING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "logprobs": (False,), "top_logprobs": (0,), "echo": (False,), "best_of": (1,),
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},), "modalities": (["text"],),
}  # fmt: skip
"""Unsupported parameters, with the values that are accepted since they change nothing."""
UNUSED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Parameters that never change an answer."""


VIDEO_PARTS = ("video", "video_url", "input_video")
"""Types of parts of a message with a video: of chat templates, of vLLM and of other APIs."""
NO_VIDEOS = (
    "this endpoint takes no videos; send the frames as images (image_url), each after a text with its time, such as "
    "'0.5 s: '"
)


class APIError(Exception):
    """An error in OpenAI's form, with its HTTP status. Texts of the client are shortened."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        message, param = shorten(message, 1000), param and shorten(param)
        super().__init__(message)
        self.status = status
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def answer(self) -> tuple[int, dict[str, Any]]:
        """Return the status and the body."""
        return self.status, self.body


class Strict(BaseModel):
    """A part of a request. A number is no text, and 1.0 is no integer."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ImageURL(Strict):
    url: str
    detail: Literal["low", "high", "auto"] = "auto"
    """Without effect: the endpoint's own limits decide the size at which an image is seen."""


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageURL


RequestPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(Strict):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[RequestPart], BeforeValidator(_as_parts)]


class StreamOptions(Strict):
    include_usage: bool = False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class ChatRequest(Strict):
    """The parameters that are used. Names and defaults are OpenAI's; `top_k` and all after it are vLLM's."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = []
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def token_limit(self) -> int | None:
        """Return the most tokens of a completion, or None if the request sets no limit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def continues(self) -> bool:
        """Return whether the completion continues a final assistant message."""
        return self.messages[-1].role == "assistant"


def count_values(content: bytes) -> int:
    """Count commas and opening brackets of a JSON text. It has no more values than these, and one."""
    return sum(map(content.count, (b",", b"[", b"{")))


def read_request(content: bytes) -> ChatRequest:
    """Read a request body.

    Raises APIError with status 400 if it is not JSON, or if a parameter is wrong, which the error names.
    """
    try:
        body = from_json(content)  # json.loads would first make a text of all bytes
    except ValueError as error:
        raise APIError(400, f"the body is no JSON: {shorten(error)}") from None
    if not isinstance(body, dict):
        raise APIError(400, "the body is no JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    for name in set(given) - set(ChatRequest.model_fields):
        refuse_effect(name, given.pop(name))
    try:
        request = ChatRequest.model_validate(given)
    except ValidationError as error:
        raise invalid(error) from None
    if "stream_options" in given and not request.stream:
        raise APIError(400, "stream_options is only for stream: true", "stream_options")
    if None not in (request.max_tokens, request.max_completion_tokens) and (
        request.max_tokens != request.max_completion_tokens
    ):
        raise APIError(400, "max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    if request.add_generation_prompt is request.continues or request.continue_final_message is (not request.continues):
        name = "add_generation_prompt" if request.add_generation_prompt is not None else "continue_final_message"
        raise APIError(400, "a final assistant message is always continued, and any other never is", name)
    return request


def refuse_effect(name: str, value: Any) -> None:
    """Raise APIError if a parameter is unknown, or unsupported with a value that would change the answer."""
    if name in UNUSED or any(value == harmless for harmless in NOTHING.get(name, ())):
        return
    if name in NOTHING:
        way_out = f"the endpoint takes only {' or '.join(map(json.dumps, NOTHING[name]))}; leave it out"
        raise APIError(400, f"{name} is not supported: {way_out}", name, "unsupported_parameter")
    raise APIError(400, f"unknown parameter {name}; leave it out", name, "unknown_parameter")


def invalid(error: ValidationError) -> APIError:
    """Convert the first problem that pydantic found in a request to an APIError with its place."""
    first = error.errors()[0]
    place = first["loc"]
    if place[0] == "messages":  # pydantic adds the name of a part's type after its index
        place = (*place[:4], *place[5:])
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if first["type"] == "union_tag_invalid" and first.get("ctx", {}).get("tag") in VIDEO_PARTS:
        return APIError(400, f"{param}: {NO_VIDEOS}", param, "unsupported_content")
    message = f"{param}: {first['msg']}, found {shorten(reprlib.repr(first['input']), 80)}"
    return APIError(400, message, param, "invalid_value")


@dataclass(frozen=True)
class Choice:
    """One completion as the client sees it."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int
    """Tokens up to the end of the text, stop token and stop text included."""


@dataclass(frozen=True)
class ChatAnswer:
    """The completions of one request."""

    model: str
    choices: Sequence[Choice]
    num_prompt_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens, images included."""
        completion = sum(choice.num_tokens for choice in self.choices)
        prompt = self.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def body(self) -> dict[str, Any]:
        """Return the answer as one object."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self.choices)
        ]
        return self._head("chat.completion") | {"choices": choices, "usage": self.usage}

    def events(self, include_usage: bool) -> list[str]:
        """Return the answer as the data of server-sent events: two chunks per choice, the usage, and `[DONE]`."""
        head = self._head("chat.completion.chunk") | ({"usage": None} if include_usage else {})
        chunks = []
        for index, choice in enumerate(self.choices):
            delta = {"role": "assistant", "content": choice.text}
            for part, reason in ((delta, None), ({}, choice.finish_reason)):
                chunks.append(head | {"choices": [{"index": index, "delta": part, "finish_reason": reason}]})
        if include_usage:
            chunks.append(head | {"choices": [], "usage": self.usage})
        return [*map(json.dumps, chunks), "[DONE]"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.model,
        }  # fmt: skip
