"""Time that training waits for data: 16 rows with JPEGs of 1024 x 1024 pixels every 2 seconds, 0, 1 and 2 workers.

    python benchmarks/data.py [--json FILE]

A step waits for its prompts, then sleeps in place of the model. Rows come from a JSONL file and images from disk; the
image processor is Qwen2.5-VL's, the tokenizer a tiny one. The first two steps are reported separately: the main process
builds the first window, and the second step waits until the workers have started. "release" is the time to free the
previous step's prompts, 376 MB of pixel values. Training spends this time too and does not count it as waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from PIL import Image
from transformers import Qwen2VLImageProcessor

from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.loader import PromptLoader, PromptSource
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.data.sampler import PromptSampler
from rl_vlm.data.samples import load_rows
from rl_vlm.tiny.build import build_tiny

NUM_ROWS = 48
PROMPTS_PER_STEP = 16
WIDTH = 1024
MODEL_SECONDS = 2.0
NUM_FIRST = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps that count, for each number of workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        source_of = make_source(Path(directory))
        results = [measure(*source_of, num_workers, options.steps) for num_workers in options.workers]
    print_table(results)
    if options.json:
        options.json.write_text(json.dumps({"results": results, **machine()}, indent=2) + "\n")


def make_source(directory: Path) -> tuple[PromptSource, DataConfig]:
    """Write rows and their images to `directory` and build the source that reads them."""
    lines = []
    for index in range(NUM_ROWS):
        picture(index).save(directory / f"{index}.jpg", quality=90)
        lines.append(json.dumps({"prompt": "How many cups are there?", "image": f"{index}.jpg", "solution": "3"}))
    (directory / "rows.jsonl").write_text("\n".join(lines))
    data = DataConfig(dataset_name=str(directory / "rows.jsonl"))
    checkpoint = str(build_tiny("qwen2_5_vl", directory / "model"))
    processor: Any = load_processor(checkpoint, ModelConfig(model_name_or_path=checkpoint), data)
    processor.image_processor = Qwen2VLImageProcessor()  # patches of 14 pixels, not those of the tiny model
    rows = load_rows(data, "train")
    return PromptSource(rows, list(range(len(rows))), PromptBuilder(processor, data)), data


def picture(seed: int) -> Image.Image:
    """Make an image of colour patches with some noise, whose JPEG is about as large as a photograph's."""
    generator = np.random.default_rng(seed)
    patches = np.kron(generator.integers(0, 256, (WIDTH // 16, WIDTH // 16, 3)), np.ones((16, 16, 1)))
    noisy = patches + generator.integers(-9, 10, patches.shape)
    return Image.fromarray(noisy.clip(0, 255).astype("uint8"))


def measure(source: PromptSource, data: DataConfig, num_workers: int, num_steps: int) -> dict[str, Any]:
    """Measure the seconds that steps wait for prompts and take to free them."""
    data = data.model_copy(update={"dataloader_num_workers": num_workers})
    sampler = PromptSampler(len(source.row_indices), PROMPTS_PER_STEP, seed=0)
    prefetcher = PromptLoader(source, sampler, steps_per_window=1, data=data)
    waits, releases, prompts = [], [], []
    try:
        for _ in range(NUM_FIRST + num_steps):
            start = time.perf_counter()
            fresh = prefetcher.prompts(sampler.next_step())
            received = time.perf_counter()
            prompts = fresh  # as in training, the previous window is freed once the next one has arrived
            waits.append(received - start)
            releases.append(time.perf_counter() - received)
            assert len(prompts) == PROMPTS_PER_STEP
            time.sleep(MODEL_SECONDS)
    finally:
        prefetcher.close()
    wait, release = sum(waits[NUM_FIRST:]) / num_steps, sum(releases[NUM_FIRST:]) / num_steps
    return {
        "dataloader_num_workers": num_workers,
        "first_waits": waits[:NUM_FIRST],
        "mean_wait": wait,
        "max_wait": max(waits[NUM_FIRST:]),
        "mean_release": release,
        "data_wait_fraction": wait / (wait + release + MODEL_SECONDS),
    }


def print_table(results: list[dict[str, Any]]) -> None:
    print(f"{PROMPTS_PER_STEP} rows with JPEGs of {WIDTH} x {WIDTH} pixels every {MODEL_SECONDS:g} s\n")
    print(
        f"{'workers':>7}  {'share of wait':>13}  {'wait':>8}  {'longest':>8}  {'release':>8}  {'first two waits':>18}"
    )
    for result in results:
        first = " ".join(f"{wait:6.2f} s" for wait in result["first_waits"])
        print(
            f"{result['dataloader_num_workers']:>7}  {result['data_wait_fraction']:>13.2%}"
            f"  {result['mean_wait'] * 1e3:>5.0f} ms  {result['max_wait'] * 1e3:>5.0f} ms"
            f"  {result['mean_release'] * 1e3:>5.0f} ms  {first:>18}"
        )


def machine() -> dict[str, Any]:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, PIL, np)}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"platform": platform.platform(), "cpu_count": os.cpu_count()},
    }


if __name__ == "__main__":
    main()
