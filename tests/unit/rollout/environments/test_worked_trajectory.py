"""The trajectory that docs/environments.md shows with its tokens: it is the one of a scripted engine."""

import re
from pathlib import Path
from typing import Any

import torch

from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.types import Completion, Observation, Sample, Sampling
from tests.helpers.pages import ROOT, block
from tests.helpers.scripted import ScriptedEngine, call, grey
from tests.helpers.templates import builder_of
from tests.unit.rollout.environments.test_driver import Run, scripted, toolbox_of

PAGE = (ROOT / "docs/environments.md").read_text()
TURNS = (call("crop", cell="b3"), "<answer>7</answer>")


class Picture:
    """A picture of which the model can see parts."""

    def reset(self, **columns: Any) -> None: ...

    def crop(self, cell: str) -> list[dict[str, Any]]:
        """Show the middle of a cell.

        Args:
            cell: A column from a to d and a row from 1 to 4, such as b3.
        """
        return [{"type": "image", "image": grey(200, 56, 56)}]


class EndsAtTags(ScriptedEngine):
    """Turns end at a stop sequence, as those of real engines."""

    def turn(self, index: int, completion: Completion, sampling: Sampling) -> Completion:
        turn = super().turn(index, completion, sampling)
        ids = turn.last_turn[:-1]
        if not any(ids[-len(end) :].tolist() == list(end) for end in sampling.stop_sequences):
            return turn
        return completion.continued(ids, torch.zeros(len(ids)), "stop", turn.text)


class Asked(Run):
    def prompt(self, name: str, row: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": [{"type": "text", "text": "Which digit is in the picture?"}]}]
        return self.format.builder.build(Sample(name, messages, [], row, messages))


def lines(builder: PromptBuilder, ids: Any) -> list[str]:
    """The text of tokens, with a mark at the end of each line, and a number for repeated image tokens."""
    text = builder.processor.tokenizer.decode(ids)
    text = re.sub(r"(<\|image_pad\|>)+", lambda found: f"<|image_pad|> × {found[0].count('<')}", text)
    return text.replace("\n", "⏎\n").splitlines()


def shown(mask: str, number: int, text: list[str]) -> str:
    first, *others = text
    return "\n".join([f"{mask:6} {number:6}  {first}", *(" " * 15 + line for line in others)])


def test_the_page_shows_a_trajectory_as_it_is(tmp_path: Path) -> None:
    builder = builder_of("qwen2_5_vl", tmp_path)
    run = Asked(builder, scripted(*TURNS), toolbox_of(Picture), engine=EndsAtTags)
    completion, prompt = run.completion, run.groups[0].prompt.token_ids
    text = lines(builder, prompt)
    rows = ["mask   tokens", shown("prompt", len(prompt), [text[0], "…", *text[-3:]])]
    (context,), start = completion.contexts, 0
    for part in context.parts:
        ids = part.token_ids if isinstance(part, Observation) else completion.token_ids[start : start + part]
        start += 0 if isinstance(part, Observation) else part
        rows.append(shown("0" if isinstance(part, Observation) else "1", len(ids), lines(builder, ids)))
    assert block(PAGE, "text", "mask") == "\n".join(rows) + "\n"
    assert f"exist for the {len(completion.token_ids)} sampled tokens" in PAGE
