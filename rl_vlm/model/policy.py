"""The policy as a function from micro-batches to log-probs and entropies of N completions.

MicroBatch ─ shared_inputs | dense_inputs, image features ─► forward of the language model ─► hidden states
           ─ predictors of completion tokens ─► LM head in chunks ─► PolicyOutput
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_vlm.distributed.shards import local_part
from rl_vlm.model.families import Family
from rl_vlm.model.layout import check_completions, dense_inputs, shared_inputs
from rl_vlm.model.offloading import ActivationOffloading
from rl_vlm.model.shared_prefix import shared_row
from rl_vlm.model.softcap import final_logits
from rl_vlm.model.vision import FeatureCache, VisionEncoder
from rl_vlm.types import Forward, MicroBatch, PolicyOutput, Prompt, TowerBackward, pad_rows, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_CHUNK_ELEMENTS = 2**26
"""Number of logits (tokens per chunk x vocabulary) that the LM head computes at once: 256 MiB in float32."""


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
    ) -> None:
        """`model` is a transformers model, or a PEFT model around one. `compute_dtype` is the autocast precision.

        `idle_prompt` has an image, for idle runs of the vision tower. `features` is the cache of another policy with
        the same frozen vision tower. `offloads_activations` keeps activations in host memory.
        """
        super().__init__()
        self.model: Any = model
        self.family = family
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.banned_token_ids = family.banned_token_ids(self.transformer.config)
        self.offloads_activations = offloads_activations
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

    def trains_on(self, prompt: Prompt) -> bool:
        """Return whether a forward of the prompt uses a trained weight. Without images it does not use the tower."""
        return bool(prompt.mm_inputs) or self.trains_text

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
        counters, known = self.counters.copy(), list(self.vision.features)

        def go_back() -> None:
            self.counters.clear()
            self.counters.update(counters)
            for prompt in set(self.vision.features) - set(known):
                del self.vision.features[prompt]
            self.vision.kept.clear()

        return go_back

    def forward(self, work: Forward | TowerBackward) -> PolicyOutput | Tensor:
        """Call `score` for a forward, or `VisionEncoder.kept_loss` for a separate backward pass of the vision tower.

        Training calls both through this method, since accelerate wraps only `forward`.
        """
        if isinstance(work, Forward):
            return self.score(work)
        with self.autocast(keeps_casts=False), self.offloading():
            return self.vision.kept_loss(work.prompt)

    def offloading(self) -> AbstractContextManager[Any]:
        """Return a context that keeps activations in host memory, if `offloads_activations` is set."""
        return ActivationOffloading(self.device) if self.offloads_activations else nullcontext()

    def score(self, work: Forward) -> PolicyOutput:
        """Compute log-probs of a micro-batch's completions at the sampling temperature, and detached entropies.

        Raises ModelError if a completion is invalid (`check_completions`), or if images and placeholder tokens do not
        match.
        """
        batch = work.batch
        check_completions(batch, self.banned_token_ids)
        with self.autocast(keeps_casts=False), self.offloading():
            # Idle runs of the vision tower come first, like real ones: ranks gather sharded weights in one order.
            self.vision.keep(batch, work.before)
            num_idle = work.within - len(self.vision.calls([subgroup.prompt for subgroup in batch.subgroups]))
            idle = self.vision.idle(num_idle)
            hidden = self.hidden_of_rows(batch) + idle
        self.count(batch)
        targets = to_device(torch.cat([c.token_ids for c in batch.completions]), self.device)
        logprobs, entropies = self.logprobs(hidden, targets)
        lengths = [len(c.token_ids) for c in batch.completions]
        return PolicyOutput(pad_rows(logprobs.split(lengths)), pad_rows(entropies.split(lengths)))

    def hidden_of_rows(self, batch: MicroBatch) -> Float[Tensor, "scored hidden"]:
        """Run one forward and return the hidden states that predict completion tokens."""
        rows = (shared_inputs if batch.shared else dense_inputs)(batch, self.family, self.transformer)
        features = self.vision.encode(rows.prompts)
        images = [features[prompt] for prompt in rows.prompts if prompt in features]
        with shared_row(rows.layout), self.vision.given(images) as image_inputs:
            output = self.transformer.base_model(**rows.kwargs, **image_inputs, use_cache=False)
        self.counters["computed_tokens"] += rows.kwargs["input_ids"].numel()
        self.counters["prefix_tokens"] += sum(len(prompt.token_ids) for prompt in rows.prompts)
        return output.last_hidden_state.flatten(0, 1)[rows.predictor_index]

    def logprobs(
        self, hidden: Float[Tensor, "scored hidden"], targets: Int[Tensor, " scored"]
    ) -> tuple[Float[Tensor, " scored"], Float[Tensor, " scored"]]:
        """Compute log-probs of `targets` and entropies, in fp32. The backward pass recomputes each chunk's logits.

        The head's weights are cast to the compute dtype once for all chunks. The random state is not restored for the
        recomputation, since a reward function may draw random numbers meanwhile.
        """
        module: Any = self.transformer.get_output_embeddings()
        head = head_function(module, None if self.compute_dtype == torch.float32 else self.compute_dtype)
        chunk_size = max(1, HEAD_CHUNK_ELEMENTS // module.weight.shape[0])
        banned = to_device(torch.tensor(self.banned_token_ids, dtype=torch.int64), hidden.device)
        scores = [
            checkpoint(self.chunk_logprobs, head, h, t, banned, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
        ]
        logprobs, entropies = zip(*scores, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def chunk_logprobs(
        self, head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, banned: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies of the sampling distribution, after temperature and token bans."""
        with self.autocast():
            logits = final_logits(head(hidden), self.transformer.config)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.temperature == 1 else logits / self.temperature
        logits.index_fill_(-1, banned, torch.finfo(logits.dtype).min)
        log_normalizer = logits.logsumexp(-1)
        with torch.no_grad():  # entropies are used in a metric and a threshold, never in a loss
            expected_logit = torch.einsum("nv,nv->n", (logits - log_normalizer[:, None]).exp_(), logits)
            entropies = log_normalizer - expected_logit
        return logits.gather(-1, targets[:, None])[:, 0] - log_normalizer, entropies

    def count(self, batch: MicroBatch) -> None:
        """Count the forward, and the tokens that the language model would compute with and without sharing."""
        completions = sum(len(c.token_ids) for c in batch.completions)
        unique = sum(len(subgroup.prompt.token_ids) for subgroup in batch.subgroups) + completions
        dense = sum(len(s.prompt.token_ids) * len(s.members) for s in batch.subgroups) + completions
        self.counters["shared_forwards" if batch.shared else "dense_forwards"] += 1
        if batch.dense_reason:
            self.counters[f"dense_forwards/{batch.dense_reason}"] += 1
        self.counters["unique_tokens"] += unique
        self.counters["dense_tokens"] += dense


def head_function(head: Any, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Return the LM head as a function of hidden states. A plain head computes in `dtype`, if given.

    A plain head is not called as a module, since ranks that shard it must call modules equally often but have
    different numbers of chunks.
    """
    if not is_plain_head(head):
        return head
    if dtype is None or head.weight.dtype == dtype:
        return lambda hidden: F.linear(hidden, head.weight, head.bias)
    cast = head.weight.detach().to(dtype)

    def product(hidden: Tensor) -> Tensor:
        logits = CastLinear.apply(hidden.to(dtype), head.weight, cast)
        return logits if head.bias is None else logits + head.bias.to(dtype)

    return product


class CastLinear(torch.autograd.Function):
    """A product with weights that are already cast.

    As under autocast, each product's gradient is cast back before gradients are added.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, cast)
        ctx.dtype = weight.dtype
        return F.linear(hidden, cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, cast = ctx.saved_tensors
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        (gradient,) = gradients
        of_hidden = gradient @ cast if needs_hidden else None
        return of_hidden, (gradient.T @ hidden).to(ctx.dtype) if needs_weight else None, None


def is_plain_head(head: Any) -> bool:
    """Return whether an LM head is just a matrix product, without an adapter for example."""
    return type(head) is nn.Linear


def base_model(model: Any) -> PreTrainedModel:
    """Return the transformers model below an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
