"""What vLLM, in process or as a server, is asked for a group, and how its answers become one.

request ─ prompt ids with one placeholder per image, images ─► vLLM, n = G ─► token ids, log-probs, finish reason
        ─ are its prompt ids ours? its weights those of the last sync? ─► Group
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from rl_vlm.errors import DataError, RolloutError
from rl_vlm.families import TokenRules
from rl_vlm.types import UNBEGUN, Completion, Group, RolloutRequest, Sample, Sampling

BANNED_LOGIT = -1e6
"""Added to the logits of placeholder tokens. A list of allowed tokens would be as long as the vocabulary."""


@runtime_checkable
class PromptRenderer(Protocol):
    """What an engine needs of the prompt builder."""

    processor: Any

    def unexpanded_ids(self, sample: Sample) -> list[int]: ...


@dataclass(frozen=True)
class Question:
    """One request to vLLM: for the completions of a new group, or for the rest of one that was paused."""

    request: RolloutRequest
    begun: Completion
    num_completions: int
    seed: int

    @property
    def sample(self) -> Sample:
        return self.request.prompt.sample

    def token_ids(self, renderer: PromptRenderer) -> list[int]:
        """The prompt with one placeholder per image, which vLLM expands, and what there is of the completion."""
        return [*renderer.unexpanded_ids(self.sample), *self.begun.token_ids.tolist()]


@dataclass(frozen=True)
class Reply:
    """What vLLM makes of a question."""

    prompt_ids: list[int]
    answers: list[Answer]


@dataclass(frozen=True)
class Answer:
    """One completion as vLLM returns it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[str]
    """Of the weights that sampled it, in order."""


def questions(request: RolloutRequest, sampling: Sampling) -> list[Question]:
    """What vLLM is asked for one group. Paused completions have prompts, and hence questions, of their own."""
    if request.begun is None:
        seed = random_seed(sampling.seed, request.group_id)
        return [Question(request, UNBEGUN, sampling.num_generations, seed)]
    return [
        Question(request, begun, 1, random_seed(sampling.seed, f"{request.group_id}/{i}/{len(begun.token_ids)}"))
        for i, begun in request.paused(sampling.num_generations).items()
    ]


def sampling_arguments(question: Question, sampling: Sampling, tokens: TokenRules) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`, which can be written as JSON."""
    num_begun = len(question.begun.token_ids)
    return {
        "n": question.num_completions,
        "max_tokens": sampling.end(num_begun) - num_begun,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "seed": question.seed,
        "stop_token_ids": list(tokens.stop),
        "ignore_eos": True,  # the stop tokens are all that end a completion
        "logit_bias": dict.fromkeys(tokens.banned, BANNED_LOGIT),
        "logprobs": 0,  # that of the sampled token alone
        "detokenize": False,
        "skip_special_tokens": False,
    }


def random_seed(seed: int, name: str) -> int:
    """Seed of a question's first completion; vLLM counts up from it. A hash of (run seed, name), below 2**62."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def check_length(request: RolloutRequest, sampling: Sampling, limit: int) -> None:
    """Raises DataError if prompt and completion are longer than vLLM was set up for: it would cut the completion."""
    prompt = len(request.prompt.token_ids)
    if prompt + sampling.max_completion_length > limit:
        raise DataError(
            f"Sample {request.prompt.sample.sample_id}: {prompt} prompt tokens and up to "
            f"{sampling.max_completion_length} of a completion are more than vLLM's {limit}. Raise "
            "vllm.vllm_max_model_length, or drop such prompts with data.max_prompt_length."
        )


def to_groups(
    requests: Sequence[RolloutRequest],
    ask: Callable[[list[Question]], list[Reply]],
    sampling: Sampling,
    version: int,
    tokenizer: Any,
    run: str = "",
) -> list[Group]:
    """The groups of `ask`'s replies to all questions.

    Raises RolloutError if one is to another prompt, or of other weights than the last that were sent.
    """
    asked = [questions(request, sampling) for request in requests]
    replies = iter(ask([question for group in asked for question in group]))
    groups = []
    for request, group in zip(requests, asked, strict=True):
        sampled = []
        for question in group:
            reply = next(replies)
            check_prompt_ids(question, reply.prompt_ids)
            check_versions(question, reply, version_label(version, run))
            sampled += [to_completion(question.begun, answer, sampling, tokenizer) for answer in reply.answers]
        groups.append(request.group(sampled, version))
    return groups


def to_completion(begun: Completion, answer: Answer, sampling: Sampling, tokenizer: Any) -> Completion:
    """What there was of a completion, and the answer behind it. Raises RolloutError for one that vLLM gave up."""
    if answer.finish_reason not in ("stop", "length"):
        raise RolloutError(f"vLLM ended a completion with finish reason {answer.finish_reason!r}.")
    token_ids = torch.cat([begun.token_ids, torch.tensor(answer.token_ids)])
    logprobs = torch.cat([begun.generator_logprobs, torch.tensor(answer.logprobs)])
    text = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    reason = "stop" if answer.finish_reason == "stop" else sampling.reason_at(len(token_ids))
    return Completion(token_ids, logprobs, reason, text)


def check_versions(question: Question, reply: Reply, expected: str) -> None:
    """Raises RolloutError for answers by other weights than the `expected` version."""
    found = {version for answer in reply.answers for version in answer.versions}
    if found != {expected}:
        raise RolloutError(
            f"Sample {question.sample.sample_id} was sampled by weights of version {', '.join(sorted(found))}, "
            f"and the last that were sent are {expected}: another run may use the same server."
        )


def version_label(version: int, run: str = "") -> str:
    """vLLM labels what it samples with this; `run` tells runs on one server apart."""
    return f"{run}{version}"


def check_prompt_ids(question: Question, found: Sequence[int]) -> None:
    """Raises RolloutError where vLLM's processor made other tokens of the prompt and its images than ours."""
    expected = [*question.request.prompt.token_ids.tolist(), *question.begun.token_ids.tolist()]
    if list(found) == expected:
        return
    differs = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), "the end")
    raise RolloutError(
        f"Sample {question.sample.sample_id}: vLLM reads {len(found)} prompt tokens, the trainer "
        f"{len(expected)}, and they differ from token {differs} on. Model, chat template, and pixel limits "
        "(data.min_pixels, data.max_pixels) must be the same on both sides."
    )
