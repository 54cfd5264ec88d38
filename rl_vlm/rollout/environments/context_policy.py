"""Editing of long contexts: older observations lose their images and videos.

    turns 1-3    prompt  turn  image  turn  image  turn
    turns 4-6    prompt  turn  text   turn  text   turn  image  turn  image  turn  image  turn

An edited context is a new context. The model reads earlier turns in it as part of the observations, so each turn
is trained in the context that it was sampled in, and once. Images that stay are the same objects, so they are encoded
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rl_vlm.types import Completion, Observation, ToolResult, Turn

REMOVED = {"image": "[image removed]", "video": "[video removed]"}
"""Stands for an image or a video that the context no longer has."""

Render = Callable[[str, list[int], Turn], Observation]
"""Renders the observation after a turn: its name, the tokens of the turn, and the turn with results."""


@dataclass(frozen=True)
class ContextPolicy:
    """Which images and videos of observations stay in a context, and how often it is edited."""

    keep_images: int
    """A video counts as one. Frames that the model gets as images count each."""
    edit_every: int

    def is_due(self, completion: Completion, observations: Sequence[Observation]) -> bool:
        """Return whether to edit the context before the next turn. `observations` follow its turns, in order."""
        num_turns = sum(isinstance(part, int) for part in completion.parts_so_far)
        return num_turns >= self.edit_every and num_images(observations) > self.keep_images

    def edit(
        self, completion: Completion, turns: Sequence[Turn], observations: Sequence[Observation], render: Render
    ) -> list[Observation]:
        """Return the observations after all turns, the older ones without images.

        The newest stays as it is. An observation keeps all of its images or none.
        """
        sampled = completion.token_ids.split(completion.turn_lengths)
        edited = list(observations)
        for i, each in enumerate(observations[:-1]):
            if each.images and num_images(observations[i:]) > self.keep_images:
                edited[i] = render(each.name, sampled[i].tolist(), without_images(turns[i]))
        return edited


def num_images(observations: Sequence[Observation]) -> int:
    """Return the number of images and videos of observations."""
    return sum(len(each.images) for each in observations)


def without_images(turn: Turn) -> Turn:
    """Return a turn whose results have a text in place of each image and video."""

    def shortened(result: ToolResult) -> ToolResult:
        content = [
            {"type": "text", "text": REMOVED[block["type"]]} if block["type"] in REMOVED else block
            for block in result.content
        ]
        return replace(result, content=content, images=())

    return replace(turn, results=tuple(map(shortened, turn.results)))


def read_again(completion: Completion, observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the start of an edited context: each turn, as tokens that are not trained, and the observation after it.

    The last observation is left out: the next turn follows it.
    """
    lengths, name = completion.turn_lengths, observations[-1].name
    turns = [Observation(name, tokens, {}, {}) for tokens in completion.token_ids.split(lengths)]
    pairs = zip(turns, observations, strict=True)
    return tuple(each for pair in pairs for each in pair)[:-1]
