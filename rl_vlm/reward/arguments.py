"""The arguments of a call, by TRL's protocol: one list per argument, with one entry per completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rewards.forms import Form, completion_in, form_of, prompt_in

if TYPE_CHECKING:
    from rl_vlm.types import Group


def arguments(groups: Sequence[Group], columns: Iterable[str], form: Form | None) -> dict[str, list[Any]]:
    """Build the arguments that have one entry per completion. The entry is None if a row lacks the column.

    Prompts and completions have the given form, or their row's form if it is None.
    """
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    samples = [prompt.sample for prompt, _ in rows]
    return {
        **{column: [sample.columns.get(column) for sample in samples] for column in columns},
        "prompts": [prompt_in(form, sample.prompt) for sample in samples],
        "completions": [completion_in(form or form_of(p.sample.prompt), completion.text) for p, completion in rows],
        "completion_ids": [completion.token_ids.tolist() for _, completion in rows],
        "images": [sample.images for sample in samples],
        "image_sizes": [[image.size for image in sample.images] for sample in samples],
        "model_image_sizes": [prompt.image_sizes for prompt, _ in rows],
    }
