"""The two sides of benchmarks/whole_run.py: a `Run` of this project, and TRL's `train()` in a thread."""

from __future__ import annotations

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.shapes import SHAPES, build_checkpoint
from benchmarks.sides import head_on_completions_only
from examples.digits import digits
from rewards.answers.exact_match import exact_match
from rewards.formats.format_tags import format_tags
from rewards.text import completion_text
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.data.samples import load_rows
from rl_vlm.model.families import family_of
from rl_vlm.run.run import Run


def answer_score(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """Score the answer and, with a weight of 0.2, its format, as configs/digits.yaml does."""
    answers: list[Any] = exact_match(completions, solution)
    return [answer + 0.2 * form for answer, form in zip(answers, format_tags(completions), strict=True)]


def ascii_share(completions: Sequence[Any], **_: Any) -> list[float]:
    """Compute the share of ASCII characters. Random weights differ in it, and learn it."""
    texts = [completion_text(completion) for completion in completions]
    return [sum(character.isascii() for character in text) / max(1, len(text)) for text in texts]


class Clock:
    """Seconds by stage. Time in a stage within another counts for the inner one alone."""

    def __init__(self, device: str) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.open: list[str] = []
        self.since = 0.0
        self.wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def switch(self) -> None:
        """Give the time since the last switch to the open stage."""
        self.wait()
        now = time.perf_counter()
        if self.open:
            self.seconds[self.open[-1]] += now - self.since
        self.since = now

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block. Log-probs that are computed within training belong to it."""
        self.switch()
        self.open.append("training" if name == "log-probs" and "training" in self.open[-1:] else name)
        try:
            yield
        finally:
            self.switch()
            self.open.pop()

    def watch(self, owner: Any, **stages: str) -> None:
        """Time methods of an object: `watch(trainer, update="training")`."""
        for name, stage in stages.items():
            setattr(owner, name, self.timed(getattr(owner, name), stage))

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.stage(stage):
                return function(*args, **kwargs)

        return run


@dataclass(frozen=True)
class Case:
    """What both sides have in common."""

    args: argparse.Namespace
    directory: Path
    config: RunConfig

    @staticmethod
    def build(args: argparse.Namespace, directory: Path) -> Case:
        """Write the initial weights to `directory`, and the settings of a run from them."""
        checkpoint = directory / "model"
        if args.shape == "digits":
            digits.starting_model(checkpoint, 0)
            token_side = 8
        else:
            build_checkpoint(SHAPES[args.shape], checkpoint)
            token_side = 2 * SHAPES[args.shape][1]["patch_size"]
        return Case(args, directory, run_config(args, checkpoint, directory, args.image_tokens * token_side**2))

    @property
    def reward(self) -> Any:
        return reward_function(self.args)


def reward_function(args: argparse.Namespace) -> Callable[..., list[float]]:
    return answer_score if args.shape == "digits" else ascii_share


def run_config(args: argparse.Namespace, checkpoint: Path, directory: Path, min_pixels: int) -> RunConfig:
    """Return the settings of this project's side. `trl_settings` has the same for TRL."""
    completions = args.prompts_per_step * args.num_generations
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(checkpoint), "dtype": args.dtype, "attn_implementation": "sdpa"},
            "data": {
                "dataset_name": "examples.digits.digits:train_rows",
                "min_pixels": min_pixels,
                "shuffle_dataset": False,
            },
            "rewards": {"reward_funcs": [f"benchmarks.whole_run_sides:{reward_function(args).__name__}"]},
            "rollout": {
                "num_generations": args.num_generations,
                "max_completion_length": args.completion_tokens,
                "max_num_seqs": completions,
            },
            "algorithm": {"beta": args.beta, "num_iterations": args.num_iterations},
            "train": {
                "output_dir": str(directory / "ours"),
                "prompts_per_step": args.prompts_per_step,
                "max_steps": args.windows * args.num_iterations,
                "learning_rate": args.learning_rate,
                "lr_scheduler_type": "cosine",
                "save_steps": 0,
            },
            "memory": {
                "micro_batch_tokens": args.micro_batch_tokens,
                "gradient_checkpointing": args.gradient_checkpointing,
            },
            "log": {"log_completions": False, "disable_tqdm": True},
        }
    )


class Ours:
    """A run of this project, without its checkpoints."""

    def __init__(self, case: Case) -> None:
        self.updates = case.args.num_iterations
        self.run, self.clock = Run(case.config), Clock(case.args.device)
        self.run.save_if_due = lambda is_last: None
        trainer = self.run.trainer
        self.clock.watch(trainer.collector, generate="rollout", score="rewards")
        self.clock.watch(trainer, add_logprobs="log-probs", update="training")
        self.clock.watch(trainer.passes, gradients="training")

    def window(self) -> dict[str, float]:
        """Run a generation window and its updates; return the metrics of the last."""
        for _ in range(self.updates):
            line = self.run.next_step()
        return line

    def close(self) -> None:
        self.run.close()


def trl_settings(case: Case, row_tokens: int) -> dict[str, Any]:
    """Return TRL's settings. A micro-batch holds the groups that fit into the token budget, at least one."""
    args, train, algorithm = case.args, case.config.train, case.config.algorithm
    fitting = max(1, args.micro_batch_tokens // (args.num_generations * row_tokens))
    groups = max(n for n in range(1, fitting + 1) if args.prompts_per_step % n == 0)
    return {
        "per_device_train_batch_size": groups * args.num_generations,
        "gradient_accumulation_steps": args.prompts_per_step // groups,
        "num_generations": args.num_generations, "max_completion_length": args.completion_tokens,
        "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "loss_type": algorithm.loss_type, "beta": args.beta, "epsilon": algorithm.epsilon,
        "num_iterations": args.num_iterations, "scale_rewards": algorithm.scale_rewards,
        "max_steps": train.max_steps, "learning_rate": train.learning_rate, "seed": train.seed,
        "lr_scheduler_type": train.lr_scheduler_type, "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1, "adam_beta2": train.adam_beta2, "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm, "gradient_checkpointing": args.gradient_checkpointing,
        "shuffle_dataset": False, "use_cpu": args.device == "cpu", "bf16": args.dtype == "bfloat16",
        "save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip


class Trl(TrainerCallback):
    """TRL's `train()` in a thread, which waits at the beginning and after each window. Nothing is saved."""

    def __init__(self, case: Case) -> None:
        self.updates, self.device = case.args.num_iterations, case.args.device
        self.clock, self.metrics = Clock(self.device), {}
        self.turn, self.done, self.failure = threading.Semaphore(0), threading.Semaphore(0), None
        self.stopping = False
        self.trainer = make_trainer(case, self)
        methods = {
            "_prepare_inputs": "other", "_tokenize_prompts": "other", "_generate": "rollout",
            "_calculate_rewards": "rewards", "_get_per_token_logps_and_entropies": "log-probs",
            "training_step": "training", "_clip_grad_norm": "training",
        }  # fmt: skip
        self.clock.watch(self.trainer, **methods)
        self.thread = threading.Thread(target=self.train, daemon=True)
        self.thread.start()

    def train(self) -> None:
        try:
            with head_on_completions_only() if self.device == "cpu" else nullcontext():
                self.trainer.train()
        except Exception as error:
            self.failure = error
        self.done.release()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.watch(kwargs["optimizer"], step="training")
        self.turn.acquire()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Wait for the next turn after the last update of a window."""
        if "train_runtime" in logs or self.stopping:
            return
        self.metrics = logs if "reward" in logs else self.metrics
        if state.global_step % self.updates == 0:
            self.done.release()
            self.turn.acquire()
            control.should_training_stop |= self.stopping

    def window(self) -> dict[str, float]:
        """Let the thread run until its window is done; return the window's metrics. Raises what it raised."""
        self.turn.release()
        self.done.acquire()
        if self.failure:
            raise self.failure
        return self.metrics

    def close(self) -> None:
        self.stopping = True
        self.turn.release()
        self.thread.join()


def make_trainer(case: Case, callback: TrainerCallback) -> Any:
    """Build a `GRPOTrainer` with the same weights, processor, rows and reward function."""
    from accelerate.state import AcceleratorState
    from datasets import Dataset
    from transformers import AutoModelForImageTextToText, PrinterCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    AcceleratorState._reset_state()  # which has the precision of this project's side: it calls autocast itself
    config, checkpoint = case.config, case.config.model.model_name_or_path
    processor: Any = load_processor(checkpoint, config.model, config.data)
    prompt = PromptBuilder(processor, config.data).build(load_rows(config.data, "train")[0])
    settings = trl_settings(case, len(prompt.token_ids) + case.args.completion_tokens)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, attn_implementation="sdpa", dtype=torch.float32)
    settings["generation_kwargs"] = {"suppress_tokens": family_of(model.config).banned_token_ids(model.config)}
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in digits.train_rows()]
    trainer: Any = GRPOTrainer(
        model=model,
        reward_funcs=[case.reward],
        args=GRPOConfig(output_dir=str(case.directory / "trl"), **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        callbacks=[callback],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
