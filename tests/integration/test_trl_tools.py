"""Trajectories with tools and environments against TRL's GRPOTrainer, whose turns are scripted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import given_groups, tiny_run, trl_tools
from tests.helpers.builders import gradient_error, make_policy, noise_image, sharpen, take_gradients
from tests.helpers.templates import STOPS
from tests.helpers.tiers import in_tiers

TOLERANCE = 1e-6
QUESTIONS = [
    ("What do you see?", noise_image(32, 24, seed=1)),
    ("And here, on the right?", noise_image(48, 32, seed=2)),
]


def look(x: int) -> list[dict]:
    """Look at a part of the image.

    Args:
        x: Where to look.

    Returns:
        The part.
    """
    return [
        {"type": "text", "text": f"The part at {x}:"},
        {"type": "image", "image": noise_image(32, 32 + 32 * (x % 2), x)},
    ]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    return a + b


def token_sum(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between almost all completions, by all tokens after the prompt."""
    return [sum(ids) % 97 / 97 for ids in completion_ids]


def num_results(completions: list[list[dict]], **kwargs: Any) -> list[float]:
    """A reward of what the messages hold: results, images and the last text."""
    rewards = []
    for messages in completions:
        results = [message for message in messages if message["role"] == "tool"]
        images = [
            b["image"] for r in results if isinstance(r["content"], list) for b in r["content"] if b["type"] == "image"
        ]
        rewards.append(len(results) + 0.1 * sum(i.size[1] for i in images) + 0.01 * len(messages[-1]["content"]))
    return rewards


def rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": text}], "image": image} for text, image in QUESTIONS]


def script_of(template: str) -> Any:
    """Turns of four completions: three tools in turn, one tool, none, and two calls at once."""
    call = trl_tools.CALLS[template]
    turns = [
        ["Look.\n" + call("look", x=3), call("add", a=2, b=3), "Once more.\n" + call("look", x=4), "It is 5."],
        [call("add", a=1, b=1), "2!"],
        ["Nothing."],
        [call("look", x=6) + "\n" + call("add", a=20, b=2), "22, I think."],
    ]
    return lambda index, turn: turns[index][turn]


class Pair:
    """TRL's batch and loss, and our groups and loss, of the same script."""

    def __init__(
        self, template: str, checkpoint: Path, tmp_path: Path, script: Any, rows: str, repeated: list, trl: dict,
        ours: dict, **settings: Any,
    ) -> None:  # fmt: skip
        stop = STOPS[template][0]
        common = {"max_completion_length": 2000, "loss_type": "dapo", "beta": 0.0} | settings
        functions = [token_sum, num_results]
        self.trainer = trl_tools.trl_trainer(checkpoint, tmp_path / "trl", functions, script, stop, **trl, **common)
        self.batch = self.trainer._generate_and_score_completions(repeated)
        names = [f"{__name__}:{function.__name__}" for function in functions]
        config = tiny_run.make_config(
            checkpoint, tmp_path / "ours", dataset_name=rows, reward_funcs=names, **ours, **common
        )
        self.groups, self.engine = trl_tools.our_groups(config, template, script, stop)
        self.scored = trl_tools.scored(config, self.groups)
        self.members = [(group, i) for group in self.groups for i in range(4)]
        self.settings = common
        self.checkpoint = checkpoint

    def of_trl(self, name: str, row: int, mask: str) -> list[int]:
        return self.batch[name][row][self.batch[mask][row].bool()].tolist()

    def check_tokens(self) -> None:
        assert len(self.members) == len(self.batch["completion_ids"]) == 8
        for row, (group, i) in enumerate(self.members):
            (path,) = group.completions[i].paths
            assert group.prompt_of(i).token_ids.tolist() == self.of_trl("prompt_ids", row, "prompt_mask"), row
            assert path.token_ids.tolist() == self.of_trl("completion_ids", row, "completion_mask"), row
            assert path.sampled.tolist() == [bool(m) for m in self.of_trl("tool_mask", row, "completion_mask")], row
            images = group.prompt_of(i).num_images + sum(each.num_images for each in group.completions[i].observations)
            assert images == self.batch["num_images"][row]

    def check_advantages(self) -> None:
        ours = torch.cat([group.advantages_G for group in self.scored])
        assert ours.unique().numel() == 4  # the same in both groups
        torch.testing.assert_close(ours, self.batch["advantages"], rtol=0, atol=TOLERANCE)

    def check_loss(self) -> None:
        policy = make_policy(self.checkpoint)
        trainer = given_groups.make_trainer(policy, self.scored, **self.settings)
        ours = given_groups.accumulate(trainer, self.scored)
        model: Any = self.trainer.model
        trls = self.trainer._compute_loss(model, self.batch)
        trls.backward()
        torch.testing.assert_close(ours, trls.detach(), rtol=0, atol=TOLERANCE)
        assert gradient_error(take_gradients(policy.transformer), take_gradients(model)) <= 1e-5


TEMPLATES = ["qwen3_vl", "lfm2_2_5_vl", "qwen3_5_nothink"]


@pytest.mark.parametrize("template", in_tiers(TEMPLATES, [], TEMPLATES))
def test_trajectories_with_tools_are_trained_on_as_by_trl(template: str, tmp_path: Path) -> None:
    checkpoint = sharpen(trl_tools.published(template, tmp_path / "model"))
    pair = Pair(
        template, checkpoint, tmp_path, script_of(template), f"{__name__}:rows",
        [row for row in rows() for _ in range(4)], {"tools": [look, add]},
        {"tools": [f"{__name__}:look", f"{__name__}:add"]},
    )  # fmt: skip
    pair.check_tokens()
    pair.check_advantages()
    pair.check_loss()
