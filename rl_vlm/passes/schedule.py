"""The schedule of a pass: each rank's rounds in order. Ranks that run together have equally many.

A round is a forward and its backward, and then the vision tower's own backwards. A trained tower runs apart from the
forwards of groups and completions that are cut (`model/features.py`). Its backward for a prompt, or for an observation,
follows the last forward that uses it. Two ranks, the second with one micro-batch less:

    rank 0   Forward(a, before=1)   Forward(a, within=0) TowerBackward(A)      │ exchange of gradients
    rank 1   Forward(b, before=1)   Forward(dummy)       TowerBackward(idle)   │ in the last round
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.types import Forward, MicroBatch, Prompt, ScoredGroup, SubGroup, TowerBackward

T = TypeVar("T")


class Runs(NamedTuple):
    """Numbers of runs of the vision tower in a round: before its forward, within it, and in the tower's own
    backwards."""

    before: int
    within: int
    num_backwards: int


@dataclass(frozen=True)
class Round:
    """A forward and its backward, followed by the vision tower's own backwards."""

    forward: Forward
    tower_backwards: tuple[TowerBackward, ...] = ()
    is_last: bool = False
    """Whether ranks exchange gradients in this round, as a part of its backwards."""

    @property
    def runs(self) -> Runs:
        return Runs(self.forward.before, self.forward.within, len(self.tower_backwards))

    def at_least(self, runs: Runs, idle_prompt: Prompt | None) -> Round:
        """Pad the round with idle runs of the vision tower, so that it has as many as on other ranks."""
        missing = runs.num_backwards - len(self.tower_backwards)
        idle = [] if idle_prompt is None else [TowerBackward(idle_prompt)] * missing
        forward = replace(self.forward, before=runs.before, within=runs.within)
        return replace(self, forward=forward, tower_backwards=(*self.tower_backwards, *idle))


def make_schedule(
    batches: Sequence[MicroBatch],
    vision: VisionEncoder,
    spare: ScoredGroup,
    ranks: Collectives | None = None,
    needs_all_gradients: bool = False,
) -> list[Round]:
    """Return the rounds of a pass over micro-batches, in order.

    If `ranks` are given, they run the pass together: all get equally many rounds with equally many runs of the vision
    tower. A rank with fewer micro-batches runs dummies without effect. `spare` is any group of this rank. With
    `needs_all_gradients`, the first and the last backward give a gradient to every trained weight.
    """
    rounds = equal_rounds(batches, vision, spare, ranks) if ranks else own_rounds(batches, vision)
    if needs_all_gradients and not vision.is_frozen:
        rounds = with_all_gradients(rounds, spare)
    return [replace(each, is_last=i == len(rounds)) for i, each in enumerate(rounds, 1)]


def own_rounds(batches: Sequence[MicroBatch], vision: VisionEncoder) -> list[Round]:
    """Return the rounds of this rank's micro-batches. No features are kept before the first one.

    The tower runs on a prompt or an observation before the first forward that uses its kept features, and again after
    the last one. Prompts and observations with equal images count as one.
    """
    apart = [vision.apart(batch) for batch in batches]
    last = {each.digest: i for i, some in enumerate(apart) for each in some}
    rounds: list[Round] = []
    kept: set[bytes] = set()
    cached: set[bytes] = set()
    for i, batch in enumerate(batches):
        before = sum(each.digest not in kept for each in apart[i])
        kept.update(each.digest for each in apart[i])
        done = [each for each in apart[i] if last[each.digest] == i]
        forward = Forward(batch, before, within=len(vision.calls(batch.rendered, kept | cached)))
        rounds.append(Round(forward, tuple(map(TowerBackward, done))))
        kept.difference_update(each.digest for each in done)
        if vision.is_frozen:
            cached.update(each.digest for each in batch.rendered if each.mm_inputs)
    return rounds


def equal_rounds(
    batches: Sequence[MicroBatch], vision: VisionEncoder, spare: ScoredGroup, ranks: Collectives
) -> list[Round]:
    """Return this rank's rounds, padded so that all ranks have equally many, with equally many tower runs in each.

    Ranks exchange the runs of their own rounds, of a first dummy and of a later dummy. Later dummies need no run of a
    frozen tower, since its features are cached by then.
    """
    rounds = own_rounds([*batches, dummy(spare), dummy(spare)], vision)
    runs_of_ranks = ranks.gather([[each.runs for each in rounds]])
    num_rounds = max(len(runs) - 2 for runs in runs_of_ranks)
    most = [Runs(*map(max, zip(*(at(runs, i) for runs in runs_of_ranks), strict=True))) for i in range(num_rounds)]
    return [at(rounds, i).at_least(runs, vision.idle_prompt) for i, runs in enumerate(most)]


def with_all_gradients(rounds: Sequence[Round], spare: ScoredGroup) -> list[Round]:
    """Let the vision tower run in each forward, and let a forward follow the tower's own last backward."""
    if rounds and rounds[-1].tower_backwards:
        rounds = [*rounds, Round(Forward(dummy(spare)))]
    return [replace(each, forward=replace(each.forward, within=max(1, each.forward.within))) for each in rounds]


def at(rounds: Sequence[T], i: int) -> T:
    """Return item `i` of a rank's rounds. The last item, a later dummy, stands for all further rounds."""
    return rounds[min(i, len(rounds) - 1)]


def dummy(spare: ScoredGroup) -> MicroBatch:
    """Build a micro-batch of one completion, in its first context, whose loss is multiplied by 0.

    Its tokens are valid, since they come from `spare`, any group of this rank. So 0 x loss is 0.
    """
    first = spare.group.completions[0]
    if len(first.contexts) > 1:
        spare = replace(spare, group=replace(spare.group, completions=[first.part(range(1))]))
    return MicroBatch([SubGroup(spare, [0])], shared=False, is_dummy=True)
