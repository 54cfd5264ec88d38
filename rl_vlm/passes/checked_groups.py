"""Groups of a proof: shortened groups, and groups with a change that must, or must not, change log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from rl_vlm.types import Completion, Group, Prompt, ScoredGroup


@dataclass(frozen=True)
class CheckedSize:
    """Maximum rows of a check: groups of a rank, completions of a group, and tokens of a completion."""

    groups: int = 2
    """Two prompts in a row show whether one sees the other. There is always a group for each number of images and
    videos."""
    completions: int = 3
    tokens: int = 128
    """A completion of this length spans several blocks of FlexAttention."""
    tries_lengths: bool = False
    """Whether to make up completions of other lengths, since the first step may sample only short ones."""


ALL = CheckedSize(1_000_000, 1_000_000, 1_000_000, tries_lengths=True)
SHORT, LONG = 16, 512
"""Tokens of the shortest made-up completion. The longest has as many as the settings allow, and at least `LONG`."""


def media_kind(scored: ScoredGroup) -> tuple[int, int]:
    """Return two numbers, for images and for videos: 0 without any, 1 for one, and 2 for several."""
    sample = scored.group.prompt.sample
    return min(len(sample.images), 2), min(len(sample.videos), 2)


def chosen(groups: Sequence[ScoredGroup], size: CheckedSize) -> list[ScoredGroup]:
    """Choose a group of each number of images and videos (none, one, several), and the first groups, in their order.

    Groups without a sampled token are left out.
    """
    filled = [group for group in groups if any(len(each.token_ids) for each in group.group.completions)]
    firsts = {media_kind(group): i for i, group in reversed(list(enumerate(filled)))}
    kept = set(firsts.values())
    for i in range(len(filled)):
        if len(kept) < size.groups:
            kept.add(i)
    return [filled[i] for i in sorted(kept)]


def taken(groups: Sequence[ScoredGroup]) -> list[Tensor]:
    """Return the stored log-probs of each completion, and remove them."""
    found = [group.old_logprobs[i] for group in groups for i in sorted(group.old_logprobs)]
    for group in groups:
        group.old_logprobs.clear()
    return found


def unscored(group: Group) -> ScoredGroup:
    """Return a scored group whose completions are all valid, with rewards and advantages of 0."""
    num = len(group.completions)
    zeros = torch.zeros(num)
    return ScoredGroup(group, zeros[:, None], zeros, zeros, torch.ones(num, dtype=torch.bool), has_variance=True)


def with_completions(
    scored: ScoredGroup, completions: Sequence[Completion], prompt: Prompt | None = None
) -> ScoredGroup:
    """Return a new group of these completions. All of them are valid."""
    group = scored.group
    return unscored(replace(group, prompt=prompt or group.prompt, completions=list(completions)))


def shortened(scored: ScoredGroup, size: CheckedSize) -> ScoredGroup:
    """Return a new group of the first completions and their first tokens. Empty completions are left out."""
    some = [each for each in scored.group.completions if len(each.token_ids)][: size.completions]
    return with_completions(scored, [completion.first_tokens(size.tokens) for completion in some])


def of_other_lengths(groups: Sequence[ScoredGroup], longest: int, context: int | None) -> list[ScoredGroup]:
    """Make up a group for each number of images, with a short, a medium and the longest completion.

    They repeat the first turn of a sampled completion. `context` is the model's number of tokens with the prompt.
    """
    firsts = {media_kind(group): group for group in reversed(groups)}
    made = []
    for _, group in sorted(firsts.items()):
        first = group.group.completions[0]
        turn, prompt = first.token_ids[: first.turn_lengths[0]], group.group.prompt_of(0)
        room = max(longest, LONG) if context is None else min(max(longest, LONG), context - len(prompt.token_ids))
        lengths = sorted({min(length, room) for length in (SHORT, (SHORT + room) // 2, room)})
        tokens = [turn.repeat(-(-length // len(turn)))[:length] for length in lengths]
        some = [Completion(each, torch.zeros(len(each)), "length", "") for each in tokens if len(each)]
        if some:
            made.append(with_completions(group, some, prompt))
    return made


def first_turns(scored: ScoredGroup) -> ScoredGroup:
    """Return a new group of the first turns of its completions, or the group itself if all have one turn."""
    if not any(completion.contexts for completion in scored.group.completions):
        return scored
    return with_completions(scored, [each.first_tokens(each.turn_lengths[0]) for each in scored.group.completions])


def with_other_images(scored: ScoredGroup) -> ScoredGroup:
    """Return a new group with inverted pixels in its prompts. Times of videos stay."""

    def inverted(prompt: Prompt) -> Prompt:
        inputs = {n: v for n, v in prompt.mm_inputs.items() if v.is_floating_point() and n != "second_per_grid_ts"}
        return replace(prompt, mm_inputs=prompt.mm_inputs | {name: 0.5 - value for name, value in inputs.items()})

    prompts = [scored.group.prompt_of(i) for i in range(len(scored.group.completions))]
    others = {prompt: inverted(prompt) for prompt in dict.fromkeys(prompts)}
    completions = [
        replace(completion, start=others[prompt])
        for completion, prompt in zip(scored.group.completions, prompts, strict=True)
    ]
    return with_completions(scored, completions)


def with_exchanged_prompts(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Return new groups, each with the prompt of the next one."""
    prompts = [group.group.prompt for group in (*groups[1:], groups[0])]
    return [
        with_completions(group, [replace(each, start=None) for each in group.group.completions], prompt)
        for group, prompt in zip(groups, prompts, strict=True)
    ]


def with_other_siblings(scored: ScoredGroup) -> ScoredGroup:
    """Return a new group whose completions, except the last, have their tokens in reverse order.

    The last completion follows all others in a row, so a purely causal mask would let it see them.
    """
    *rest, last = scored.group.completions
    return with_completions(scored, [*(replace(each, token_ids=each.token_ids.flip(0)) for each in rest), last])


def last_of_each(groups: Sequence[ScoredGroup]) -> list[int]:
    """Return the index of the last completion of each group among the completions of all."""
    return [end - 1 for end in accumulate(len(group.group.completions) for group in groups)]
