"""The policy as a function from micro-batches to log-probs and entropies of N completions.

MicroBatch ─ shared_inputs | dense_inputs, image features ─► forward of the language model ─► hidden states
           ─ predictors of completion tokens ─► LM head in chunks ─► PolicyOutput
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rl_vlm.distributed.shards import local_part
from rl_vlm.model.body import run_body
from rl_vlm.model.family import Family
from rl_vlm.model.head import Head, chunked_scores, head_function
from rl_vlm.model.layout import check_completions, dense_inputs, own_inputs, shared_inputs
from rl_vlm.model.offloading import ActivationOffloading
from rl_vlm.model.shared_prefix import attention_layout, setting_of
from rl_vlm.model.softcap import final_logits, with_soft_cap
from rl_vlm.model.vision import FeatureCache, VisionEncoder
from rl_vlm.types import Forward, MicroBatch, PolicyOutput, Prompt, Rendered, TowerBackward, pad_split, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Policy(nn.Module):
    """A vision-language model that computes log-probs of completions. accelerate wraps this module for training."""

    def __init__(
        self,
        model: nn.Module,
        family: Family,
        temperature: float,
        compute_dtype: torch.dtype,
        idle_prompt: Prompt | None = None,
        features: FeatureCache | None = None,
        offloads_activations: bool = False,
        fused: bool = False,
    ) -> None:
        """`model` is a transformers model, or a PEFT model around one. `compute_dtype` is the autocast precision.

        `idle_prompt` has an image, for idle runs of the vision tower. `features` is the cache of another policy with
        the same frozen vision tower. `offloads_activations` keeps activations in host memory. With `fused`,
        elementwise operations of the LM head are compiled on CUDA.
        """
        super().__init__()
        self.model: Any = model
        self.family = family
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.banned_token_ids = family.banned_token_ids(self.transformer.config)
        self.offloads_activations = offloads_activations
        self.fused = fused
        self.counters: Counter[str] = Counter()
        cache = FeatureCache() if features is None else features
        self.vision = VisionEncoder(self.transformer, family, self.counters, idle_prompt, cache)

    @property
    def transformer(self) -> PreTrainedModel:
        """Return the transformers model, below any adapter."""
        return base_model(self.model)

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    def trains_on(self, rendered: Sequence[Rendered]) -> bool:
        """Return whether a forward of these uses a trained weight. Without images it does not use the tower."""
        return self.trains_text or any(each.mm_inputs for each in rendered)

    @cached_property
    def trains_text(self) -> bool:
        model = self.transformer
        prefixes = self.family.image_prefixes(model.config)
        return any(p.requires_grad and not name.startswith(prefixes) for name, p in model.named_parameters())

    def nonfinite_weights(self) -> list[str]:
        """Return the names of trained weights with a value that is not finite, in this rank's shards."""
        trained = {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}
        finite = torch.stack([local_part(weight).isfinite().all() for weight in trained.values()]).tolist()
        return [name for name, is_finite in zip(trained, finite, strict=True) if not is_finite]

    @contextmanager
    def autocast(self, keeps_casts: bool = True) -> Iterator[None]:
        """Run the block under autocast to `compute_dtype`. Weights keep their dtype.

        With `keeps_casts`, the cast copies of all weights live until the end of the block, for blocks of many forwards.
        """
        enabled = self.compute_dtype != torch.float32
        with torch.autocast(self.device.type, self.compute_dtype, enabled, cache_enabled=keeps_casts):
            yield

    def start_step(self) -> None:
        """Clear the counters and the image features of the last optimizer step."""
        self.counters.clear()
        self.vision.clear()

    def mark(self) -> Callable[[], None]:
        """Return a function that resets counters and caches to their state at this call."""
        counters, known = self.counters.copy(), set(self.vision.features.by_digest)

        def go_back() -> None:
            self.counters.clear()
            self.counters.update(counters)
            self.vision.features.keep_only(known)
            self.vision.kept.clear()

        return go_back

    def forward(self, work: Forward | TowerBackward) -> PolicyOutput | Tensor:
        """Call `score` for a forward, or `VisionEncoder.kept_loss` for a separate backward pass of the vision tower.

        Training calls both through this method, since accelerate wraps only `forward`.
        """
        if isinstance(work, Forward):
            return self.score(work)
        with self.autocast(keeps_casts=False), self.offloading():
            return self.vision.kept_loss(work.rendered)

    def offloading(self) -> AbstractContextManager[Any]:
        """Return a context that keeps activations in host memory, if `offloads_activations` is set."""
        return ActivationOffloading(self.device) if self.offloads_activations else nullcontext()

    def score(self, work: Forward) -> PolicyOutput:
        """Compute log-probs of a micro-batch's completions at the sampling temperature, and detached entropies.

        Raises ModelError if a completion is invalid (`check_completions`), or if images and placeholder tokens do not
        match.
        """
        batch = work.batch
        check_completions(batch, self.family, self.banned_token_ids)
        with self.autocast(keeps_casts=False), self.offloading():
            # Idle runs of the vision tower come first, like real ones: ranks gather sharded weights in one order.
            self.vision.keep(batch, work.before)
            num_idle = 0 if batch.own_forward else work.within - len(self.vision.calls(batch.rendered))
            idle = self.vision.idle(num_idle)
            output = self.output_of_rows(batch) + idle
        self.count(batch)
        targets = to_device(torch.cat([c.token_ids for c in batch.completions]), self.device)
        scores = self.own_logprobs if batch.own_forward else self.logprobs
        logprobs, entropies = scores(output, targets)
        lengths = [len(c.token_ids) for c in batch.completions]
        return PolicyOutput(pad_split(logprobs, lengths), pad_split(entropies, lengths))

    def output_of_rows(self, batch: MicroBatch) -> Float[Tensor, "scored values"]:
        """Run one forward. Return the hidden states that predict completion tokens, or the model's own logits."""
        inputs = own_inputs if batch.own_forward else shared_inputs if batch.shared else dense_inputs
        rows = inputs(batch, self.family, self.transformer)
        features = {} if batch.own_forward else self.vision.encode(rows.rendered)
        images = [features[each] for each in rows.rendered if each in features]
        with attention_layout(rows.layout), self.vision.given(images) as image_inputs:
            kwargs = rows.kwargs | image_inputs
            if batch.own_forward:
                output = self.own_logits(kwargs, rows.predictor_index)
            else:
                hidden, _ = run_body(self.transformer, **kwargs, use_cache=False)
                output = hidden.flatten(0, 1)[rows.predictor_index]
        self.counters["computed_tokens"] += rows.kwargs["input_ids"].numel()
        self.counters["prefix_tokens"] += rows.num_prefix_tokens
        return output

    def own_logits(
        self, kwargs: dict[str, Any], predictor_index: Int[Tensor, " scored"]
    ) -> Float[Tensor, "scored vocabulary"]:
        """Compute the logits of the model's own forward for one row, which uses its own LM head.

        Only the last logits of the row are computed if the forward can do so, since a vocabulary is large.
        """
        model = self.transformer
        from_end = predictor_index - kwargs["input_ids"].shape[-1]
        keeps = "logits_to_keep" in signature(model.forward).parameters
        kept = {"logits_to_keep": -int(from_end.min())} if keeps else {}
        logits = model(**kwargs, **kept, use_cache=False).logits[0, from_end]
        return with_soft_cap(logits, model) if self.family.omits_soft_cap else logits

    def own_logprobs(
        self, logits: Float[Tensor, "scored vocabulary"], targets: Int[Tensor, " scored"]
    ) -> tuple[Float[Tensor, " scored"], Float[Tensor, " scored"]]:
        """Compute log-probs of `targets` and entropies from logits, after temperature and bans."""
        head = Head(lambda given: given, self.temperature, self.banned_tokens(logits.device))
        logprobs, entropies, _ = head.scores([logits], targets)
        return logprobs, entropies

    def banned_tokens(self, device: torch.device) -> Int[Tensor, " banned"]:
        return to_device(torch.tensor(self.banned_token_ids, dtype=torch.int64), device)

    def logprobs(
        self, hidden: Float[Tensor, "scored hidden"], targets: Int[Tensor, " scored"]
    ) -> tuple[Float[Tensor, " scored"], Float[Tensor, " scored"]]:
        """Compute log-probs of `targets` and entropies of the sampling distribution, after temperature and bans."""
        module: Any = self.transformer.get_output_embeddings()
        product, weights = head_function(module, None if self.compute_dtype == torch.float32 else self.compute_dtype)

        def logits(*inputs: Tensor | None) -> Tensor:
            with self.autocast():
                return final_logits(product(*inputs), self.transformer)

        head = Head(logits, self.temperature, self.banned_tokens(hidden.device), self.fused and hidden.is_cuda)
        return chunked_scores(head, weights, hidden, targets, vocabulary=module.weight.shape[0])

    def count(self, batch: MicroBatch) -> None:
        """Count the forward, and the tokens that the language model would compute with and without sharing."""
        completions = sum(completion.num_tokens for completion in batch.completions)
        unique = sum(len(subgroup.prompt.token_ids) for subgroup in batch.subgroups) + completions
        rows = [sum(len(completion.path_lengths) for completion in s.completions) for s in batch.subgroups]
        dense = completions + sum(len(s.prompt.token_ids) * num for s, num in zip(batch.subgroups, rows, strict=True))
        self.counters["shared_forwards" if batch.shared else "dense_forwards"] += 1
        if batch.dense_reason:
            self.counters[f"dense_forwards/{batch.dense_reason}"] += 1
        if batch.shared and setting_of(self.transformer) == "sdpa":
            self.counters["shared_forwards/two_calls"] += 1
        self.counters["unique_tokens"] += unique
        self.counters["dense_tokens"] += dense


def base_model(model: Any) -> PreTrainedModel:
    """Return the transformers model below an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
