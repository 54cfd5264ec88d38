"""Sampling and scoring of held-out rows, each on exactly one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from rl_vlm.algorithm.advantages import Advantages
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import DroppedRow, UsableRows, fitting_rows
from rl_vlm.data.prompts import PromptBuilder, build_prompt
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import RewardError, RolloutError
from rl_vlm.evaluation.directory import Chunk, EvaluationDirectory
from rl_vlm.evaluation.figures import summarise
from rl_vlm.log.completions import columns_of, completion_rows, keep_observations
from rl_vlm.log.files import disk_errors
from rl_vlm.log.images import MOST_HELD_OUT, PromptImages
from rl_vlm.log.metrics import reward_faults
from rl_vlm.log.progress_bar import ProgressBar
from rl_vlm.reward.suite import NOT_APPLICABLE, RewardSuite
from rl_vlm.rollout.endpoint import MessageBuilder
from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.rollout.environments.driver import Trajectories, generated
from rl_vlm.rollout.proving import EngineCheck
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.rollout.scoring import failing, score_groups, weighted_rewards, without_variance
from rl_vlm.types import FaultKey, Group, Prompt, RewardTable, RolloutRequest, Sampling, ScoredGroup, TrainerState

ENDPOINT_ROUNDS = 4
"""Requests per chunk / concurrent requests. If higher, a kill loses more work. If lower, more wait for the slowest."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation: metrics over all samples, and one row per completion."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    dropped: list[DroppedRow] = field(default_factory=list)
    num_without_variance: int = 0
    """Number of groups that would have no advantage other than 0 in training."""


class Evaluator:
    """Evaluates a generator on all held-out rows."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        builder: PromptBuilder | MessageBuilder,
        engine: RolloutEngine,
        rewards: RewardSuite,
        usable: UsableRows,
        gathered: Callable[[], AbstractContextManager[None]] = nullcontext,
        image_folder: Path | None = None,
        trajectories: Trajectories | None = None,
        check: EngineCheck | None = None,
    ) -> None:
        """`usable` are the held-out rows.

        The engine generates in the context `gathered()`. All ranks open it together. Images of some prompts are written
        to `image_folder`, if given. `trajectories` generates completions of several turns, if there are tools.
        `check` proves the engine's model with the first groups.
        """
        self.gathered = gathered
        self.config = config
        self.ranks = ranks
        self.builder = builder
        self.engine = engine
        self.rewards = rewards
        self.trajectories = trajectories
        self.check = check
        limit = config.data.max_prompt_length
        self.usable = fitting_rows(usable, builder, limit) if isinstance(builder, PromptBuilder) else usable
        self.rows = self.usable.rows
        self.sampling = evaluation_sampling(config)
        num_prompts = len(self.usable.indices)
        self.images = PromptImages(image_folder, num_prompts, MOST_HELD_OUT) if image_folder else None

    def run(
        self,
        state: TrainerState,
        directory: EvaluationDirectory | None = None,
        finished: Sequence[Chunk] = (),
        show_progress: bool = False,
    ) -> Evaluation:
        """Sample and score all rows except the `finished` ones, and summarise all. All ranks return the same result.

        Each chunk is written to `directory`, if given, as soon as it is complete.
        """
        mine = self.evaluate_share(state, directory, finished, show_progress)
        chunks = [*finished, *self.ranks.gather(mine)]
        rows = sorted((row for chunk in chunks for row in chunk.rows), key=lambda r: (r["row"], r["completion_index"]))
        faults = sum((Counter(chunk.fault_counts) for chunk in chunks), Counter())
        metrics = summarise(rows, self.rewards.solved_from, self.sampling.num_generations)
        metrics |= {f"reward_faults/{name}": float(faults[name]) for name in sorted(faults)}
        return Evaluation(metrics, rows, self.usable.dropped, sum(chunk.num_without_variance for chunk in chunks))

    def evaluate_share(
        self, state: TrainerState, directory: EvaluationDirectory | None, finished: Sequence[Chunk], show_progress: bool
    ) -> list[Chunk]:
        """Evaluate this rank's chunks. Their boundaries do not depend on finished rows, so batches are always the same.

        Ranks go from chunk to chunk together: an error on one ends all, and ranks may share one engine.
        """
        done = {row["row"] for chunk in finished for row in chunk.rows}
        rank, num_ranks = self.ranks.rank, self.ranks.world_size
        size = prompts_per_chunk(self.config) * num_ranks
        indices = self.usable.indices
        mine = indices[rank::num_ranks]
        num_done, chunks, throughput = sum(row in done for row in mine), [], Throughput(monotonic())
        plain, silent = self.config.log.disable_tqdm, not show_progress
        with ProgressBar(num_done, len(mine), "prompt", plain, silent, "evaluation") as bar:
            for start in range(0, len(indices), size):
                everyones = indices[start : start + size]
                if all(index in done for index in everyones):
                    continue
                due = [index for index in everyones[rank::num_ranks] if index not in done]
                with self.ranks.agree():
                    prompts = self.prompts(due)
                with self.ranks.agree(), self.gathered():
                    chunk = self.evaluate_rows(due, prompts, state, directory)
                chunks.append(chunk)
                num_done += len(due)
                bar.show(num_done, throughput.add(chunk))
        return chunks

    def prompts(self, indices: Sequence[int]) -> list[Prompt]:
        """Build the prompts of dataset rows. Raises DataError with the row's name if a row cannot be used."""
        return [build_prompt(self.rows, index, self.builder) for index in stop.checked(indices)]

    def evaluate_rows(
        self,
        indices: Sequence[int],
        prompts: Sequence[Prompt],
        state: TrainerState,
        directory: EvaluationDirectory | None,
    ) -> Chunk:
        """Evaluate the dataset rows `indices`, and write them to `directory`, if given."""
        requests = [RolloutRequest(f"evaluation/{prompt.sample.sample_id}", prompt) for prompt in prompts]
        groups = generated(self.engine, self.trajectories, requests, self.sampling)
        check_sampled(groups)
        if not groups:
            return Chunk([], {})
        if self.check is not None and self.check.is_due:
            self.check.run(groups)
        table = self.rewards.score(groups, state)
        if self.trajectories is not None:
            self.trajectories.release()
        scored = untrained(groups, table, self.rewards.weights)
        rows = completion_rows(state.global_step, scored, table)
        images = self.images if directory is None else directory.images
        if images is not None:
            with disk_errors(images.folder):
                keep_observations(rows, scored, images)
        columns = [
            {"row": index, **columns}
            for index, group in zip(indices, groups, strict=True)
            for columns in columns_of(group, images)
        ]
        equal = without_variance(groups, table, self.rewards.weights, self.config.algorithm)
        rows = [of_data | row for of_data, row in zip(columns, rows, strict=True)]
        chunk = Chunk(rows, {str(key): num for key, num in table.fault_counts.items()}, len(equal))
        return chunk if directory is None else directory.write_chunk(chunk)


def check_sampled(groups: Sequence[Group]) -> None:
    """Raise RolloutError if the last server was lost, so that the samples can be evaluated again."""
    for completion in (each for group in groups for each in group.completions):
        if completion.fault and completion.fault.kind == "server":
            raise RolloutError(completion.fault.message)


def check_rewarded(metrics: Mapping[str, float]) -> None:
    """Raise RewardError if reward functions failed and no completion of the evaluation has a reward."""
    faults = {name: count for name, count in reward_faults(metrics).items() if name != NOT_APPLICABLE}
    if faults and "reward" not in metrics:
        counts = ", ".join(f"{name} {count:.0f}" for name, count in faults.items())
        causes = failing(map(FaultKey.read, faults))
        raise RewardError(
            f"none of the {metrics['num_completions']:.0f} completions of the evaluation has a reward, because "
            f"{causes} failed: {counts}. The log has the first fault of each kind with its place."
        )


def evaluation_sampling(config: RunConfig) -> Sampling:
    """Build the sampling settings of an evaluation."""
    return sampling_params(config, config.rollout.num_generations_eval, config.rollout.eval_temperature)


def prompts_per_chunk(config: RunConfig) -> int:
    """Return the number of prompts that fill the engine. They are sampled, scored and written at once."""
    completions = config.rollout.max_num_seqs
    if config.evaluation.endpoint_url is not None:
        completions = ENDPOINT_ROUNDS * config.evaluation.endpoint_max_concurrency
    return max(1, completions // config.rollout.num_generations_eval)


def completions_per_chunk(config: RunConfig) -> int:
    """Return the number of completions of a chunk."""
    return prompts_per_chunk(config) * config.rollout.num_generations_eval


def untrained(groups: Sequence[Group], table: RewardTable, weights: Sequence[float]) -> list[ScoredGroup]:
    """Add rewards, and advantages of 0, to groups that are not trained on."""
    rewards_PG = weighted_rewards(table, weights)
    none = Advantages(torch.zeros_like(rewards_PG), torch.zeros(len(groups), dtype=torch.bool))
    return score_groups(groups, table, rewards_PG, none)


@dataclass
class Throughput:
    """Completions and tokens per second since the start."""

    start: float
    num_completions: int = 0
    num_tokens: int = 0

    def add(self, chunk: Chunk) -> dict[str, str]:
        """Count a chunk, and return the figures so far. Tokens are left out if their number is unknown."""
        self.num_completions += len(chunk.rows)
        self.num_tokens += sum(row["completion_length"] or 0 for row in chunk.rows)
        seconds = monotonic() - self.start
        figures = {"completions/s": self.num_completions / seconds, "tokens/s": self.num_tokens / seconds}
        return {name: f"{value:.1f}" for name, value in figures.items() if value}
