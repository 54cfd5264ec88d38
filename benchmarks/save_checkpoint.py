"""How long training waits for a checkpoint: `python -m benchmarks.save_checkpoint [--shape medium]`.

Saves a model with its optimizer twice: while training waits, and behind training steps. A step is a forward and a
backward pass of one small group, and an update of all weights. Prints the seconds that the main thread spends on a
checkpoint, and how much slower the steps beside it are.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.flops import Workload
from benchmarks.shapes import SHAPES, build_checkpoint, make_group, make_prompt, micro_batch
from rl_vlm.checkpoint.writer import CheckpointFiles, CheckpointWriter
from rl_vlm.config.schema import ModelConfig, RunConfig, TrainConfig
from rl_vlm.data.prompts import load_processor
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.optimizer_files import OptimizerFiles
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.loading import load_policy
from rl_vlm.model.saving import PolicyFiles
from rl_vlm.types import Forward

WORK = Workload(image_tokens=16, text_tokens=40, completion_tokens=16, num_generations=2)
NUM_STEPS = 5
"""Steps that are timed without a checkpoint beside them."""


class Training:
    """A model in training."""

    def __init__(self, folder: Path, shape: str) -> None:
        self.ranks = Ranks()
        model = str(build_checkpoint(SHAPES[shape], folder / "model"))
        config = RunConfig(model=ModelConfig(model_name_or_path=model))
        self.policy = load_policy(config, model).train()
        self.processor = load_processor(model, config.model, config.data)
        train = TrainConfig(output_dir=str(folder))
        self.optimizer = Optimizer(DDP(self.ranks, 1.0), self.policy, train, num_steps=100)
        prompt = make_prompt(Path(model), WORK, SHAPES[shape])
        self.batch = micro_batch([make_group(prompt, WORK)], shared=True)

    def step(self) -> float:
        """Take a step, and return its seconds."""
        start = time.perf_counter()
        (-self.policy(Forward(self.batch)).logprobs_NT.mean()).backward()
        self.optimizer.torch_optimizer.step()
        self.optimizer.torch_optimizer.zero_grad()
        return time.perf_counter() - start

    def files(self) -> CheckpointFiles:
        """Copy what a checkpoint holds."""
        model, moments = (
            PolicyFiles(self.policy, self.processor, self.ranks),
            OptimizerFiles(self.optimizer, self.ranks),
        )
        return CheckpointFiles([("", model), ("", moments)], {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="medium", choices=SHAPES)
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        training = Training(Path(name), options.shape)
        training.step()  # makes the moments
        alone = [training.step() for _ in range(NUM_STEPS)]
        parameters = sum(parameter.numel() for parameter in training.policy.parameters())
        print(f"{parameters / 1e6:.0f}M parameters, {torch.get_num_threads()} threads; a step: {text(alone)}")
        for in_background in (False, True):
            writer, beside = CheckpointWriter(Path(name), training.ranks, in_background), []
            start = time.perf_counter()
            writer.write(1 + in_background, training.files, lambda: None)
            while writer.pending:
                beside.append(training.step())
                writer.continue_if_ready()
            seconds = time.perf_counter() - start
            how = f"behind {len(beside)} steps: {text(beside)} each" if in_background else "while training waits"
            print(f"{how}; complete after {seconds:.1f} s, of which training waited {writer.take_seconds():.1f} s")
            writer.close()


def text(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s"


if __name__ == "__main__":
    main()
