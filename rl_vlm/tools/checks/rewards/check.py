"""Check the reward functions of a run on rows of its data."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_vlm.config.schema import DataConfig, RewardsConfig
from rl_vlm.data.samples import Rows, load_rows
from rl_vlm.errors import DataError, Finding
from rl_vlm.reward.golds import spread_over
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.rewards.findings import findings_of, unlike_scales
from rl_vlm.tools.checks.rewards.measure import Measured, measure

if TYPE_CHECKING:
    from rl_vlm.types import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardCheck:
    """Result of a check."""

    functions: list[Measured]
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)


def check_rewards(data_config: DataConfig, rewards: RewardsConfig, num_rows: int) -> RewardCheck:
    """Score made-up completions of up to `num_rows` training rows, evenly spread, with each reward function.

    Raises DataError if no row can be read, and RewardError if a function cannot be loaded or lacks a column.
    """
    data = load_rows(data_config, "train")
    with RewardSuite(rewards) as suite:
        suite.check_columns(data.columns)
        indices, samples = read_samples(data, num_rows)
        suite.use_forms(suite.find_forms(lambda applies: next((s for s in samples if applies(s.columns)), samples[0])))
        checked = [reward for reward in suite.functions if not reward.asks_a_model]
        for reward in suite.functions:
            if reward.asks_a_model:
                logger.warning("%s asks a model for each completion, and is left out", reward.name)
        functions = [measure(reward, indices, samples, data.columns) for reward in checked]
    findings = [finding for each in functions for finding in findings_of(each)]
    return RewardCheck(functions, [*findings, *unlike_scales(functions)])


def read_samples(data: Rows, num_rows: int) -> tuple[list[int], list[Sample]]:
    """Read up to `num_rows` rows, evenly spread over the data. Leave out rows that cannot be read."""
    spread = spread_over(range(len(data)), num_rows)
    found: list[tuple[int, Sample]] = []
    problems: list[str] = []
    for index in spread:
        try:
            found.append((index, data[index]))
        except DataError as error:
            problems.append(str(error))
    if problems:
        logger.warning("%d rows cannot be read and are left out, the first because: %s", len(problems), problems[0])
    if not found:
        raise DataError(f"{data.name}: none of the {len(spread)} rows can be read. {problems[0]}")
    return [index for index, _ in found], [sample for _, sample in found]
