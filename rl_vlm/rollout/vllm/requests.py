"""Requests to vLLM, in process or as a server, and the groups that are built from its responses.

request ─ prompt ids with one placeholder per image and video, pixels ─► vLLM, n = G ─► token ids, log-probs, reason
        ─ check of prompt ids, and of the version of weights ─► Group
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import UInt8

from rewards.contract import Fault
from rl_vlm.errors import DataError, RolloutError
from rl_vlm.model.families import TokenRules
from rl_vlm.types import NO_TOKENS, Completion, Group, Prompt, RolloutRequest, Sample, Sampling

if TYPE_CHECKING:
    import numpy as np

BANNED_LOGIT = -1e6
"""Added to the logits of placeholder tokens. A list of allowed tokens would be as long as the vocabulary."""


@runtime_checkable
class PromptRenderer(Protocol):
    """The part of the prompt builder that an engine uses."""

    processor: Any

    def unexpanded_ids(self, sample: Sample) -> list[int]: ...


@dataclass(frozen=True)
class GenerateRequest:
    """One request to vLLM: for all completions of a new group, or for the rest of one paused completion."""

    rollout_request: RolloutRequest
    paused: Completion
    num_completions: int
    seed: int

    @property
    def sample(self) -> Sample:
        return self.rollout_request.prompt.sample

    @property
    def prompt(self) -> Prompt:
        return self.rollout_request.prompt

    def token_ids(self, renderer: PromptRenderer) -> list[int]:
        """Return the prompt and the completion so far, with one placeholder per image and video for vLLM to expand."""
        path = self.paused.so_far()
        ids, end = renderer.unexpanded_ids(self.sample), 0
        for place, observation in path.observations.items():
            length = len(observation.token_ids)
            observed = observation.unexpanded_ids if observation.images else observation.token_ids.tolist()
            ids, end = [*ids, *path.token_ids[end:place].tolist(), *observed], place + length
        return [*ids, *path.token_ids[end:].tolist()]

    @property
    def observed_images(self) -> list[bytes]:
        """Return the images of observations as files, in the order of their placeholders after the prompt's."""
        return [file for observation in self.paused.so_far().observations.values() for file in observation.images]

    @property
    def videos(self) -> list[tuple[UInt8[np.ndarray, "frames height width 3"], dict[str, Any]]]:
        """Return the frames of each video, with their times in the file. vLLM must not sample frames again."""
        return [(video.frames, video.metadata | {"do_sample_frames": False}) for video in self.sample.videos]

    @property
    def expected_ids(self) -> list[int]:
        """Return the tokens of the prompt and of the completion so far, which vLLM must read."""
        return [*self.prompt.token_ids.tolist(), *self.paused.so_far().token_ids.tolist()]


@dataclass(frozen=True)
class GenerateResponse:
    """vLLM's response to a request."""

    prompt_ids: list[int]
    completions: list[GeneratedTokens]


@dataclass(frozen=True)
class GeneratedTokens:
    """One completion as vLLM returns it."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[str]
    """Versions of the weights that sampled it, in order."""


def generate_requests(request: RolloutRequest, sampling: Sampling) -> list[GenerateRequest]:
    """Build the requests for one group: one if it is new, or else one per paused completion, since prompts differ.

    A completion's first tokens have the same seed in both cases.
    """
    seed = random_seed(sampling.seed, request.group_id)
    if request.partial is None:
        return [GenerateRequest(request, NO_TOKENS, sampling.num_generations, seed)]
    return [
        GenerateRequest(request, paused, 1, seed + i if not length else random_seed(sampling.seed, f"{name}/{length}"))
        for i, paused in request.paused(sampling.num_generations).items()
        for name, length in [(f"{request.group_id}/{i}", len(paused.token_ids))]
    ]


def sampling_arguments(request: GenerateRequest, sampling: Sampling, tokens: TokenRules) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams`, as JSON types."""
    num_paused = request.paused.length_so_far
    single = all(len(ids) == 1 for ids in sampling.stop_sequences)
    return {
        "n": request.num_completions,
        "max_tokens": sampling.end(num_paused) - num_paused,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "seed": request.seed,
        "stop_token_ids": [*tokens.stop, *(ids[0] for ids in sampling.stop_sequences if single)],
        "stop": [] if single else list(sampling.stop_texts),
        "ignore_eos": True,  # only the stop tokens end a completion
        "logit_bias": dict.fromkeys(tokens.banned, BANNED_LOGIT),
        "logprobs": 0,  # only the sampled token's
        "detokenize": not single,  # vLLM finds longer stops in the text
        "skip_special_tokens": False,
    }


def random_seed(seed: int, name: str) -> int:
    """Return the seed of a request's first completion, a hash of (seed, name) < 2**62. vLLM counts up from it."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def check_length(request: RolloutRequest, sampling: Sampling, limit: int) -> None:
    """Raise DataError if prompt and completion can exceed vLLM's limit. vLLM would cut the completion."""
    prompt = len(request.prompt.token_ids)
    if prompt + sampling.max_completion_length > limit:
        raise DataError(
            f"Sample {request.prompt.sample.sample_id}: {prompt} prompt tokens and up to "
            f"{sampling.max_completion_length} of a completion are more than vLLM's {limit}. Raise "
            "vllm.vllm_max_model_length, or drop such prompts with data.max_prompt_length."
        )


def to_groups(
    requests: Sequence[RolloutRequest],
    send: Callable[[list[GenerateRequest]], list[GenerateResponse]],
    sampling: Sampling,
    version: int,
    tokenizer: Any,
    run: str = "",
) -> list[Group]:
    """Send the requests for all groups to vLLM, and return the groups.

    Raises RolloutError if a response has other prompt tokens, or if other weights than the last ones sampled it.
    """
    by_group = [generate_requests(request, sampling) for request in requests]
    responses = iter(send([part for parts in by_group for part in parts]))
    groups = []
    for request, parts in zip(requests, by_group, strict=True):
        generated = [
            completion
            for part in parts
            for completion in to_completions(part, next(responses), sampling, version_label(version, run), tokenizer)
        ]
        groups.append(request.group(generated, version))
    return groups


def to_completions(
    request: GenerateRequest, response: GenerateResponse, sampling: Sampling, label: str, tokenizer: Any
) -> list[Completion]:
    """Return the completions of a response. `label` is the label of the last weights. See `to_groups` for errors."""
    check_versions(request, response, label)
    if request.paused.so_far().observations and response.prompt_ids != request.expected_ids:
        return [misread(request, response.prompt_ids)]
    check_prompt_ids(request, response.prompt_ids)
    return [to_completion(request.paused, tokens, sampling, tokenizer) for tokens in response.completions]


def to_completion(paused: Completion, generated: GeneratedTokens, sampling: Sampling, tokenizer: Any) -> Completion:
    """Append generated tokens to a paused completion. Raises RolloutError if vLLM aborted the request."""
    if generated.finish_reason not in ("stop", "length"):
        raise RolloutError(f"vLLM ended a completion with finish reason {generated.finish_reason!r}.")
    token_ids, logprobs = torch.tensor(generated.token_ids), torch.tensor(generated.logprobs)
    turn = torch.cat([paused.last_turn, token_ids])
    text = tokenizer.decode(turn, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    length = paused.length_so_far + len(token_ids)
    reason = "stop" if generated.finish_reason == "stop" else sampling.reason_at(length)
    return paused.continued(token_ids, logprobs, reason, text)


def misread(request: GenerateRequest, found: Sequence[int]) -> Completion:
    """Return the completion as a fault: vLLM has read other tokens than the trainer's.

    A sampled text can spell a placeholder, which vLLM then expands.
    """
    problem = f"vLLM reads {len(found)} tokens before a turn, the trainer {len(request.expected_ids)}, or others"
    return replace(request.paused, finish_reason="fault", fault=Fault("ids", problem), pending=None)


def check_versions(request: GenerateRequest, response: GenerateResponse, expected: str) -> None:
    """Raise RolloutError if a response comes from weights other than the `expected` version."""
    found = {version for generated in response.completions for version in generated.versions}
    if found != {expected}:
        raise RolloutError(
            f"Sample {request.sample.sample_id} was sampled by weights of version {', '.join(sorted(found))}, "
            f"but the run last sent version {expected}: another run may use the same server."
        )


def version_label(version: int, run: str = "") -> str:
    """Return the label for completions of a weight version. `run` distinguishes runs on one server."""
    return f"{run}{version}"


def check_prompt_ids(request: GenerateRequest, found: Sequence[int]) -> None:
    """Raise RolloutError if vLLM's processor and the trainer's turn the prompt and its images into different tokens."""
    expected = request.expected_ids
    if list(found) == expected:
        return
    differs = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), "the end")
    raise RolloutError(
        f"Sample {request.sample.sample_id}: vLLM reads {len(found)} prompt tokens, the trainer "
        f"{len(expected)}, and they differ from token {differs} on. Model, chat template, and pixel limits "
        "(data.min_pixels, data.max_pixels) must be the same on both sides."
    )
