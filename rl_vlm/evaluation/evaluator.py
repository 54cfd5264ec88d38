"""Sampling and scoring of held-out rows, each on exactly one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import torch
from tqdm import tqdm

from rl_vlm.config.schema import RunConfig
from rl_vlm.data import Rows, load_rows
from rl_vlm.engine import Engine
from rl_vlm.evaluation.directory import Chunk, EvaluationDirectory
from rl_vlm.evaluation.figures import summarise
from rl_vlm.generation import RolloutEngine
from rl_vlm.generation.openai import MessageBuilder
from rl_vlm.generation.sampling import sampling_of
from rl_vlm.prompts import PromptBuilder
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout_log import completion_rows
from rl_vlm.types import Group, Prompt, RewardTable, RolloutRequest, Sample, Sampling, ScoredGroup, TrainerState

ENDPOINT_ROUNDS = 4
"""Requests of a chunk, as a multiple of those at once: few wait for the slowest, and few are lost to a kill."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: metrics over all samples, and one row per completion."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


class Evaluator:
    """Evaluates a generator on all held-out rows."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        builder: PromptBuilder | MessageBuilder,
        generator: RolloutEngine,
        rewards: RewardSuite,
        rows: Rows | None = None,
    ) -> None:
        """`rows` are the held-out rows, where they are open already."""
        self.config = config
        self.engine = engine
        self.builder = builder
        self.generator = generator
        self.rewards = rewards
        self.rows = load_rows(config.data, "eval") if rows is None else rows
        rewards.check_columns(self.rows.sample(0).columns)
        self.sampling = evaluation_sampling(config)

    def run(
        self,
        state: TrainerState,
        directory: EvaluationDirectory | None = None,
        finished: Sequence[Chunk] = (),
        show_progress: bool = False,
    ) -> Evaluation:
        """Sample, score and summarise all rows but those that are `finished`. Every rank returns the same result.

        Each chunk is kept in `directory` as soon as it is done, where one is given.
        """
        mine = list(self.evaluate_share(state, directory, finished, show_progress))
        chunks = [*finished, *self.engine.gather(mine)]
        rows = sorted((row for chunk in chunks for row in chunk.rows), key=lambda r: (r["row"], r["completion_index"]))
        faults = sum((Counter(chunk.fault_counts) for chunk in chunks), Counter())
        metrics = summarise(rows, self.rewards.names, self.sampling.num_generations)
        return Evaluation(metrics | {f"reward_faults/{name}": float(faults[name]) for name in sorted(faults)}, rows)

    def evaluate_share(
        self, state: TrainerState, directory: EvaluationDirectory | None, finished: Sequence[Chunk], show_progress: bool
    ) -> Iterator[Chunk]:
        """This rank's chunks. They are cut before finished rows are left out, so that a batch never differs.

        Ranks go from chunk to chunk together: an error ends all, and ranks may have one generator between them.
        """
        done = {row["row"] for chunk in finished for row in chunk.rows}
        rank, num_ranks = self.engine.rank, self.engine.world_size
        size = prompts_per_chunk(self.config) * num_ranks
        mine = range(rank, len(self.rows), num_ranks)
        with Throughput(len(mine), sum(row in done for row in mine), show_progress) as throughput:
            for start in range(0, len(self.rows), size):
                everyones = range(len(self.rows))[start : start + size]
                if all(index in done for index in everyones):
                    continue
                indices = [index for index in everyones[rank::num_ranks] if index not in done]
                prompts = self.engine.together(partial(self.prompts, indices))
                chunk = self.engine.together(partial(self.evaluate_rows, indices, prompts, state, directory))
                throughput.add(len(indices), chunk)
                yield chunk

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """The prompts of dataset rows. Raises DataError, naming the row, for one that cannot be used."""
        return [self.builder.build(self.rows.sample(index)) for index in indices]

    def evaluate_rows(
        self,
        indices: Sequence[int],
        prompts: Sequence[Prompt],
        state: TrainerState,
        directory: EvaluationDirectory | None,
    ) -> Chunk:
        """The dataset rows `indices`, evaluated, and kept in `directory`."""
        requests = [RolloutRequest(f"evaluation/{prompt.sample.sample_id}", prompt) for prompt in prompts]
        groups = self.generator.generate(requests, self.sampling)
        if not groups:
            return Chunk([], {})
        table = self.rewards.score(groups, state)
        rows = completion_rows(state.global_step, scored_groups(groups, table, self.rewards.weights), table)
        per_sample = [
            {"row": index, **self.data_columns(index, prompt.sample, directory)}
            for index, prompt in zip(indices, prompts, strict=True)
        ]
        owners = [columns for columns in per_sample for _ in range(self.sampling.num_generations)]
        chunk = Chunk([columns | row for columns, row in zip(owners, rows, strict=True)], table.fault_counts)
        return chunk if directory is None else directory.keep(chunk)

    def data_columns(self, index: int, sample: Sample, directory: EvaluationDirectory | None) -> dict[str, Any]:
        """The sample's columns of text and numbers, as `data/<column>`, and where its images lie."""
        columns = {f"data/{name}": value for name, value in sample.columns.items() if is_plain(value)}
        if directory is not None:
            images = directory.image_references(self.rows.source[index], sample.images, self.rows.image_folder)
            columns["images"] = images
        return columns


def is_plain(value: Any) -> bool:
    """Whether a column's value is text, a number or nothing."""
    return value is None or isinstance(value, str | int | float)


def evaluation_sampling(config: RunConfig) -> Sampling:
    """How the completions of an evaluation are drawn."""
    return sampling_of(config, config.rollout.num_generations_eval, config.rollout.eval_temperature)


def prompts_per_chunk(config: RunConfig) -> int:
    """Prompts that are sampled, scored and kept at once: as many as the engine decodes side by side."""
    completions = config.rollout.max_num_seqs
    if config.evaluation.endpoint_url is not None:
        completions = ENDPOINT_ROUNDS * config.evaluation.endpoint_max_concurrency
    return max(1, completions // config.rollout.num_generations_eval)


def scored_groups(groups: Sequence[Group], table: RewardTable, weights: Sequence[float]) -> list[ScoredGroup]:
    """Groups with their weighted rewards; nothing is trained, so that advantages are 0."""
    rewards_PG = (table.scores_PGF * torch.tensor(weights)).nansum(-1).masked_fill(~table.valid_PG, torch.nan)
    return [
        ScoredGroup(
            group,
            scores_GF=table.scores_PGF[p],
            rewards_G=rewards_PG[p],
            advantages_G=torch.zeros(len(group.completions)),
            valid_G=table.valid_PG[p],
            has_variance=False,
        )
        for p, group in enumerate(groups)
    ]


class Throughput:
    """A bar on standard error: prompts that are done, and completions and tokens per second."""

    def __init__(self, total: int, num_done: int, show: bool) -> None:
        self.bar = tqdm(total=total, initial=num_done, unit="prompt", disable=None if show else True)
        self.start = monotonic()
        self.num_completions = self.num_tokens = 0

    def __enter__(self) -> Throughput:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def add(self, num_prompts: int, chunk: Chunk) -> None:
        """Advance by a chunk."""
        self.num_completions += len(chunk.rows)
        self.num_tokens += sum(row["completion_length"] or 0 for row in chunk.rows)
        seconds = monotonic() - self.start
        figures = {"completions/s": self.num_completions / seconds, "tokens/s": self.num_tokens / seconds}
        self.bar.set_postfix({name: f"{value:.1f}" for name, value in figures.items() if value}, refresh=False)
        self.bar.update(num_prompts)
