"""TRL's trainer with tools and environments, whose turns are scripted, and the same trajectories of this project.

Only `_generate_single_turn` is replaced. TRL's loop of turns, its masks, rewards, advantages and loss run unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

from rl_vlm.algorithm.advantages import compute_advantages
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.samples import load_rows
from rl_vlm.data.turns import TurnFormat
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.environments.driver import Trajectories
from rl_vlm.rollout.environments.instances import Instances
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.environments.turns import TurnLimits
from rl_vlm.rollout.scoring import score_groups, weighted_rewards
from rl_vlm.types import Group, RolloutRequest, Sampling, ScoredGroup, TrainerState
from tests.helpers.scripted import Script, ScriptedEngine
from tests.helpers.templates import STOPS, builder_of

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer


def qwen_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def qwen3_5_call(name: str, **arguments: Any) -> str:
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def lfm_call(name: str, **arguments: Any) -> str:
    return f"<|tool_call_start|>[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]<|tool_call_end|>"


def gemma_call(name: str, **arguments: Any) -> str:
    return f"<|tool_call>call:{name}{{{','.join(f'{k}:{v}' for k, v in arguments.items())}}}<tool_call|>"


CALLS: dict[str, Callable[..., str]] = {
    "qwen3_vl": qwen_call, "qwen3_5_nothink": qwen3_5_call, "lfm2_2_5_vl": lfm_call, "gemma4_v4": gemma_call,
}  # fmt: skip
"""How calls are written in turns, by template."""


def published(template: str, directory: Path) -> Path:
    """A tiny checkpoint with a published chat template, and tokens for all that it writes."""
    processor = builder_of(template, directory).processor
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.resize_token_embeddings(len(processor.tokenizer), mean_resizing=False)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    settings = GenerationConfig.from_pretrained(directory)
    settings.eos_token_id = processor.tokenizer.convert_tokens_to_ids(STOPS[template])
    settings.save_pretrained(directory)
    return directory


@dataclass
class Scripted:
    """A completion of TRL's batch: its place in its group, its tokens so far, and the number of its next turn."""

    index: int
    tokens: list[int]
    turn: int = 0


class ScriptedTurns:
    """Stands for TRL's `_generate_single_turn`."""

    def __init__(self, tokenizer: Any, stop: str, script: Script, num_generations: int) -> None:
        self.tokenizer, self.stop, self.script, self.num = tokenizer, stop, script, num_generations
        self.members: list[Scripted] = []
        self.images: list[list[int]] = []
        """The numbers of images that each call got, by completion."""

    def __call__(
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> tuple[list[list[int]], None]:
        prompts = [list(ids) for ids in prompt_ids]
        if not self.members:
            self.members = [Scripted(i % self.num, ids) for i, ids in enumerate(prompts)]
        self.images.append([len(some or ()) for some in images or [()] * len(prompts)])
        waiting, turns = iter(self.members), []
        for ids in prompts:
            member = next(each for each in waiting if ids[: len(each.tokens)] == each.tokens)
            text = self.script(member.index, member.turn)
            new = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            turns.append([*new, self.tokenizer.convert_tokens_to_ids(self.stop)])
            member.tokens, member.turn = ids + turns[-1], member.turn + 1
        return turns, None


def trl_trainer(
    checkpoint: Path,
    output_dir: Path,
    reward_funcs: Sequence[Any] = (),
    script: Script | None = None,
    stop: str = "<|im_end|>",
    num_completions: int = 8,
    num_generations: int = 4,
    tools: Sequence[Any] | None = None,
    environment_factory: Any = None,
    **settings: Any,
) -> GRPOTrainer:
    """A trainer on CPU, in train mode, whose optimizer step is `num_completions` in one part."""
    from trl.trainer.grpo_config import GRPOConfig  # takes long: it imports vLLM
    from trl.trainer.grpo_trainer import GRPOTrainer

    args = GRPOConfig(
        output_dir=str(output_dir), use_cpu=True, bf16=False, report_to=[], gradient_checkpointing=False,
        per_device_train_batch_size=num_completions, gradient_accumulation_steps=1, num_generations=num_generations,
        **settings,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=list(reward_funcs) or None,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "unused"}]}]),
        processing_class=AutoProcessor.from_pretrained(checkpoint, padding_side="left"),
        tools=list(tools) if tools else None,
        environment_factory=environment_factory,
    )
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    if script is not None:
        turns: Any = ScriptedTurns(trainer._tokenizer, stop, script, num_generations)
        trainer._generate_single_turn = turns
    return trainer


def our_groups(
    config: RunConfig, template: str, script: Script, stop: str, num_generations: int = 4
) -> tuple[list[Group], ScriptedEngine]:
    """The groups of all rows of a run's data, with scripted turns, by this project's driver."""
    checkpoint, rollout = Path(config.model.model_name_or_path), config.rollout
    toolbox = load_toolbox(rollout)
    builder = PromptBuilder(AutoProcessor.from_pretrained(checkpoint), config.data)
    tokenizer = builder.processor.tokenizer
    stops = tokenizer.convert_tokens_to_ids(STOPS[template])
    turns = TurnFormat.choose(
        builder, stops, toolbox.all_schemas, rollout.tool_format, rollout.observation_role, takes_images=True
    )
    limits = TurnLimits(rollout.max_turns, rollout.max_turn_tokens, rollout.tool_timeout, False, 10**7, None)
    trajectories = Trajectories(toolbox, {None: turns}, limits, Instances(None))
    rows = load_rows(config.data, "train")
    prompts = [turns.builder.build(sample) for sample in rows]
    requests = [RolloutRequest(f"0/{i}", prompt) for i, prompt in enumerate(prompts)]
    engine = ScriptedEngine(tokenizer, stop, script)
    sampling = Sampling(num_generations, rollout.max_completion_length, temperature=1.0, seed=0)
    groups = trajectories.generate(engine, requests, sampling)
    trajectories.close()
    return groups, engine


def scored(config: RunConfig, groups: Sequence[Group]) -> list[ScoredGroup]:
    """The groups with the rewards and advantages of a run."""
    with RewardSuite(config.rewards, load_toolbox(config.rollout).rewarding) as rewards:
        rewards.use_forms(["messages" for _ in rewards.functions])
        table = rewards.score(groups, TrainerState(0, 1, 0.0))
        assert table.valid_PG.all(), table.fault_messages
        rewards_PG = weighted_rewards(table, rewards.weights)
        advantages = compute_advantages(rewards_PG, table.valid_PG, config.algorithm.scale_rewards, None)
        return score_groups(groups, table, rewards_PG, advantages, rewards.decisive)
