"""Rollouts by a model that is only served, by any endpoint of OpenAI's chat completions.

    requests ─ messages with images as data URLs ─► one POST per completion, several at once ─► text

An endpoint gives text without token ids: enough to score it, not to train on it.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch

from rl_vlm.config.schema import EvaluationConfig, RunConfig
from rl_vlm.errors import RolloutError
from rl_vlm.generation.sampling import stream_keys
from rl_vlm.images import media_type, pixel_limits, png_bytes
from rl_vlm.types import Completion, Group, Prompt, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_vlm.generation import WeightSource

API_KEY = "OPENAI_API_KEY"
RETRIED_STATUSES = {408, 409, 429, *range(500, 600)}
FIRST_PAUSE = 0.5
"""Seconds before the first retry; each further one waits twice as long."""
LONGEST_PAUSE = 60.0
LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class ServedCompletion(Completion):
    """A completion of which the text is known and the tokens are not: `token_ids` is empty."""

    num_tokens: int | None = None
    """As the server counts them; None where it does not say."""


class MessageBuilder:
    """Prompts that are sent as messages: rendered by the server, so that they have no tokens here."""

    def build(self, sample: Sample) -> Prompt:
        return Prompt(sample, torch.zeros(0, dtype=torch.int64), {}, {})


class OpenAIEngine:
    """A `RolloutEngine` on `evaluation.endpoint_url`; the model there is called `model.model_name_or_path`."""

    def __init__(self, config: RunConfig) -> None:
        self.client = ChatClient(config.evaluation)
        self.max_concurrency = config.evaluation.endpoint_max_concurrency
        self.model = config.model.model_name_or_path
        self.extensions = extensions(config)
        self.policy_version = 0

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """One group per request, in order. Raises RolloutError if an answer fails for good."""
        num = sampling.num_generations
        bodies = [body for request in requests for body in self.bodies(request, sampling)]
        sample_ids = [request.prompt.sample.sample_id for request in requests for _ in range(num)]
        with ThreadPoolExecutor(self.max_concurrency) as pool:  # an error cancels what has not begun
            completions: list[Completion] = list(map(read_answer, pool.map(self.client.post, bodies, sample_ids)))
        return [
            Group(request.group_id, request.prompt, completions[i * num : (i + 1) * num], self.policy_version)
            for i, request in enumerate(requests)
        ]

    def bodies(self, request: RolloutRequest, sampling: Sampling) -> Iterator[dict[str, Any]]:
        """One request body per completion: a seed of its own, so that a completion does not depend on `n`."""
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

    def sync(self, source: WeightSource, version: int) -> int:
        """Raises RolloutError: the weights of a served model are its own."""
        raise RolloutError("evaluation.endpoint_url serves weights of its own and cannot take over the policy's")

    def close(self) -> None:
        """Nothing is held between requests."""


def extensions(config: RunConfig) -> dict[str, Any]:
    """Settings that OpenAI's API does not have, where they are set, by vLLM's names."""
    values = {
        "top_k": config.rollout.top_k,
        "min_p": config.rollout.min_p,
        "chat_template_kwargs": config.data.chat_template_kwargs,
        "mm_processor_kwargs": pixel_limits(config.data),
    }
    return {name: value for name, value in values.items() if value}


def chat_messages(sample: Sample) -> list[dict[str, Any]]:
    """The sample's messages as the API takes them; content that is one text is sent as a string."""
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


def image_urls(sample: Sample) -> list[str]:
    """Data URLs of the sample's images: the row's own files where they are sent as they are, else PNGs."""
    files = [sample.encoded_images.get(i) or png_bytes(image) for i, image in enumerate(sample.images)]
    return [f"data:{media_type(file)};base64,{base64.b64encode(file).decode()}" for file in files]


def read_answer(answer: Any) -> ServedCompletion:
    """The completion in an answer. Raises RolloutError if there is none."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] or ""
        num_tokens = (answer.get("usage") or {}).get("completion_tokens")
    except (LookupError, TypeError, AttributeError) as error:
        raise RolloutError(
            f"the endpoint's answer is no chat completion: {json.dumps(answer)[:LONGEST_MESSAGE]}"
        ) from error
    reason = "length" if choice.get("finish_reason") == "length" else "stop"
    return ServedCompletion(torch.zeros(0, dtype=torch.int64), torch.zeros(0), reason, text, num_tokens)


class ChatClient:
    """Posts to one endpoint, again where that may help, and says what is wrong where it does not."""

    def __init__(self, evaluation: EvaluationConfig) -> None:
        self.url = f"{(evaluation.endpoint_url or '').rstrip('/')}/chat/completions"
        self.timeout = evaluation.endpoint_timeout
        self.num_tries = 1 + evaluation.endpoint_max_retries
        self.key = os.environ.get(API_KEY, "")

    def post(self, body: dict[str, Any], sample_id: str) -> Any:
        """The JSON that answers a request body. Raises RolloutError if it is refused, or fails every time."""
        problem = ""
        for attempt in range(self.num_tries):
            pause = FIRST_PAUSE * 2**attempt
            try:
                return self.send(body)
            except HTTPError as error:
                if error.code not in RETRIED_STATUSES:
                    raise RolloutError(self.refusal(error, body["model"], sample_id)) from None
                problem = f"answers with status {error.code}: {self.message(error)}"
                pause = retry_after(error, pause)
            except (OSError, http.client.HTTPException) as error:
                problem = f"cannot be reached: {getattr(error, 'reason', None) or error!r}"
            except ValueError as error:
                problem = f"answers with something else than JSON: {error}"
            if attempt + 1 < self.num_tries:
                time.sleep(min(pause, LONGEST_PAUSE))
        raise RolloutError(
            f"{self.url} {problem} ({self.num_tries} tries). Is the server running, and is evaluation.endpoint_url its "
            "address? What is finished is kept: the same command goes on from there."
        )

    def send(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = Request(self.url, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=self.timeout) as response:
            return json.loads(response.read())

    def refusal(self, error: HTTPError, model: str, sample_id: str) -> str:
        """Why a status that no retry mends came, and what to do."""
        message = self.message(error)
        if error.code in (401, 403):
            found = f"the API key in {API_KEY}" if self.key else f"a request without an API key; set {API_KEY}"
            return f"{self.url} refuses {found} (status {error.code}): {message}"
        if error.code == 404:
            return (
                f"{self.url} is not there, or does not serve {model!r} (status 404): {message}. For most servers "
                "evaluation.endpoint_url ends in /v1; model.model_name_or_path is the served model's name."
            )
        return f"{self.url} refuses the prompt of sample {sample_id} (status {error.code}): {message}"

    def message(self, error: HTTPError) -> str:
        """The start of an error's body, without the key if it is repeated there."""
        text = error.read().decode(errors="replace")
        return (text.replace(self.key, "***") if self.key else text)[:LONGEST_MESSAGE]


def retry_after(error: HTTPError, pause: float) -> float:
    """Seconds that the server asks to wait, if it does."""
    asked = error.headers.get("Retry-After", "")
    return float(asked) if asked.isdigit() else pause
