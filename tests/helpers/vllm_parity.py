"""A tiny policy with a vLLM engine beside it, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.model.families import TokenRules
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import Forward, Group, MicroBatch, RolloutRequest, Sampling, ScoredGroup, SubGroup
from tests.helpers.builders import make_prompt, noise_image

IMAGES = [[noise_image(32, 24, seed=1)], [noise_image(48, 16, seed=2), noise_image(16, 64, seed=3)], []]
"""One image, two images of different sizes, none."""

SETTINGS: dict[str, Any] = {
    "engine": "vllm", "max_completion_length": 8, "vllm_max_model_length": 256, "max_num_seqs": 64,
}  # fmt: skip


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
    def of(checkpoint: Path, **settings: Any) -> Side:
        config = make_config(checkpoint, **settings)
        policy = load_policy(config, str(checkpoint))
        builder = PromptBuilder(load_processor(str(checkpoint), config.model, config.data), config.data)
        hf = HFEngine.for_policy(policy, builder.processor.tokenizer, config.rollout.max_num_seqs)
        requests = [RolloutRequest(f"g{i}", make_prompt(checkpoint, images)) for i, images in enumerate(IMAGES)]
        return Side(config, policy, builder, hf, requests)

    @property
    def tokens(self) -> TokenRules:
        model = self.policy.transformer
        return TokenRules.of(model.config, model.generation_config, self.builder.processor.tokenizer)

    def scores(self, groups: Sequence[Group]) -> Tensor:
        """The policy's own log-probs of all completions, behind each other."""
        scores = self.policy(Forward(batch_of(groups))).logprobs_NT
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


def batch_of(groups: Sequence[Group]) -> MicroBatch:
    def scored(group: Group) -> ScoredGroup:
        zeros = torch.zeros(len(group.completions))
        return ScoredGroup(group, zeros[:, None], zeros, zeros, valid_G=zeros == 0, has_variance=True)

    return MicroBatch([SubGroup(scored(g), list(range(len(g.completions)))) for g in groups], shared=True)


def generator_logprobs(groups: Sequence[Group]) -> Tensor:
    """What the engine says of its completions, behind each other."""
    return torch.cat([c.generator_logprobs for group in groups for c in group.completions])


def sampling(seed: int, num_generations: int = 4, temperature: float = 1.0) -> Sampling:
    return Sampling(num_generations, max_completion_length=8, temperature=temperature, seed=seed)


def token_ids(groups: Sequence[Group]) -> list[list[int]]:
    return [c.token_ids.tolist() for group in groups for c in group.completions]
