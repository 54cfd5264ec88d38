"""How long the report of a run takes and how large it is: `python -m benchmarks.run_report`.

A made-up run of 1,250 groups of 8 completions, with thinking of random length, boxes, and 200 photos-like images.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from rl_vlm.config import yaml_text
from rl_vlm.log.completions import FOLDER, window_path, write_rows
from rl_vlm.log.images import LONG_SIDE, QUALITY
from rl_vlm.tools.report.build import write_report

GROUP = 8
GROUPS_PER_WINDOW = 25
SETTINGS = {"rewards": {"reward_funcs": ["iou"]}, "train": {"max_steps": 50}}
WORDS = "the red square is left of a circle and near the edge so its box starts there".split()


def write_images(folder: Path, number: int) -> None:
    """Write images of noise at several scales, which JPEG compresses about as badly as a detailed photo."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for i in range(number):
        pixels = generator.integers(0, 256, (LONG_SIDE * 3 // 4, LONG_SIDE, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(1.2))
        image.save(folder / f"{i}.jpg", quality=QUALITY)


def answer(i: int, num_boxes: int) -> str:
    """Return the answer of completion `i`: a box, or a list of objects as detection has it."""
    boxes = [[10, 20, 30 + i, 40 + i + box] for box in range(num_boxes)]
    return json.dumps(boxes[0] if num_boxes == 1 else [{"bbox_2d": box, "label": "square"} for box in boxes])


def write_windows(folder: Path, options: argparse.Namespace) -> None:
    """Write the completions of a run."""
    num_rollouts, num_images, num_words = options.rollouts, options.images, options.words
    logged = {f"note {i}": "n" * 100 for i in range(options.logged)}
    generator = random.Random(0)
    num_windows = num_rollouts // (GROUP * GROUPS_PER_WINDOW)
    for step in range(num_windows):
        rows = []
        for group in range(GROUPS_PER_WINDOW):
            prompt = step * GROUPS_PER_WINDOW + group
            for i in range(GROUP):
                score = min(1.0, generator.random() * (0.5 + step / num_windows))
                thought = " ".join(generator.choices(WORDS, k=generator.randrange(2 * num_words)))
                rows.append(
                    {
                        "step": step, "group_id": f"{step}/0/row-{prompt}", "sample_id": f"row-{prompt}",
                        "completion_index": i, "policy_version": step, "prompt": "user: <image> Where is the square?",
                        "completion": f"<think>{thought}</think><answer>{answer(i, options.boxes)}</answer>",
                        "finish_reason": "stop", "prompt_length": 300, "completion_length": 2 * num_words,
                        "image_sizes": [[896, 672]], "model_image_sizes": [[896, 672]], "iou": score, "reward": score,
                        "advantage": score - 0.5, "fault": None, "data/solution": "[10, 20, 30, 40]",
                        "images": [f"images/{prompt}.jpg"] if prompt < num_images else None,
                    } | logged
                )  # fmt: skip
        write_rows(window_path(folder, step), rows)
    same = {"time/step": 9.0, "time/training": 4.0, "step_tokens": 1e5, "frac_reward_zero_std": 0.1, "reward_std": 0.3}
    groups = {"reward_best_of_group": 0.9, "completions/distinct_answers": float(GROUP)}
    lines = [{"step": s + 1, "reward": s / num_windows} | same | groups for s in range(num_windows)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml_text.dump(SETTINGS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--words", type=int, default=150, help="of the thinking of a completion, on average")
    parser.add_argument("--boxes", type=int, default=1, help="in the answer of a completion")
    parser.add_argument("--logged", type=int, default=0, help="values that reward functions log on a completion")
    parser.add_argument("--keep", type=Path, help="copy the report to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder / FOLDER / "images", options.images)
        write_windows(folder, options)
        start = time.perf_counter()
        write_report([folder], folder / "report.html")
        seconds = time.perf_counter() - start
        content = (folder / "report.html").read_bytes()
        images = sum(path.stat().st_size for path in (folder / FOLDER / "images").iterdir())
        print(f"{options.rollouts} rollouts, {options.images} images ({images / 1e6:.1f} MB of JPEG)")
        print(f"{seconds:.1f} s, {len(content) / 1e6:.1f} MB")
        if options.keep:
            options.keep.write_bytes(content)


if __name__ == "__main__":
    main()
