"""The parts of a training run on one rank, built in the order of their dependencies.

processes ─ lock the directory, read the checkpoint ─ reward functions ─ rows ─► Data
policy, reference ─ optimizer ─ rollout engine ─ collector ─ evaluator ─► Trainer
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rl_vlm.algorithm.own_loss import check_own_loss
from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.random_states import seed_random_generators
from rl_vlm.config.batches import BatchSizes, batch_sizes, endless_warmup, total_optimizer_steps
from rl_vlm.config.changes import function_sources
from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.precision import with_precision
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows, fitting_rows
from rl_vlm.data.fingerprint import data_fingerprint
from rl_vlm.data.loader import PromptLoader, PromptSource
from rl_vlm.data.prompts import PromptBuilder, build_prompt, load_processor
from rl_vlm.data.sampler import PromptSampler
from rl_vlm.distributed.installation import check_installation
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks, joined
from rl_vlm.distributed.sign_of_life import SignOfLife
from rl_vlm.distributed.strategy import Strategy, select_strategy
from rl_vlm.distributed.trackers import Trackers
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.evaluation.evaluator import Evaluator, completions_per_chunk
from rl_vlm.log.completions import CompletionsLog
from rl_vlm.log.directory import RunDirectory
from rl_vlm.log.files import lock_directory
from rl_vlm.log.messages import batch_line, loading_line, parameters_line, rows_line
from rl_vlm.model.fingerprint import model_fingerprint
from rl_vlm.model.flex_kernels import with_fitting_attention
from rl_vlm.model.fused import fuse_layers
from rl_vlm.model.loading import initial_checkpoint, load_policy, share_weight_names
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference, add_initial_adapter, load_reference
from rl_vlm.model.sharding import (
    refuse_unlike_weights,
    refuse_unshardable,
    require_input_gradients,
)
from rl_vlm.model.vision import idle_sample
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.calibration import MicroBatchPeaks
from rl_vlm.passes.changes import append_change
from rl_vlm.passes.large_prompts import LargePrompts
from rl_vlm.passes.passes import Passes
from rl_vlm.passes.peaks import allocated_bytes
from rl_vlm.passes.recovery import Recovery
from rl_vlm.plan.auto import start_budget
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.balance import cost_of_groups
from rl_vlm.rollout.build import builder_for, gathering, training_engine
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.environments.build import TurnFormats, build_trajectories, checked_turns, load_functions
from rl_vlm.rollout.environments.contract import Toolbox
from rl_vlm.rollout.environments.driver import Trajectories
from rl_vlm.rollout.scoring import checked_rows, choose_forms
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.run.instrument import Instrument, MakeInstrument, Observed
from rl_vlm.run.resume import SavedRun
from rl_vlm.stages import Stage, Stages
from rl_vlm.trainer import Trainer
from rl_vlm.types import Progress, Prompt

if TYPE_CHECKING:
    from transformers import ProcessorMixin

NUM_PLANNED = 8
"""Number of rows whose prompts `micro_batch_tokens: auto` uses for its plan."""

NUM_LARGEST = 16
"""Number of rows with the most pixels, and of rows with the longest texts, that are checked against the budget."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """The rows, with the model's processor and the builder of their prompts."""

    usable: UsableRows
    """The training rows."""
    held_out: UsableRows | None
    initial: str
    """The checkpoint that the run starts from."""
    processor: ProcessorMixin
    builder: PromptBuilder
    turns: TurnFormats | None
    """How turns after the first are written, if the run has tools."""
    fingerprints: dict[str, str]
    """Fingerprints of the rows and of the initial checkpoint, on the main process only."""

    def largest_prompts(self) -> dict[str, Prompt]:
        """Return the prompts of the rows with the largest images and longest texts, by the names of the rows."""
        prompts = {}
        for index in self.usable.largest(NUM_LARGEST):
            with suppress(DataError):  # the error is raised when the row is drawn
                prompts[self.usable.rows.place(index)] = build_prompt(self.usable.rows, index, self.builder)
        return prompts

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts of the rows that can be built."""
        for index in self.usable.indices:
            with suppress(DataError):  # when the row is drawn, the error is raised or the row is left out
                yield build_prompt(self.usable.rows, index, self.builder)


@dataclass(frozen=True)
class Parts:
    """All parts of a run. `saved` is the checkpoint to restore; so far only the models have loaded it."""

    config: RunConfig
    """The settings, with the precision that this device takes by default."""
    ranks: Ranks
    strategy: Strategy
    directory: RunDirectory
    saved: SavedRun | None
    trackers: Trackers
    rewards: RewardSuite
    data: Data
    evaluator: Evaluator | None
    collector: Collector
    trainer: Trainer
    budget: TokenBudget
    instruments: list[Instrument]
    sources: dict[str, str]
    """Digests of the users' functions that checkpoints record, by setting."""


def build_parts(config: RunConfig, opened: ExitStack, instruments: Sequence[MakeInstrument] = ()) -> Parts:
    """Build the parts of a run; `opened` closes them. Raises RLVLMError if they cannot be built."""
    ranks = opened.enter_context(joined(config.train))
    with ranks.agree():
        check_installation(config)
        config = with_fitting_attention(with_precision(config, ranks.device.type), ranks.device)
        strategy = select_strategy(ranks, config)
        sizes = batch_sizes(config, ranks.world_size)
    directory = RunDirectory(Path(config.train.output_dir).absolute())  # a function may change the working directory
    saved = open_directory(config, directory, ranks, opened)
    with ranks.agree():
        trackers = Trackers(config.log, config.train.output_dir)
        opened.callback(trackers.close)
        seed_random_generators(config.train.seed)
        check_own_loss(config.algorithm)
        sources = function_sources(config)
        toolbox, rewards = load_functions(config)
        opened.callback(toolbox.close)
        opened.enter_context(rewards).check_weights()
    data = load_data(config, saved, rewards, toolbox, sizes, ranks)
    trajectories = trajectories_of(config, toolbox, data, rewards, ranks, opened)
    planned, memory_plan = start_budget(config, data.initial, ranks, planned_prompts(config, data, trajectories))
    with ranks.agree():
        observed = Observed(config, ranks, directory.path, memory_plan)
        made = [instrument for make in instruments if (instrument := make(observed)) is not None]
    stages = Stages(SignOfLife(), *made)
    with stages.run(Stage.LOAD):
        policy, reference = load_models(config, saved, data, strategy, ranks)
    for instrument in made:
        instrument.attach(policy)
    progress = Progress(total_optimizer_steps(config, sizes, len(data.usable)))
    if warning := endless_warmup(config.train, progress.max_steps):
        logger.warning("%s", warning)
    budget = TokenBudget(
        ranks, progress, policy.vision, planned, config.memory.micro_batch_tokens,
        partial(append_change, directory.path),
    )  # fmt: skip
    large_prompts = checked_large_prompts(data, budget, ranks)
    logger.info(batch_line(sizes, progress.max_steps))
    optimizer = Optimizer(strategy, policy.train(), config.train, progress.max_steps)
    before = allocated_bytes()
    engine = build_engine(config, policy, data, strategy, ranks)
    if measures_budget(config, planned, ranks):
        of_micro_batches = MicroBatchPeaks(observed.peaks, of_engine=allocated_bytes() - before)
        stages = stages.with_listener(of_micro_batches)
        budget.correct_by(of_micro_batches)
    cost = cost_of_groups(policy, budget.price, config.memory.prefix_sharing, has_reference=reference is not None)
    num_draws = progress.max_steps * sizes.prompts_per_step // sizes.num_iterations
    log = CompletionsLog(directory.path, ranks, config.log, min(num_draws, len(data.usable)))
    collector = Collector(
        config, ranks, build_loader(config, sizes, data, ranks, large_prompts), engine, rewards, log, cost, trajectories
    )
    opened.callback(collector.close)
    evaluator = build_evaluator(config, ranks, data, engine, rewards, log, trajectories)
    passes = Passes(config, ranks, policy, reference, optimizer, Recovery(ranks, budget, stages))
    trainer = Trainer(config, ranks, policy, reference, optimizer, collector, progress, passes, stages)
    return Parts(
        config, ranks, strategy, directory, saved, trackers, rewards, data, evaluator, collector, trainer, budget, made,
        sources,
    )  # fmt: skip


def planned_prompts(config: RunConfig, data: Data, trajectories: Trajectories | None) -> Iterator[Prompt]:
    """Yield the prompts of the first rows, as their environments start them. Nothing is built or reset before."""
    prompts = islice(data.prompts(), NUM_PLANNED)
    return prompts if trajectories is None else trajectories.starting_prompts(prompts, config.train.seed)


def checked_large_prompts(data: Data, budget: TokenBudget, ranks: Ranks) -> LargePrompts:
    """Check the prompts of the largest rows. Raises DataError if one exceeds the budget."""
    large_prompts = LargePrompts(budget, data.builder.smallest_pixels)
    with ranks.agree():
        if ranks.is_main:
            large_prompts.check(data.largest_prompts())
    return large_prompts


def measures_budget(config: RunConfig, planned: PlannedBudget, ranks: Ranks) -> bool:
    """Return whether the budget is from a memory plan for a GPU, and is corrected by measured peaks."""
    return config.memory.micro_batch_tokens == "auto" and planned.available is not None and ranks.device.type == "cuda"


def open_directory(config: RunConfig, directory: RunDirectory, ranks: Ranks, opened: ExitStack) -> SavedRun | None:
    """Lock the run directory until `opened` closes, and read the checkpoint to resume from, if any."""
    resumed = None
    with ranks.agree():
        if ranks.is_main:
            opened.enter_context(lock_directory(directory.path))
            directory.refuse_wrong_kinds()
            resumed = store.find(config.train.resume_from_checkpoint, directory.path)
            directory.refuse_another_run(config, resumed)
    resumed = ranks.gather([resumed])[0]
    with ranks.agree():
        if not directory.is_visible:
            raise ConfigError(
                f"train.output_dir: process {ranks.rank} does not see {directory.path}, where process 0 writes: all "
                "processes need the same directory, on a file system that they share"
            )
        return resumed and SavedRun.load(resumed, config, ranks.rank, ranks.world_size)


def load_data(
    config: RunConfig, saved: SavedRun | None, rewards: RewardSuite, toolbox: Toolbox, sizes: BatchSizes, ranks: Ranks
) -> Data:
    """Load and check the training rows, and choose the form in which each reward function gets completions."""
    names = ", ".join(entry.name for entry in data_sources(config.data, "train"))
    logger.info("loading the training data %s", names)
    usable, held_out = checked_rows(config, "train", rewards, ranks), None
    if config.data.eval_dataset_name is not None:
        held_out = checked_rows(config, "eval", rewards, ranks)
    initial = initial_checkpoint(config, ranks)
    processor = load_processor(initial, config.model, config.data)
    most_videos = max(rows.most_videos for rows in (usable, held_out) if rows is not None)
    builder, turns = builder_for(processor, config, initial, most_videos), None
    if config.rollout.has_tools:
        with ranks.agree():
            num_at_once = num_scored_at_once(config, sizes)
            turns = checked_turns(
                config, initial, builder, toolbox, usable.rows, rewards.reads_environments, num_at_once
            )  # fmt: skip
            if held_out is not None:
                toolbox.check_rows(held_out.rows)
        builder = turns.builder
    usable = fitting_rows(usable, builder, config.data.max_prompt_length)
    fingerprints = checked_fingerprints(config, saved, usable, initial, ranks)
    if saved is None or "rewards.reward_funcs" in saved.changes:
        choose_forms(rewards, usable, ranks)
    else:
        rewards.use_forms(saved.own_state["reward_forms"])
    logger.info(rows_line(len(usable), len(usable.dropped)))
    return Data(usable, held_out, initial, processor, builder, turns, fingerprints)


def checked_fingerprints(
    config: RunConfig, saved: SavedRun | None, usable: UsableRows, initial: str, ranks: Ranks
) -> dict[str, str]:
    """Compute the fingerprints of data and model, and compare them with the checkpoint's, if there is one."""
    fingerprints: dict[str, str] = {}
    with ranks.agree():
        if ranks.is_main:
            fingerprints = {
                "training data": data_fingerprint(usable.rows, usable.indices),
                "initial model": model_fingerprint(initial, config.model),
            }
            if saved:
                saved.check_fingerprints(fingerprints)
    return fingerprints


def load_models(
    config: RunConfig, saved: SavedRun | None, data: Data, strategy: Strategy, ranks: Ranks
) -> tuple[Policy, Reference | None]:
    """Load the policy and, if the KL term needs one, the reference; place both on the ranks' devices."""
    resumed = saved.path if saved else None
    if config.memory.activation_offloading and ranks.device.type == "cpu":
        raise ConfigError("memory.activation_offloading has no effect without a GPU; leave it out")
    idle_prompt = data.builder.build(idle_sample()) if strategy.is_sharded else None
    logger.info(loading_line(config, ranks.device))
    with ranks.agree():
        policy = load_policy(config, data.initial, resumed, idle_prompt, empty=strategy.loads_empty)
    if strategy.equal_calls:
        refuse_unlike_weights(policy, ranks)
        refuse_unshardable(policy, strategy.name)
        require_input_gradients(policy)
        share_weight_names(policy.transformer, ranks)
    add_initial_adapter(config, data.initial, policy)
    logger.info(parameters_line(policy))
    strategy.place(policy)
    fuse_layers(policy, config, strategy.equal_calls)
    with ranks.agree():
        reference = load_reference(config, data.initial, policy, resumed, strategy.loads_empty)
    if reference is not None and reference.frozen is not None:
        if strategy.equal_calls:
            share_weight_names(reference.frozen.transformer, ranks)
        strategy.place_frozen(reference.frozen)
        fuse_layers(reference.frozen, config, strategy.equal_calls)
    return policy, reference


def build_engine(config: RunConfig, policy: Policy, data: Data, strategy: Strategy, ranks: Ranks) -> SyncedEngine:
    """Build the rollout engine, which receives the policy's weights."""
    weights = PolicyWeights(policy, config.rollout.lora_sync)
    engine = training_engine(config, data.initial, weights, data.builder, ranks)
    return SyncedEngine(engine, weights, ranks, gathering(config, engine, strategy, ranks))


def num_scored_at_once(config: RunConfig, sizes: BatchSizes) -> int:
    """Return the largest number of completions that a rank scores together."""
    num_at_once = sizes.prompts_per_step * sizes.steps_per_window * sizes.num_generations // sizes.world_size
    num_at_once *= 1 + config.rollout.max_resampling_rounds  # replaced groups are kept until the window is scored
    if config.data.eval_dataset_name is not None:
        num_at_once = max(num_at_once, completions_per_chunk(config))
    return num_at_once


def trajectories_of(
    config: RunConfig, toolbox: Toolbox, data: Data, rewards: RewardSuite, ranks: Ranks, opened: ExitStack
) -> Trajectories | None:
    """Build the generator of trajectories, if the run has tools; `opened` closes it."""
    if data.turns is None:
        return None
    trajectories = build_trajectories(config, toolbox, data.turns, rewards.reads_environments, ranks)
    opened.callback(trajectories.close)
    return trajectories


def build_evaluator(
    config: RunConfig, ranks: Ranks, data: Data, engine: SyncedEngine, rewards: RewardSuite, log: CompletionsLog,
    trajectories: Trajectories | None,
) -> Evaluator | None:  # fmt: skip
    """Build the evaluator of the held-out rows, if there are any."""
    if data.held_out is None:
        return None
    folder = log.images.folder if log.images else None
    return Evaluator(
        config, ranks, data.builder, engine.engine, rewards, data.held_out, engine.gathered, folder, trajectories
    )  # fmt: skip


def build_loader(
    config: RunConfig, sizes: BatchSizes, data: Data, ranks: Ranks, large_prompts: LargePrompts
) -> PromptLoader:
    """Build the loader of this rank's prompts, with its sampler."""
    source = PromptSource(data.usable.rows, data.usable.indices, data.builder)
    sampler = PromptSampler(
        len(source.row_indices), sizes.prompts_per_step, config.train.seed, config.data.shuffle_dataset,
        ranks.rank, ranks.world_size, data.usable.shares(),
    )  # fmt: skip
    return PromptLoader(source, sampler, sizes.steps_per_window, config.data, large_prompts.check)
