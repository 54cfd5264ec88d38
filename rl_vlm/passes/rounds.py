"""Rounds of a model's forwards under the token budget. Rows are computed in the fastest proven way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.model.flex_kernels import head_dims_of, naming_compiler_errors
from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import enable_shared_rows, setting_of
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.micro_batches import make_micro_batches
from rl_vlm.passes.recovery import Recovery
from rl_vlm.passes.schedule import Round, make_schedule
from rl_vlm.types import MicroBatch, Progress, ScoredGroup, Sharing

SDPA_CALLS = "two SDPA calls in place of FlexAttention"
DENSE_ROWS = "dense rows"
"""Slower ways to compute rows, if faster ones are not proven."""
UNTRAINED_TOKENS = 8192
"""Token budget of a policy that is not trained, since it has no memory plan."""


class Rounds:
    """Cuts groups of one rank into rounds, and runs them. It needs no optimizer."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Collectives,
        policy: Policy,
        recovery: Recovery,
        sharing: Sharing,
        others: Sequence[Policy] = (),
    ) -> None:
        """`others` are models that compute rows in the same way as the policy, such as the reference."""
        self.ranks = ranks
        self.policy = policy
        self.recovery = recovery
        self.memory = config.memory
        self.models = [policy, *others]
        self.fallback: str | None = None
        """The slower way to compute rows, if faster ones were not proven."""
        self.sharing: Sharing = sharing

    @classmethod
    def of_untrained(cls, config: RunConfig, ranks: Collectives, policy: Policy) -> Rounds:
        """Build the rounds of a policy that is not trained."""
        budget = TokenBudget(ranks, Progress(max_steps=0), policy.vision, PlannedBudget(UNTRAINED_TOKENS))
        return cls(config, ranks, policy, Recovery(ranks, budget), sharing="dense")

    def slower_way(self) -> str | None:
        """Return a slower way to compute rows than the current one, or None if the settings allow no other."""
        model = self.policy.transformer
        in_one_call = model.device.type == "cuda" and setting_of(model) == "auto"
        if in_one_call and self.sharing in ("auto", "shared"):
            return SDPA_CALLS
        return DENSE_ROWS if self.sharing == "auto" else None

    def use(self, way: str) -> None:
        """Compute rows in a slower way from now on."""
        self.fallback = way
        if way == SDPA_CALLS:
            for model in self.models:
                enable_shared_rows(model.transformer, "sdpa")
        else:
            self.sharing = "unproven"

    def join_images(self, joined: bool) -> None:
        """Let images of several prompts share a run of the vision tower from now on, or not."""
        for model in self.models:
            model.vision.join_images(joined)

    @contextmanager
    def running(self, work: Round) -> Iterator[None]:
        """Run the forward and backward of one round in this context.

        Raises AttemptFailed if it runs out of memory, and ModelError if a kernel cannot be compiled.
        """
        with naming_compiler_errors(partial(head_dims_of, self.policy.transformer)), self.recovery.running(work):
            yield

    def schedule(
        self,
        groups: Sequence[ScoredGroup],
        spare: ScoredGroup,
        vision: VisionEncoder,
        together: bool,
        needs_all_gradients: bool = False,
        sharing: Sharing | None = None,
        budget: int | None = None,
    ) -> list[Round]:
        """Cut groups into micro-batches under the token budget, and return their rounds.

        If `together`, ranks communicate within the passes, and all get equally many rounds. `sharing` and `budget`, in
        tokens, are the run's by default.
        """
        batches = self.micro_batches(groups, sharing, budget)
        return make_schedule(batches, vision, spare, self.ranks if together else None, needs_all_gradients)

    def micro_batches(
        self, groups: Sequence[ScoredGroup], sharing: Sharing | None = None, budget: int | None = None
    ) -> list[MicroBatch]:
        """Cut groups into micro-batches under the token budget."""
        tokens, price = self.recovery.budget.tokens if budget is None else budget, self.recovery.budget.price
        mixes_prompts = not self.policy.family.cross_attends
        return make_micro_batches(groups, tokens, sharing or self.sharing, price, mixes_prompts)
