"""A tiny policy with a vLLM engine beside it, and how far apart they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.model.families import FAMILIES, TokenRules
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.types import Forward, Group, MicroBatch, RolloutRequest, Sampling, ScoredGroup, SubGroup, Video
from tests.helpers.builders import make_prompt, noise_image, sharp_checkpoint
from tests.helpers.family_parity import shares
from tests.helpers.videos import CASES, video_prompt

IMAGES = [[noise_image(32, 24, seed=1)], [noise_image(48, 16, seed=2), noise_image(16, 64, seed=3)], []]
"""One image, two images of different sizes, none."""

WIDTH = 128
"""Of the language model: most tiny models have four heads, and 32 is the smallest head that vLLM runs on CPUs."""
AGREE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm4v_moe", "glm_ocr", "exaone4_5", "llama4", "gemma3n")
"""Tiny models of which vLLM and the policy agree. Gemma 3n has no row in the table of families."""
AGREE_ON_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "glm4v_moe", "glm_ocr", "exaone4_5")
"""Tiny models of which they agree on prompts with videos."""
LOADED_ONLY = ("glm4v_moe", "llama4", "gemma3n")
"""Tiny models that agree with the weights that vLLM has loaded itself. Its CPU build packs experts and tied heads as it
loads them, and no more when weights are sent."""
BLOCK_SIZE = 32
"""Of vLLM's cache, in tokens: its smallest on CPUs."""
CHANGED = {"llama4": {"attention_chunk_size": BLOCK_SIZE}}
"""Fields of text configs that vLLM needs otherwise: a chunk has whole blocks. Prompts with images are longer."""
SETTINGS: dict[str, Any] = {
    "engine": "vllm", "max_completion_length": 8, "vllm_max_model_length": 256, "max_num_seqs": 64,
}  # fmt: skip


LONGER: dict[str, Any] = {"vllm_max_model_length": 512}


def make_config(checkpoint: Path, **settings: Any) -> RunConfig:
    """Settings by leaf."""
    values: dict[str, dict[str, Any]] = {}
    for leaf, value in ({"model_name_or_path": str(checkpoint), **SETTINGS} | settings).items():
        section, _ = FULL_NAMES[leaf].split(".")
        values.setdefault(section, {})[leaf] = value
    return RunConfig.model_validate(values)


@dataclass
class Side:
    """The trainer's side: the policy, what renders prompts, and the reference engine."""

    config: RunConfig
    policy: Policy
    builder: PromptBuilder
    hf: HFEngine
    requests: list[RolloutRequest]

    @staticmethod
    def of(checkpoint: Path, most_videos: int = 0, **settings: Any) -> Side:
        config = make_config(checkpoint, **settings)
        policy = load_policy(config, str(checkpoint))
        processor = load_processor(str(checkpoint), config.model, config.data)
        builder = PromptBuilder(processor, config.data, most_videos=most_videos)
        hf = HFEngine.for_policy(policy, builder.processor.tokenizer, config.rollout.max_num_seqs)
        requests = [RolloutRequest(f"g{i}", make_prompt(checkpoint, images)) for i, images in enumerate(IMAGES)]
        return Side(config, policy, builder, hf, requests)

    @property
    def tokens(self) -> TokenRules:
        model = self.policy.transformer
        return TokenRules.of(model.config, model.generation_config, self.builder.processor.tokenizer)

    def scores(self, groups: Sequence[Group]) -> Tensor:
        """The policy's own log-probs of all completions, behind each other."""
        scores = self.policy(Forward(batch_of(groups, shares(self.policy)))).logprobs_NT
        lengths = [len(c.token_ids) for group in groups for c in group.completions]
        return torch.cat([row[:n] for row, n in zip(scores, lengths, strict=True)])

    def update(self, groups: Sequence[Group]) -> None:
        """One large step towards the given completions."""
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        (-self.scores(groups).mean()).backward()
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= 2e-3 * parameter.grad.sign()
                parameter.grad = None


def batch_of(groups: Sequence[Group], shared: bool) -> MicroBatch:
    def scored(group: Group) -> ScoredGroup:
        zeros = torch.zeros(len(group.completions))
        return ScoredGroup(group, zeros[:, None], zeros, zeros, valid_G=zeros == 0, has_variance=True)

    return MicroBatch([SubGroup(scored(g), list(range(len(g.completions)))) for g in groups], shared)


def generator_logprobs(groups: Sequence[Group]) -> Tensor:
    """What the engine says of its completions, behind each other."""
    return torch.cat([c.generator_logprobs for group in groups for c in group.completions])


def sampling(seed: int, num_generations: int = 4, temperature: float = 1.0) -> Sampling:
    return Sampling(num_generations, max_completion_length=8, temperature=temperature, seed=seed)


def token_ids(groups: Sequence[Group]) -> list[list[int]]:
    return [c.token_ids.tolist() for group in groups for c in group.completions]


@contextmanager
def started_engine(side: Side, lora_rank: int | None = None, **others: Any) -> Iterator[VLLMEngine]:
    arguments = engine_arguments(side.config, side.config.model.model_name_or_path, lora_rank, side.builder)
    engine = VLLMEngine(arguments | others, side.tokens, side.builder)
    try:
        yield engine
    finally:
        engine.close()


def change_text_config(checkpoint: Path, fields: dict[str, Any]) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= fields
    path.write_text(json.dumps(config))


def video_requests(checkpoint: Path, most_videos: int) -> list[RolloutRequest]:
    """Requests with the prompts of all cases of videos that have at most this many in a prompt."""
    prompts = [
        (case, video_prompt(checkpoint, media, text))
        for case, several in CASES.items()
        for media, text in several
        if sum(isinstance(each, Video) for each in media) <= most_videos
    ]
    return [RolloutRequest(f"{case} {i}", prompt) for i, (case, prompt) in enumerate(prompts)]


def largest_gap(family: str, has_videos: bool = False) -> float:
    """Build a family's tiny model, and return how far vLLM's log-probs of its samples are from the policy's.

    They are compared with the weights that vLLM has loaded itself, and with those that it is sent after two updates.
    """
    most_videos = FAMILIES[family].videos_in_vllm if has_videos else 0
    num_updates = 0 if family in LOADED_ONLY else 2
    with TemporaryDirectory() as directory:
        checkpoint = sharp_checkpoint(family, Path(directory) / "model", hidden_size=WIDTH)
        change_text_config(checkpoint, CHANGED.get(family, {}))
        side = Side.of(checkpoint, most_videos, **(LONGER if has_videos else {}))
        if has_videos:
            side.requests = video_requests(checkpoint, most_videos)
        with started_engine(side, block_size=BLOCK_SIZE) as engine:
            fixed = side.hf.generate(side.requests, sampling(seed=0))
            gaps: list[float] = []
            for version in range(num_updates + 1):
                if version > 0:
                    side.update(fixed)
                    engine.sync(PolicyWeights(side.policy, "merge"), version)
                groups = engine.generate(side.requests, sampling(seed=version))
                gaps.append((generator_logprobs(groups) - side.scores(groups)).abs().max().item())
            return max(gaps)
