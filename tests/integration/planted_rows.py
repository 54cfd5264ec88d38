"""Rows with planted faults of ten kinds, and the kind that `rl-vlm doctor` should name for each."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from tests.helpers.builders import noise_image

REWARD = f"{__name__}:letter"
MAX_PIXELS = 10_000
MAX_TOKENS = 128
NUM_IMAGES = 200
NUM_HELD_OUT = 100
KINDS = (
    "missing image",
    "unreadable image",
    "image above the pixel cap",
    "empty prompt",
    "marks and images that differ in number",
    "duplicate",
    "row that is held out too",
    "gold answer below the maximum of its reward",
    "row without a gold answer",
    "prompt with too many tokens",
)


def letter(completions: list[Any], solution: list[str | None]) -> list[float | None]:
    """1.0 for the letter of the solution; the answer can be one of A to D alone."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [
        None if gold is None else float(text in "ABCD" and text == gold)
        for text, gold in zip(texts, solution, strict=True)
    ]


def sound_row(index: int) -> dict[str, Any]:
    """A row without fault. No two have the same prompt and image; neither prompts nor images are unique."""
    return {
        "prompt": f"Question {index // NUM_IMAGES}: which letter is it, A, B, C or D?",
        "image": f"images/{index % NUM_IMAGES}.png",
        "solution": "ABCD"[index % 4],
    }


def write_planted(folder: Path, num_rows: int, num_each: int) -> dict[int, str]:
    """Write `train.jsonl` and `test.jsonl` with `num_each` faults of each kind. Returns the kind of each bad row."""
    write_images(folder)
    rows = [sound_row(index) for index in range(num_rows)]
    held_out = [{**sound_row(i), "prompt": f"Held-out question {i}?"} for i in range(NUM_HELD_OUT)]
    bad = random.Random(0).sample(range(num_rows // 2, num_rows), num_each * len(KINDS))
    kinds = {row: KINDS[i % len(KINDS)] for i, row in enumerate(bad)}
    for i, (row, kind) in enumerate(kinds.items()):
        rows[row] |= fault(folder, kind, i, rows)
        if kind == "row that is held out too":
            held_out.append(rows[row] | {"image": copied(folder, rows[row]["image"], f"held_out_{i}.png")})
    for name, written in (("train", rows), ("test", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return kinds


def write_images(folder: Path) -> None:
    """Write the images, one with many pixels, and one that ends within its header."""
    (folder / "images").mkdir(parents=True)
    for i in range(NUM_IMAGES):
        noise_image(32, 32, seed=i).save(folder / f"images/{i}.png")
    Image.new("1", (101, 100)).save(folder / "images/large.png")
    (folder / "images/cut.png").write_bytes((folder / "images/0.png").read_bytes()[:20])


def fault(folder: Path, kind: str, i: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The changed columns of the i-th bad row. A duplicate repeats a row of the first half, which has no faults."""
    if kind == "duplicate":
        source = rows[i]
        suffix = "png" if i // len(KINDS) % 2 else "bmp"  # the same file, and the same pixels in another format
        return source | {"image": copied(folder, source["image"], f"copy_{i}.{suffix}")}
    return {
        "missing image": {"image": "images/none.png"},
        "unreadable image": {"image": "images/cut.png"},
        "image above the pixel cap": {"image": "images/large.png"},
        "empty prompt": {"prompt": "  "},
        "marks and images that differ in number": {"prompt": "<image> Is it as in <image>?"},
        "row that is held out too": {},
        "gold answer below the maximum of its reward": {"solution": "E"},
        "row without a gold answer": {"solution": None},
        "prompt with too many tokens": {"prompt": f"Question {i}: {'xyz' * MAX_TOKENS}"},
    }[kind]


def copied(folder: Path, image: str, name: str) -> str:
    """The path of a copy of an image, in the format of the new name."""
    target = folder / "images" / name
    if target.suffix == Path(image).suffix:
        shutil.copy(folder / image, target)
    else:
        Image.open(folder / image).save(target)
    return f"images/{name}"
