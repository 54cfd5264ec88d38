"""A tiny Qwen3-VL that takes random steps.

`configs/grid_game.yaml` names `starting_model`. It knows how to write a step, from a short supervised warm-up on random
games.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from examples.grid_game import lake, maps
from examples.grid_game.maps import LIMIT, MOVES, PROMPT, train_rows
from rl_vlm.config.schema import DataConfig
from rl_vlm.tiny.cached import cached_model
from rl_vlm.tiny.family import Resolution
from rl_vlm.tiny.warm_up import Turns, warm_up

RESOLUTION = Resolution(side=32, tokens_per_side=1)
"""An image is a single token."""
MEAN, SPREAD = 0.81, 0.14
"""Brightness that the processor subtracts and divides by: those of these pictures."""
STEPS = {name: f"<action>{name}</action>" for name in MOVES}
NUM_GAMES = 16
"""Number of games in a step of the warm-up. Several hundred steps leave hardly any other text to sample."""
DATA = DataConfig(dataset_name="examples.grid_game.model:pictured_rows", max_pixels=RESOLUTION.side**2)


@cached_model(lake, maps)
def starting_model(directory: Path, seed: int) -> None:
    """Write a model that takes random steps."""
    from rl_vlm.tiny.build import build_tiny

    words = (*STEPS.values(), PROMPT, "user\n", "assistant\n")
    build_tiny(
        "qwen3_vl", directory, corpus=(PROMPT,), whole_tokens=words, initializer_range=0.1, resolution=RESOLUTION,
        pixels=(MEAN, SPREAD), seed=seed,
    )  # fmt: skip
    warm_up(directory, DATA, random_games(seed), num_steps=240, num_images=NUM_GAMES, learning_rate=2e-3)


def new_game() -> Any:
    """Return a game that shows pictures."""
    import gymnasium

    return gymnasium.make("TurnedLake-v0", render_mode="rgb_array")


def pictured_rows() -> list[dict[str, Any]]:
    """Return the first rows, with the picture at the end of the prompt, as in a game."""
    from PIL import Image

    game, rows = new_game(), []
    for row in train_rows()[:NUM_GAMES]:
        game.reset(options=row)
        rows.append({"prompt": f"{row['prompt']}<image>", "image": Image.fromarray(game.render())})
    return rows


def random_games(seed: int) -> Iterator[Turns]:
    """Yield the steps of random games with the pictures between them, for ever."""
    from PIL import Image

    random, game, rows = Random(seed), new_game(), train_rows()[:NUM_GAMES]
    while True:
        for row in rows:
            game.reset(options=row | {"limit": LIMIT})
            turns: list[Any] = []
            is_over = False
            while not is_over:
                number, text = random.choice(list(enumerate(STEPS.values())))
                *_, is_over, is_cut, _ = game.step(number)
                is_over |= is_cut
                turns += [text, Image.fromarray(game.render())]
            yield turns[:-1]
