"""What the passes of a step hold beside weights, gradients and optimizer state, on one rank.

config ─ three shallow models ─ steps of two sizes on fake tensors ─► bytes of each pass, linear in the tokens
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.memory.micro_batches import Size, valid_members, why_dense
from rl_vlm.model.policy import HEAD_CHUNK_ELEMENTS
from rl_vlm.model.vision import ImageFeatures, num_patches
from rl_vlm.plan.depth import Extrapolation, with_depth
from rl_vlm.plan.fake import fake_tensors, make_fake
from rl_vlm.plan.gpu_attention import attention_as_on_gpu
from rl_vlm.plan.groups import PromptSize, make_group, make_prompt
from rl_vlm.plan.live import Phase
from rl_vlm.plan.trace import TracedTrainer, models_without_storage
from rl_vlm.types import MicroBatch, Prompt, ScoredGroup, Sharing, SubGroup

NUM_MICRO_BATCHES = 2
"""In the second micro-batch of a step all gradients are held beside its activations."""


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch of T language tokens with images of I patches: parts that are held at the same time."""

    per_token: float
    """Of the forward and backward pass of the language model, for each of its tokens."""
    fixed: float
    """Of the same pass whatever its size: the LM head's chunk of logits, recomputed layers, copies of weights."""
    per_patch: float
    """Kept of the vision tower for its backward, or its features, for each patch."""
    vision_per_patch: float
    """At most while the vision tower runs, for each patch. The language model holds nothing then."""
    logprobs_per_token: float
    """Of a pass without gradients, for old and reference log-probs."""
    logprobs_fixed: float

    @property
    def patch_price(self) -> float:
        """Language tokens that hold as much as one patch."""
        return self.per_patch / self.per_token

    def training(self, tokens: int, patches: int) -> float:
        """Return the most bytes of a forward and backward pass."""
        language = self.fixed + self.per_token * tokens + self.per_patch * patches
        return max(language, self.vision_per_patch * patches)

    def logprobs(self, tokens: int, patches: int) -> float:
        """Return the most bytes of a pass without gradients."""
        return max(self.logprobs_fixed + self.logprobs_per_token * tokens, self.vision_per_patch * patches)


def trace_activations(config: RunConfig, model_config: Any, prompt: PromptSize, on_gpu: bool) -> Activations:
    """Trace steps of three shallow models, and return the activations of the whole one.

    `model_config` is the transformers config of the model that `config` trains.
    """
    depths = Extrapolation.of(model_config)
    with attention_as_on_gpu() if on_gpu else nullcontext():
        traced = [trace_shallow(config, with_depth(model_config, depth), prompt) for depth in depths.depths()]
    values = {f.name: [getattr(each, f.name) for each in traced] for f in fields(Activations)}
    return Activations(**{name: max(0.0, depths.extrapolate(*three)) for name, three in values.items()})


def trace_shallow(config: RunConfig, model_config: Any, size: PromptSize) -> Activations:
    """Return the activations of a model, from micro-batches of two sizes."""
    length = config.rollout.max_completion_length
    # The LM head's chunks are full from the smaller size on.
    chunk = HEAD_CHUNK_ELEMENTS // model_config.get_text_config().vocab_size
    few = 1 + max(1, -(-chunk // length))
    small, large = (PassTrace.of(config, model_config, size, n) for n in (few, 2 * few))
    per_token = (large.training - small.training) / (large.tokens - small.tokens)
    logprobs_per_token = (large.logprobs - small.logprobs) / (large.logprob_tokens - small.logprob_tokens)
    return Activations(
        per_token=per_token,
        fixed=small.training - per_token * small.tokens - small.vision_kept,
        per_patch=small.vision_kept / small.patches,
        vision_per_patch=small.vision_peak / small.patches,
        logprobs_per_token=logprobs_per_token,
        logprobs_fixed=small.logprobs - logprobs_per_token * small.logprob_tokens,
    )


@dataclass(frozen=True)
class PassTrace:
    """Bytes of passes over a micro-batch of one group, and its size."""

    tokens: int
    """What the language model computes in training."""
    logprob_tokens: int
    """The same without gradients, where hybrid families share prompts."""
    patches: int
    training: int
    logprobs: int
    vision_kept: int
    vision_peak: int

    @staticmethod
    def of(config: RunConfig, model_config: Any, size: PromptSize, num_completions: int) -> PassTrace:
        """Trace a step of two micro-batches, and a pass without gradients."""
        length = config.rollout.max_completion_length
        groups = [
            make_group(make_prompt(model_config, size), num_completions, length) for _ in range(NUM_MICRO_BATCHES)
        ]
        with tempfile.TemporaryDirectory() as directory:
            model_config.save_pretrained(directory)
            policy, reference = models_without_storage(config, directory, groups)
        with fake_tensors() as live:
            make_fake(policy, *([reference.frozen] if reference and reference.frozen else []))
            trainer = WholeGroupTrainer(config, policy, reference, groups, 1, live)
            training = trainer.traced_step().phases["forward_backward"]
            trainer.add_logprobs(groups[:1], policy, "old_logprobs", StepMetrics())
            logprobs = trainer.phases["old_logprobs"]
        gradients = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
        return PassTrace(
            tokens=language_tokens(groups[0], trainer.sharing),
            logprob_tokens=language_tokens(groups[0], trainer.logprob_sharing),
            patches=num_patches(model_config, groups[0].group.prompt),
            training=training.peak - training.before - gradients,
            logprobs=logprobs.peak - logprobs.before,
            vision_kept=max(phase.after - phase.before for phase in trainer.vision_runs),
            vision_peak=max(phase.peak - phase.before for phase in trainer.vision_runs),
        )


class WholeGroupTrainer(TracedTrainer):
    """Puts every group into a micro-batch of its own, and notes the bytes of the vision tower's runs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.vision_runs: list[Phase] = []
        run = self.policy.vision.run

        def traced(prompts: Sequence[Prompt]) -> dict[Prompt, ImageFeatures]:
            with self.live.phase() as phase:
                self.vision_runs.append(phase)
                return run(prompts)

        self.policy.vision.run = traced

    def pack(
        self, groups: Sequence[ScoredGroup], sharing: Sharing, spare: ScoredGroup, together: bool
    ) -> list[MicroBatch]:
        """Return one micro-batch per group."""
        shared = why_dense(groups[0], sharing) is None
        return [MicroBatch([SubGroup(group, valid_members(group))], shared) for group in groups]


def language_tokens(group: ScoredGroup, sharing: Sharing) -> int:
    """Return the tokens that the language model computes for a group."""
    return Size.of(group, valid_members(group)).tokens(shared=why_dense(group, sharing) is None)
