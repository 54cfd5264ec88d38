"""Packing of an optimizer step's groups into micro-batches under a token budget.

Groups are packed whole if they fit. A larger group is split into sub-groups. Each computes the prefix again, but not
the images. A completion that does not fit alone is split between its contexts, in the same way. A single context is
never split. Packing changes neither the loss nor the gradient.

    budget of 3 contexts    a completion of 2 contexts, and one of 4
    micro-batches           [0: 1 2]  [1: 1 2 3]  [1: 4]
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from rl_vlm.types import Completion, MicroBatch, Prompt, Rendered, ScoredGroup, Sharing, SubGroup

SHARING_PAYS = 1.1
"""Minimum ratio of dense to shared tokens, k(P + R) / (P + kR), at which a packed row is worth its overhead."""


VisionTokens = Callable[[Rendered], int]
"""Cost of the images of a prompt or an observation in the vision tower, in language tokens."""


def no_vision(rendered: Rendered) -> int:
    """Return 0, so that only language tokens count."""
    return 0


def make_micro_batches(
    groups: Sequence[ScoredGroup],
    budget: int,
    sharing: Sharing,
    vision_tokens: VisionTokens = no_vision,
    mixes_prompts: bool = True,
) -> list[MicroBatch]:
    """Split groups into micro-batches of at most `budget` tokens, which together hold every valid completion once.

    The budget counts the language model's tokens, with padding, plus the `vision_tokens` of images. A context that
    exceeds it gets its own micro-batch. Prompts that leave no room for a completion are refused before
    (`passes/large_prompts.py`). If `mixes_prompts` is False, every micro-batch holds one prompt.
    """
    by_reason: dict[str | None, list[ScoredGroup]] = {None: []}
    for group in groups:
        if group.valid_G.any():
            by_reason.setdefault(why_dense(group, sharing), []).append(group)
    return [
        MicroBatch(subgroups, shared=reason is None, dense_reason=reason)
        for reason, some in by_reason.items()
        for subgroups in Packer(budget, reason is None, vision_tokens, mixes_prompts).pack(some)
    ]


def training_tokens(group: ScoredGroup, sharing: Sharing, vision_tokens: VisionTokens = no_vision) -> int:
    """Return the tokens that training on a whole group computes. At least one of its completions must be valid."""
    size = Size.of(group, valid_members(group), vision_tokens)
    return size.tokens(shared=why_dense(group, sharing) is None)


def why_dense(group: ScoredGroup, sharing: Sharing) -> str | None:
    """Return why a group is computed as one padded row per completion, or None if its prefix is shared."""
    if sharing == "auto":
        return None if sharing_ratio(group) >= SHARING_PAYS else "little_to_share"
    return {"shared": None, "dense": "not_shared", "unproven": "not_proven"}[sharing]


@dataclass(frozen=True)
class Size:
    """Cost of sub-groups in a forward. Sizes of disjoint sub-groups add up.

    Each context of a completion is a row.
    """

    unique_tokens: int = 0
    num_rows: int = 0
    longest_row: int = 0
    vision_tokens: int = 0

    @staticmethod
    def of(group: ScoredGroup, members: Sequence[int], vision_tokens: VisionTokens = no_vision) -> Size:
        """Return the cost of completions with their prompts."""
        pieces = [SubGroup(group, some) for some in group.group.by_prompt(members)]
        return sum((Size.of_subgroup(piece, vision_tokens) for piece in pieces), Size())

    @staticmethod
    def of_subgroup(subgroup: SubGroup, vision_tokens: VisionTokens) -> Size:
        """Return the cost of a sub-group. Images on which the tower runs apart cost nothing."""
        prompt, apart = subgroup.prompt, {each.digest for each in subgroup.apart}
        added = Size.added(subgroup.completions, len(prompt.token_ids), vision_tokens, apart)
        return added + Size.alone(prompt, vision_tokens, subgroup.vision_apart)

    @staticmethod
    def alone(prompt: Prompt, vision_tokens: VisionTokens, vision_apart: bool) -> Size:
        """Return the cost of a prompt without completions."""
        return Size(len(prompt.token_ids), vision_tokens=0 if vision_apart else vision_tokens(prompt))

    @staticmethod
    def added(
        completions: Sequence[Completion], prefix: int, vision_tokens: VisionTokens, apart: Container[bytes] = ()
    ) -> Size:
        """Return the cost of completions without their prompt, which has `prefix` tokens.

        Images with a digest in `apart` cost nothing.
        """
        lengths = [length for completion in completions for length in completion.path_lengths]
        unlike = [{each.digest: each for each in completion.observations} for completion in completions]
        images = sum(vision_tokens(each) for some in unlike for digest, each in some.items() if digest not in apart)
        return Size(sum(lengths), len(lengths), prefix + max(lengths, default=0), images)

    def __add__(self, other: Size) -> Size:
        return Size(
            self.unique_tokens + other.unique_tokens,
            self.num_rows + other.num_rows,
            max(self.longest_row, other.longest_row),
            self.vision_tokens + other.vision_tokens,
        )

    def tokens(self, shared: bool) -> int:
        """Return the tokens of one packed row, or of one padded row per completion, plus vision tokens."""
        return self.vision_tokens + (self.unique_tokens if shared else self.num_rows * self.longest_row)


def batch_tokens(batch: MicroBatch, vision_tokens: VisionTokens) -> int:
    """Return the tokens of a micro-batch, as the budget counts them."""
    sizes = [Size.of_subgroup(subgroup, vision_tokens) for subgroup in batch.subgroups]
    return sum(sizes, Size()).tokens(batch.shared)


def sharing_ratio(group: ScoredGroup) -> float:
    """Compute the ratio of language tokens, dense (one padded row per completion) to shared."""
    size = Size.of(group, valid_members(group))
    return size.tokens(shared=False) / size.tokens(shared=True)


def valid_members(group: ScoredGroup) -> list[int]:
    """Return the indices of the valid completions."""
    return [i for i, valid in enumerate(group.valid_G.tolist()) if valid]


@dataclass(frozen=True)
class Packer:
    """Packs groups into micro-batches of one layout under a token budget."""

    budget: int
    shared: bool
    vision_tokens: VisionTokens
    mixes_prompts: bool

    def pack(self, groups: Sequence[ScoredGroup]) -> Iterator[list[SubGroup]]:
        """Yield micro-batches, filled greedily with longest rows first, so that padded rows have similar lengths."""
        current: list[SubGroup] = []
        size = Size()
        by_length = sorted(groups, key=lambda group: Size.of(group, valid_members(group)).longest_row, reverse=True)
        for piece in (piece for group in by_length for piece in self.split(group)):
            piece_size = Size.of_subgroup(piece, self.vision_tokens)
            if current and not (self.mixes_prompts and self.fits(size + piece_size)):
                yield current
                current, size = [], Size()
            current.append(piece)
            size = size + piece_size
        if current:
            yield current

    def split(self, group: ScoredGroup) -> list[SubGroup]:
        """Split the group's valid completions into sub-groups that each have one prompt and fit the budget."""
        of_prompts = group.group.by_prompt(valid_members(group))
        return [piece for members in of_prompts for piece in self.split_members(group, members)]

    def split_members(self, group: ScoredGroup, members: Sequence[int]) -> list[SubGroup]:
        """Split completions of one prompt into sub-groups that each fit the budget.

        If the completions are cut, the images of the prompt cost the sub-groups nothing: the vision tower runs apart
        from them.
        """
        if self.fits(Size.of(group, members, self.vision_tokens)):
            return [SubGroup(group, list(members))]
        prompt, completions = group.group.prompt_of(members[0]), group.group.completions
        apart = self.vision_tokens(prompt) > 0
        prefix, prompt_alone = len(prompt.token_ids), Size.alone(prompt, self.vision_tokens, apart)
        pieces: list[SubGroup] = []
        size = prompt_alone
        for member in members:
            row = Size.added([completions[member]], prefix, self.vision_tokens)
            if pieces and self.fits(size + row):
                pieces[-1] = replace(pieces[-1], members=[*pieces[-1].members, member])
                size = size + row
                continue
            parts = [SubGroup(group, [member], apart)]
            if not self.fits(prompt_alone + row):
                parts = self.split_contexts(group, member, apart)
            pieces += parts
            size = Size.of_subgroup(parts[-1], self.vision_tokens)
        return pieces

    def split_contexts(self, group: ScoredGroup, member: int, vision_apart: bool) -> list[SubGroup]:
        """Split a completion into sub-groups of consecutive contexts that each fit the budget."""
        num_contexts = len(group.group.completions[member].contexts)
        if num_contexts < 2:
            return [SubGroup(group, [member], vision_apart)]
        pieces: list[SubGroup] = []
        start = 0
        for end in range(2, num_contexts + 1):
            longer = SubGroup(group, [member], vision_apart, {member: range(start, end)})
            if not self.fits(Size.of_subgroup(longer, self.vision_tokens)):
                pieces.append(SubGroup(group, [member], vision_apart, {member: range(start, end - 1)}))
                start = end - 1
        return [*pieces, SubGroup(group, [member], vision_apart, {member: range(start, num_contexts)})]

    def fits(self, size: Size) -> bool:
        return size.tokens(self.shared) <= self.budget
