"""Activations of a step: bytes that its passes add to weights, gradients and optimizer state, on one rank.

config ─ three shallow models ─ steps of two sizes on fake tensors ─► bytes of each pass, linear in the tokens
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.head import HEAD_CHUNK_ELEMENTS
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.model.vision import num_patches
from rl_vlm.passes.micro_batches import training_tokens
from rl_vlm.passes.peaks import Block, Peaks
from rl_vlm.plan.tracing.depth import Extrapolation, with_depth
from rl_vlm.plan.tracing.fake import fake_tensors
from rl_vlm.plan.tracing.gpu_attention import attention_as_on_gpu
from rl_vlm.plan.tracing.groups import make_group
from rl_vlm.plan.tracing.live import LiveBytes
from rl_vlm.plan.tracing.step import TracedSteps, make_models_fake, models_without_storage
from rl_vlm.stages import Stage
from rl_vlm.types import Prompt, ScoredGroup

FEW, MANY = 16, 64
"""Maximum completions of the smaller and of the larger traced micro-batch."""
MOST_TOKENS = 2**15
"""Largest `micro_batch_tokens` that `auto` chooses. It leaves memory free for usage that the plan does not count."""
WHOLE_GROUP = sys.maxsize
"""A token budget that cuts no group."""


@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch, as a linear function of its language tokens and image patches."""

    per_token: float
    """Bytes of the language model's forward and backward pass, per token."""
    fixed: float
    """Bytes of this pass that do not depend on its size: the LM head's chunk of logits, recomputed layers, and copies
    of weights. The vision tower's copies are included."""
    per_patch: float
    """Bytes that the vision tower keeps for its backward, per patch. If it is frozen, they are its features alone."""
    vision_per_patch: float
    """Peak bytes while the vision tower runs, per patch. The language model holds nothing then."""
    logprobs_per_token: float
    """Bytes of a pass without gradients, for old and reference log-probs, per token."""
    logprobs_fixed: float
    layers_per_token: float = 0.0
    """Share of `per_token` that all language layers but one keep for their backward. It can move to host memory."""
    layers_per_patch: float = 0.0
    """The same share of `per_patch`, for vision layers."""
    vision_fixed: float = 0.0
    """Peak bytes while the vision tower runs that do not depend on the images: copies of its weights."""

    @property
    def patch_price(self) -> float:
        """Return the number of language tokens that hold as many bytes as one patch."""
        return self.per_patch / self.per_token

    def vision(self, patches: int) -> float:
        """Return the peak bytes while the vision tower runs."""
        return self.vision_fixed + self.vision_per_patch * patches if patches else 0.0

    def offloaded(self) -> Activations:
        """Return the activations that `activation_offloading` leaves on the device, for one layer of each part."""
        return replace(
            self,
            per_token=self.per_token - self.layers_per_token,
            per_patch=self.per_patch - self.layers_per_patch,
            vision_per_patch=max(0.0, self.vision_per_patch - self.layers_per_patch),
        )


def trace_activations(config: RunConfig, model_config: Any, prompt: Prompt, on_gpu: bool) -> Activations:
    """Trace steps of three shallow models, and extrapolate the activations to the whole model.

    `model_config` is the transformers config of the model that `config` trains. `prompt` is one of its prompts.
    """
    depths = Extrapolation.of(model_config)
    in_one_call = on_gpu and config.memory.shared_attention != "sdpa"
    with attention_as_on_gpu() if in_one_call else nullcontext():
        found = {d: trace_shallow(config, with_depth(model_config, d), prompt) for d in dict.fromkeys(depths.depths())}
    traced = [found[depth] for depth in depths.depths()]
    values = {f.name: [getattr(each, f.name) for each in traced] for f in fields(Activations)}
    whole = Activations(**{name: max(0.0, depths.extrapolate(*three)) for name, three in values.items()})
    layers = {part: max(0.0, depths.beyond_one_layer(*values[part])) for part in ("per_token", "per_patch")}
    found = replace(whole, layers_per_token=layers["per_token"], layers_per_patch=layers["per_patch"])
    return found.offloaded() if config.memory.activation_offloading else found


def trace_shallow(config: RunConfig, model_config: Any, prompt: Prompt) -> Activations:
    """Trace micro-batches of two sizes, and return the activations of the model.

    The larger has as many tokens as any micro-batch, unless completions are short. The peaks of the two may occur at
    different moments, such as the LM head and a layer. The line through both is then above the true peak in between.
    """
    length = config.rollout.max_completion_length
    # The LM head's chunks are full from the smaller size on, unless the vocabulary is small.
    chunk = HEAD_CHUNK_ELEMENTS // model_config.get_text_config().vocab_size
    few = min(1 + max(1, -(-chunk // length)), FEW)
    many = max(2 * few, min(MANY, -(-(MOST_TOKENS - len(prompt.token_ids)) // length)))
    groups = [make_group(replace(prompt), n, length) for n in (few, many)]
    with tempfile.TemporaryDirectory() as directory:
        model_config.save_pretrained(directory)
        models = models_without_storage(config, directory, groups)
    with fake_tensors() as live:
        make_models_fake(*models)
        small, large = (PassTrace.of(config, *models, group, live) for group in groups)
        vision = VisionBytes.of(models[0], prompt, live)
    per_token = (large.training - small.training) / (large.tokens - small.tokens)
    logprobs_per_token = (large.logprobs - small.logprobs) / (large.tokens - small.tokens)
    return Activations(
        per_token=per_token,
        fixed=small.training - per_token * small.tokens - vision.kept_per_patch * small.patches,
        per_patch=vision.kept_per_patch,
        vision_per_patch=vision.peak_per_patch,
        vision_fixed=vision.peak_fixed,
        logprobs_per_token=logprobs_per_token,
        logprobs_fixed=small.logprobs - logprobs_per_token * small.tokens,
    )


@dataclass(frozen=True)
class PassTrace:
    """The size of a micro-batch of one group, and the bytes that passes over it add to weights and gradients."""

    tokens: int
    """Tokens that the language model computes."""
    patches: int
    training: int
    logprobs: int

    @staticmethod
    def of(
        config: RunConfig,
        policy: Policy,
        reference: Reference | None,
        group: ScoredGroup,
        live: LiveBytes,
    ) -> PassTrace:
        """Trace a step whose last micro-batch is the group. Then trace a pass over it without gradients."""
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)  # of earlier micro-batches
        steps = TracedSteps(config, policy, reference, [group], 1, live, WHOLE_GROUP)
        training = steps.take()[Stage.TRAINING]
        trainer = steps.trainer
        trainer.add_logprobs(Stage.OLD_LOGPROBS, policy, [group], StepMetrics(trainer.stages))
        logprobs = steps.peaks.take()[Stage.OLD_LOGPROBS]
        return PassTrace(
            tokens=training_tokens(group, trainer.passes.sharing),
            patches=num_patches(policy.transformer.config, group.group.prompt),
            training=training.peak - training.before,
            logprobs=logprobs.peak - logprobs.before,
        )


@dataclass(frozen=True)
class VisionBytes:
    """Bytes of a run of the vision tower."""

    kept_per_patch: float = 0.0
    """Bytes that stay after a run for its backward. If the tower is frozen, they are its features alone."""
    peak_per_patch: float = 0.0
    peak_fixed: float = 0.0

    @staticmethod
    def of(policy: Policy, prompt: Prompt, live: LiveBytes) -> VisionBytes:
        """Trace runs on the prompt's images once and twice. The part that does not grow is fixed.

        If the family does not join images, the tower runs for each prompt alone, and all bytes count per patch.
        """
        patches = num_patches(policy.transformer.config, prompt)
        if patches == 0:
            return VisionBytes()
        once = trace_vision(policy, [prompt], live)
        peak, kept = once.peak - once.before, once.after - once.before
        if not policy.family.joins_images:
            return VisionBytes(kept / patches, peak / patches)
        twice = trace_vision(policy, [prompt, replace(prompt)], live)
        more_peak, more_kept = twice.peak - twice.before - peak, twice.after - twice.before - kept
        return VisionBytes(more_kept / patches, more_peak / patches, float(max(0, peak - more_peak)))


def trace_vision(policy: Policy, prompts: Sequence[Prompt], live: LiveBytes) -> Block:
    """Trace a run of the vision tower as in training."""
    trained = not policy.vision.is_frozen
    with policy.autocast(keeps_casts=False), policy.offloading(), torch.set_grad_enabled(trained):
        with Peaks(live).block() as block:
            features = policy.vision.run(prompts)
        del features
    return block
