"""Rollouts from any endpoint with OpenAI's chat completions API.

    requests ─ messages with images as data URLs ─► one POST per completion, several at once ─► text

An endpoint returns text without token ids: it can be scored, but not trained on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from rewards import http
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.frames import frames_as_images
from rl_vlm.data.images import image_urls, pixel_limits
from rl_vlm.errors import RolloutError, shorten
from rl_vlm.rollout.engine import RolloutEngine, WeightSource
from rl_vlm.rollout.sampling import stream_keys
from rl_vlm.rollout.waiting import run
from rl_vlm.types import Completion, Group, Prompt, RolloutRequest, Sample, Sampling, ServedCompletion, Video

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image

API_KEY = "OPENAI_API_KEY"
LONGEST_PAUSE = 60.0
"""Maximum seconds before a retry."""


class MessageBuilder:
    """Builds prompts without tokens, since the server renders the messages. It gets frames of videos as images."""

    def build(self, sample: Sample) -> Prompt:
        return Prompt(frames_as_images(sample), torch.zeros(0, dtype=torch.int64), {}, {})

    def media_inputs(self, media: Sequence[Image | Video]) -> dict[str, torch.Tensor]:
        """Return no inputs, since the server makes its own."""
        return {}


class OpenAIEngine(RolloutEngine):
    """Samples from `evaluation.endpoint_url`, which serves a model named `model.model_name_or_path`."""

    def __init__(self, config: RunConfig) -> None:
        self.url = f"{(config.evaluation.endpoint_url or '').rstrip('/')}/chat/completions"
        self.key = os.environ.get(API_KEY, "")
        self.timeout = config.evaluation.endpoint_timeout
        self.max_retries = config.evaluation.endpoint_max_retries
        self.max_concurrency = config.evaluation.endpoint_max_concurrency
        self.model = config.model.model_name_or_path
        self.extensions = extensions(config)
        self.policy_version = 0
        self.counters: Counter[str] = Counter()

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group per request, in order. Raises RolloutError if a request is refused or every try fails."""
        num = sampling.num_generations
        bodies = [body for request in requests for body in self.bodies(request, sampling)]
        sample_ids = [request.prompt.sample.sample_id for request in requests for _ in range(num)]
        with ThreadPoolExecutor(self.max_concurrency) as pool:  # an error cancels requests that have not begun
            completions: list[Completion] = list(map(read_completion, pool.map(self.post, bodies, sample_ids)))
        return [
            Group(request.group_id, request.prompt, completions[i * num : (i + 1) * num], self.policy_version)
            for i, request in enumerate(requests)
        ]

    def bodies(self, request: RolloutRequest, sampling: Sampling) -> Iterator[dict[str, Any]]:
        """Yield one request body per completion. Each has its own seed, so it does not depend on the number of them."""
        body = {
            "model": self.model,
            "messages": chat_messages(request.prompt.sample),
            "max_tokens": sampling.max_completion_length,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            **self.extensions,
        }
        if request.prompt.sample.messages[-1]["role"] == "assistant":
            body |= {"add_generation_prompt": False, "continue_final_message": True}
        for key in stream_keys(sampling.seed, request.group_id, sampling.num_generations).tolist():
            yield body | {"seed": key % 2**31}  # the range that every server takes

    def post(self, body: dict[str, Any], sample_id: str) -> Any:
        """Post a request and return the answer's JSON. Raises RolloutError if it is refused or every try fails."""
        try:
            return run(http.post(self.url, self.key, body, self.timeout, self.max_retries, LONGEST_PAUSE))
        except http.RequestError as error:
            raise RolloutError(f"{self.url} {self.explanation(error, sample_id)}") from None

    def explanation(self, error: http.RequestError, sample_id: str) -> str:
        """Explain why a request failed for good, and how to fix the cause."""
        told = f"(status {error.status}): {error.shown}"
        if error.may_help:
            cause = f": {error.__cause__}" if error.__cause__ and not error.detail else ""
            return (
                f"{error}{cause} ({1 + self.max_retries} tries). Is the server running, and is evaluation.endpoint_url "
                "its address? Finished samples are kept: the same command resumes the evaluation."
            )
        if error.status in (401, 403):
            found = f"the API key in {API_KEY}" if self.key else f"a request without an API key; set {API_KEY}"
            return f"refuses {found} {told}"
        if error.status == 404:
            return (
                f"is not there, or does not serve {self.model!r} {told}. For most servers evaluation.endpoint_url "
                "ends in /v1; model.model_name_or_path is the served model's name."
            )
        return f"refuses the prompt of sample {sample_id} {told}" if error.status else f"{error} to sample {sample_id}"

    def sync(self, source: WeightSource, version: int) -> int:
        """Raise RolloutError: an endpoint cannot load the policy's weights."""
        raise RolloutError("evaluation.endpoint_url serves weights of its own and cannot take over the policy's")


def extensions(config: RunConfig) -> dict[str, Any]:
    """Return the settings outside of OpenAI's API, by vLLM's names, as far as they are set."""
    values = {
        "top_k": config.rollout.top_k,
        "min_p": config.rollout.min_p,
        "chat_template_kwargs": config.data.chat_template_kwargs,
        "mm_processor_kwargs": pixel_limits(config.data),
    }
    return {name: value for name, value in values.items() if value}


def chat_messages(sample: Sample) -> list[dict[str, Any]]:
    """Convert the sample's messages to the API's format. Content of a single text becomes a string."""
    urls = iter(image_urls(sample))

    def part(block: dict[str, Any]) -> dict[str, Any]:
        if block["type"] == "image":
            return {"type": "image_url", "image_url": {"url": next(urls)}}
        return {"type": "text", "text": block["text"]}

    messages = []
    for message in sample.messages:
        parts = [part(block) for block in message["content"]]
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        messages.append({"role": message["role"], "content": parts[0]["text"] if is_text else parts})
    return messages


def read_completion(answer: Any) -> ServedCompletion:
    """Read the completion of an answer. Raises RolloutError if there is none."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""
        num_tokens = (answer.get("usage") or {}).get("completion_tokens")
    except (LookupError, TypeError, AttributeError) as error:
        raise RolloutError(f"the endpoint's answer is no chat completion: {shorten(json.dumps(answer))}") from error
    reason = "length" if choice.get("finish_reason") == "length" else "stop"
    return ServedCompletion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), reason, text, reported_tokens=num_tokens)
