"""The memory plan of a run: what each rank holds in each phase, and what fits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rl_vlm.plan.activations import Activations
from rl_vlm.plan.engines import Engine
from rl_vlm.plan.hardware import Card
from rl_vlm.plan.weights import Weights


@dataclass(frozen=True)
class Phase:
    """Bytes of one rank's device in a phase of a run, by part."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Rollouts:
    """What the rollout engine holds on a rank's device."""

    while_sampling: dict[str, int]
    """Bytes by part during a rollout."""
    while_training: int
    """Bytes that vLLM keeps during training."""
    in_host_memory: int = 0
    """Bytes of sleeping weights."""


@dataclass(frozen=True)
class Load:
    """A micro-batch: what `micro_batch_tokens` admits."""

    tokens: int
    """Language tokens."""
    patches: int
    """Patches of images."""


@dataclass(frozen=True)
class MemoryPlan:
    """One rank of a run: all have the same plan."""

    card: Card
    num_ranks: int
    engine: Engine
    optim: str
    weights: Weights
    activations: Activations
    rollouts: Rollouts
    micro_batch_tokens: int
    load: Load
    largest_block: int
    """Bytes of the largest block of weights that is gathered at once for weight syncs and checkpoints."""
    has_logprobs_pass: bool
    """Whether old or reference log-probs are computed in passes of their own."""
    syncs_weights: bool
    """Whether the rollout engine has a model of its own, which is sent the policy's weights."""

    @property
    def available(self) -> int:
        """Bytes for what the plan counts: the card's without CUDA context, NCCL's buffers and the reserve."""
        return self.card.budget(self.num_ranks)

    @cached_property
    def held(self) -> dict[str, int]:
        """Bytes that are held in every phase from the first update on."""
        return {
            "weights": self.engine.weights(self.weights, self.num_ranks),
            "reference": self.engine.reference(self.weights, self.num_ranks),
            "optimizer state": self.engine.optimizer_state(self.weights, self.num_ranks, self.optim),
        }

    @cached_property
    def phases(self) -> list[Phase]:
        """The phases of a step, in their order, and those before and after it."""
        training = self.held | {"vLLM": self.rollouts.while_training}
        gradients = {"gradients": self.engine.gradients(self.weights, self.num_ranks)}
        gathered = {"gathered weights": self.engine.gathered(self.weights, self.num_ranks)}
        block = {"gathered weights": self.largest_block}
        update = {"update": self.update_bytes}
        phases = [
            Phase("load", {name: self.held[name] for name in ("weights", "reference")} | gathered),
            Phase("rollout", self.held | self.rollouts.while_sampling),
            Phase("log-probs", training | gathered | self.logprob_parts()),
            Phase("forward and backward", training | gradients | gathered | self.training_parts(self.load)),
            Phase("update", training | gradients | update),
            Phase("weight sync", self.held | {"vLLM": self.rollouts.while_training} | block),
            Phase("save", training | block),
        ]
        absent = {"log-probs": not self.has_logprobs_pass, "weight sync": not self.syncs_weights}
        return [phase for phase in phases if not absent.get(phase.name, False)]

    @property
    def update_bytes(self) -> int:
        return self.engine.update(self.weights, self.num_ranks, self.optim)

    def logprob_parts(self) -> dict[str, int]:
        """Return the bytes of a pass without gradients."""
        load, found = self.load, self.activations
        vision = round(found.vision_per_patch * load.patches)
        language = round(found.logprobs_per_token * load.tokens)
        if vision > language + found.logprobs_fixed:  # the tower's forward is over when the language model runs
            return {"vision activations": vision}
        return {"language activations": language, "LM head and copies": round(found.logprobs_fixed)}

    def training_parts(self, load: Load) -> dict[str, int]:
        """Return the bytes of a forward and backward pass beside weights and gradients."""
        found = self.activations
        kept, running = round(found.per_patch * load.patches), round(found.vision_per_patch * load.patches)
        language = {
            "language activations": round(found.per_token * load.tokens),
            "LM head and copies": round(found.fixed),
        }
        if running > kept + sum(language.values()):
            return {"vision activations": running}
        return {"vision activations": kept} | language

    @property
    def peak(self) -> Phase:
        """The phase that holds most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.available

    @property
    def largest_tokens(self) -> int:
        """The largest `micro_batch_tokens` that fits, for the same images; 0 if none does."""
        phase = next(phase for phase in self.phases if phase.name == "forward and backward")
        others = phase.total - sum(self.training_parts(self.load).values())
        free = self.available - others
        if self.activations.vision_per_patch * self.load.patches > free:
            return 0
        # A trained tower's images are counted in tokens; features of a frozen one are held beside them.
        features = 0 if self.weights.trains_vision else self.activations.per_patch * self.load.patches
        tokens = (free - self.activations.fixed - features) / self.activations.per_token
        return max(0, int(tokens) - 1)  # parts are rounded
