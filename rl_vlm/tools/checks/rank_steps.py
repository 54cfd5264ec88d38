"""Train for two steps of the run on all ranks of a launch, with the proof of rows, in a directory that they share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import DataConfig, RolloutConfig, RunConfig
from rl_vlm.errors import Finding, ModelError
from rl_vlm.model.files import local_directory
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.machine import existing
from rl_vlm.tools.checks.ranks import Exchange, compared, end_together
from rl_vlm.tools.checks.sharding import sharding
from rl_vlm.tools.checks.smoke import NUM_PROMPTS, REMEDY, error_of_training, proof_lines, short_settings
from rl_vlm.tools.checks.table import CheckCost, Subject


def steps_on_ranks(subject: Subject) -> Checking[None]:
    """Take two steps on all ranks, if no difference between them is an error and the run would start."""
    found = subject.value(compared)
    if found is None:
        return
    if found.differ:
        reason = "the ranks differ"
    elif not subject.value(sharding):
        reason = "the settings have errors"
    elif subject.cost < CheckCost.MODEL:
        reason = "--no-model is set"
    else:
        yield from two_steps_on_ranks(subject.config, found.exchange)
        return
    yield Note(f"two steps of the run on all ranks: {reason}", is_checked=False)


def two_steps_on_ranks(config: RunConfig, exchange: Exchange) -> Checking[None]:
    """Take two steps on the run's rows. All ranks must call this, and each yields the same findings."""
    if (reason := why_not_taken(config, exchange)) is not None:
        yield Note(f"two steps of the run on all ranks: {reason}", is_checked=False)
        return
    with shared_folder(config, exchange) as folder:
        error = error_of_training(settings_on_ranks(config, folder, exchange.world_size))
        yield from proof_lines(folder)
        end_together(exchange, "proven")
    if error is not None:
        yield Finding("error", "two steps of the run on all ranks", error, REMEDY)
        return
    yield Note(f"two steps of the run on {exchange.world_size} ranks, and a checkpoint")


def why_not_taken(config: RunConfig, exchange: Exchange) -> str | None:
    """Return why the steps are not taken, or None. The answer is the same on every rank."""
    if config.vllm.vllm_server_base_url:
        return "its servers, which others may use, would get new weights"
    exchange.put(f"model/{exchange.rank}", has_model(config.model.model_name_or_path, config.model.model_revision))
    without = [rank for rank in range(exchange.world_size) if not exchange.take(f"model/{rank}")]
    if without:
        return f"the model is not on the machine of rank {', '.join(map(str, without))}; download it first"
    return None


def has_model(name: str, revision: str) -> bool:
    """Return whether a model is on this machine, or a function writes it."""
    try:
        return names_function(name) or local_directory(name, revision) is not None
    except ModelError:
        return False


@contextmanager
def shared_folder(config: RunConfig, exchange: Exchange) -> Iterator[Path]:
    """Yield a new directory in `output_dir`, or in its first parent that exists. Rank 0 makes and deletes it."""
    parent = existing(Path(config.train.output_dir).absolute())
    if exchange.rank != 0:
        yield parent / exchange.take("folder") / "run"
        return
    made = Path(mkdtemp(prefix=".rl-vlm-doctor-", dir=parent))
    exchange.put("folder", made.name)
    try:
        yield made / "run"
    finally:
        shutil.rmtree(made, ignore_errors=True)


def settings_on_ranks(config: RunConfig, folder: Path, num_ranks: int) -> RunConfig:
    """Return the run's settings, changed to two steps on `NUM_PROMPTS` rows per rank, without an evaluation."""
    values = short_settings(config, folder, NUM_PROMPTS * num_ranks)
    values["data"] |= {"eval_dataset_name": None, "dataset_test_split": DataConfig().dataset_test_split}
    for name in ("num_generations_eval", "eval_temperature"):
        values["rollout"][name] = RolloutConfig.model_fields[name].default
    return RunConfig.model_validate(values)
