"""The memory plan of a run: bytes of each rank in each stage, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_vlm.distributed.shardings import Sharding
from rl_vlm.plan.hardware import Card
from rl_vlm.plan.sharding import gathered_bytes, held_gradients, held_reference, held_state, held_weights, update_bytes
from rl_vlm.plan.tracing.activations import Activations
from rl_vlm.plan.weights import Weights
from rl_vlm.stages import Stage

KV_CACHE = "KV cache"


@dataclass(frozen=True)
class Phase:
    """Bytes of one rank's device in a stage of a run, by part."""

    name: str
    """The stage."""
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Rollouts:
    """Memory of the rollout engine on a rank's device."""

    while_sampling: dict[str, int]
    """Bytes by part during a rollout."""
    while_training: int
    """Bytes that vLLM keeps during training."""
    in_host_memory: int = 0
    """Bytes of sleeping weights. Weights that are sent before every rollout are not kept."""
    can_start: bool = True
    """Whether vLLM's fraction of the card holds its weights and one sequence. Otherwise vLLM does not start."""

    @property
    def while_syncing(self) -> dict[str, int]:
        """Return the bytes while weights are sent. If vLLM sleeps during training, its cache is not allocated yet."""
        sleeps = self.while_training < sum(self.while_sampling.values())
        return {name: size for name, size in self.while_sampling.items() if not (sleeps and name == KV_CACHE)}


@dataclass(frozen=True)
class Load:
    """The size of a micro-batch."""

    tokens: int
    """Language tokens."""
    patches: int
    """Patches of images."""


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of one rank. All ranks have the same plan."""

    card: Card
    num_ranks: int
    sharding: Sharding
    optim: str
    weights: Weights
    activations: Activations
    rollouts: Rollouts
    micro_batch_tokens: int
    load: Load
    patches_per_token: float
    """Patches per token of the budget if the vision tower is frozen. If it is trained, patches count as tokens, and
    this is 0."""
    buffers: int
    """Bytes of buffers from which gradients are sent."""
    largest_block: int
    """Bytes of the largest block of weights that is gathered at once for weight syncs and checkpoints."""
    stages: tuple[Stage, ...]
    """Planned stages of the run, in order."""

    @property
    def available(self) -> int:
        """Return the bytes that the plan may use: the card's memory less CUDA context, NCCL buffers and reserve."""
        return self.card.budget(self.num_ranks)

    @cached_property
    def held(self) -> dict[str, int]:
        """Return the bytes that every phase holds from the first update on."""
        held = {
            "weights": held_weights(self.sharding, self.weights, self.num_ranks),
            "reference": held_reference(self.sharding, self.weights, self.num_ranks),
            "optimizer state": held_state(self.sharding, self.weights, self.num_ranks, self.optim),
            "communication buffers": self.buffers,
        }
        return held | self.gradients if self.sharding.keeps_gradients else held

    @cached_property
    def gradients(self) -> dict[str, int]:
        return {"gradients": held_gradients(self.sharding, self.weights, self.num_ranks)}

    @cached_property
    def phases(self) -> list[Phase]:
        """Return the bytes of each planned stage, in order."""
        training = self.held | {"vLLM": self.rollouts.while_training}
        gathered = {"gathered weights": gathered_bytes(self.sharding, self.weights, self.num_ranks)}
        block = {"gathered weights": self.largest_block}
        update = {"update": update_bytes(self.sharding, self.weights, self.num_ranks, self.optim)}
        without_gradients = training | gathered | self.logprob_parts()
        parts = {
            Stage.LOAD: {name: self.held[name] for name in ("weights", "reference")} | gathered,
            Stage.GENERATION: self.held | self.rollouts.while_sampling,
            Stage.OLD_LOGPROBS: without_gradients,
            Stage.REF_LOGPROBS: without_gradients,
            Stage.ENTROPY: without_gradients,
            Stage.TRAINING: training | self.gradients | gathered | self.training_parts(),
            Stage.UPDATE: training | self.gradients | update,
            Stage.WEIGHT_SYNC: self.held | self.rollouts.while_syncing | block,
            Stage.SAVE: training | block,
        }
        return [Phase(stage.value, parts[stage]) for stage in self.stages]

    def logprob_parts(self) -> dict[str, int]:
        """Return the bytes of a pass without gradients."""
        load, found = self.load, self.activations
        vision = round(found.vision(load.patches))
        language = round(found.logprobs_per_token * load.tokens)
        if vision > language + found.logprobs_fixed:  # the tower's forward is over when the language model runs
            return {"vision activations": vision}
        return {"language activations": language, "LM head and copies": round(found.logprobs_fixed)}

    def training_parts(self) -> dict[str, int]:
        """Return the bytes that a forward and backward pass adds to weights and gradients."""
        load, found = self.load, self.activations
        kept, running = round(found.per_patch * load.patches), round(found.vision(load.patches))
        language = {
            "language activations": round(found.per_token * load.tokens),
            "LM head and copies": round(found.fixed),
        }
        if running > kept + sum(language.values()):
            return {"vision activations": running}
        return {"vision activations": kept} | language

    @property
    def training(self) -> Phase:
        """Return the phase of forward and backward passes."""
        return next(phase for phase in self.phases if phase.name == Stage.TRAINING)

    @property
    def peak(self) -> Phase:
        """Return the phase that holds the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.available and self.rollouts.can_start

    @property
    def free_for_vllm(self) -> int:
        """Return the bytes left for vLLM while it is awake, if it sleeps during training.

        Gathered weights do not count: they are sent before the cache is allocated.
        """
        return self.available - sum(self.held.values())

    @property
    def beside_micro_batch(self) -> int:
        """Return the bytes of a forward and backward pass that do not depend on the micro-batch."""
        return self.training.total - sum(self.training_parts().values())

    @property
    def largest_tokens(self) -> int:
        """Return the largest `micro_batch_tokens` that fits; 0 if none does."""
        free = self.available - self.beside_micro_batch
        if self.activations.vision(self.load.patches) > free:
            return 0
        found, patches = self.activations, self.patches_per_token
        tokens = (free - found.fixed) / (found.per_token + found.per_patch * patches)
        if running := found.vision_per_patch * patches:
            tokens = min(tokens, (free - found.vision_fixed) / running)
        return max(0, int(tokens) - 1)  # parts are rounded


def part_names(phases: Sequence[Phase]) -> list[str]:
    """Return the names of all parts that are not empty, in the order of the phases."""
    return list(dict.fromkeys(name for phase in phases for name, size in phase.parts.items() if size))
