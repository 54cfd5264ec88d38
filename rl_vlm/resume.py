"""Saving a run so that a killed one goes on exactly: what belongs to a checkpoint beside the weights.

`rl_vlm/checkpoint.py` makes directories whole or absent; this module knows what a `Trainer` puts there.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_vlm import checkpoint
from rl_vlm.collector import Ready
from rl_vlm.config.schema import RolloutConfig
from rl_vlm.errors import CheckpointError, RLVLMError
from rl_vlm.in_flight import InFlight
from rl_vlm.loading import save_policy
from rl_vlm.window import Window

if TYPE_CHECKING:
    from rl_vlm.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far the run is; saved in checkpoints."""

    global_step: int = 0
    policy_version: int = 0
    """Updates of the weights; a skipped step makes none."""
    train_seconds: float = 0.0
    nonfinite_in_a_row: int = 0
    eval_before: dict[str, float] | None = None
    eval_latest: dict[str, float] | None = None
    best_step: int | None = None
    eval_best: dict[str, float] | None = None


def save_run(trainer: Trainer) -> None:
    """A checkpoint of the last complete step. Raises CheckpointError on every rank if the main one cannot write.

    A window that is sampled ahead is waited for: it is of weights that a resumed run has no more.
    """
    try:
        trainer.collector.finish_ahead()
    except RLVLMError as error:
        logger.warning("the window ahead could not be sampled, and will be sampled again: %s", error)
    ranks = trainer.engine.gather([rank_state(trainer)])
    path, progress = trainer.directory.path, trainer.progress

    def write_and_prune() -> None:
        if trainer.engine.is_main:
            checkpoint.write(path, progress.global_step, lambda directory: write_files(trainer, ranks, directory))
            best = None if progress.best_step is None else checkpoint.checkpoint_path(path, progress.best_step)
            checkpoint.prune(path, trainer.config.train.save_total_limit, best)

    trainer.engine.together(write_and_prune)
    trainer.sync_is_due = True


def rank_state(trainer: Trainer) -> dict[str, Any]:
    """What each rank has of its own: random states, the windows that are sampled, and the groups in flight."""
    window = trainer.window
    collector = trainer.collector
    return {
        "random": checkpoint.random_states(),
        "window": None if window is None or window.is_spent else window.state_dict(),
        "next_window": collector.ready and collector.ready.state_dict(),
        "in_flight": [one.state_dict() for one in collector.in_flight],
    }


def write_files(trainer: Trainer, ranks: list[dict[str, Any]], directory: Path) -> None:
    """All files of a checkpoint, with the states of all ranks."""
    save_policy(trainer.policy, trainer.processor, directory)
    if trainer.config.algorithm.sync_ref_model and trainer.reference and trainer.reference.frozen:
        save_policy(trainer.reference.frozen, trainer.processor, directory / "reference")
    state = {
        "progress": asdict(trainer.progress),
        "sampler": trainer.sampler.state_dict(),
        "world_size": len(ranks),
    }
    (directory / "trainer_state.json").write_text(json.dumps(state, indent=1))
    torch.save(trainer.engine.state_dict(), directory / "optimizer.pt")
    for rank, own_state in enumerate(ranks):
        torch.save(own_state, directory / f"rank_{rank}.pt")


def restore_run(trainer: Trainer, path: Path) -> None:
    """Go on from a checkpoint, in the middle of a generation window if it was saved there.

    The policy has its weights already. Raises CheckpointError for another number of processes or other data.
    """
    state = json.loads((path / "trainer_state.json").read_text())
    if state["world_size"] != trainer.engine.world_size:
        raise CheckpointError(
            f"{path} was written by {state['world_size']} processes and this run has {trainer.engine.world_size}; "
            "resume with as many"
        )
    trainer.progress = Progress(**state["progress"])
    trainer.sampler.load_state_dict(state["sampler"])
    trainer.engine.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
    rank = torch.load(path / f"rank_{trainer.engine.rank}.pt", weights_only=True)
    build = trainer.prefetcher.source.build
    trainer.window = Window.from_state(rank["window"], build) if rank["window"] else None
    trainer.collector.ready = Ready.from_state(rank["next_window"], build) if rank["next_window"] else None
    trainer.collector.in_flight = [InFlight.from_state(state, build) for state in rank["in_flight"]]
    check_in_flight(trainer.collector.in_flight, trainer.config.rollout, path)
    checkpoint.restore_random_states(rank["random"])


def check_in_flight(in_flight: list[InFlight], rollout: RolloutConfig, path: Path) -> None:
    """Raises CheckpointError where paused completions cannot go on by the settings of this run."""
    longest = max((one.request.num_begun_tokens for one in in_flight if not one.finished), default=0)
    if (in_flight and rollout.max_rollout_tokens is None) or longest >= rollout.max_completion_length:
        raise CheckpointError(
            f"{path} holds groups in flight, with paused completions of up to {longest} tokens, and this run has "
            f"rollout.max_rollout_tokens {rollout.max_rollout_tokens} and rollout.max_completion_length "
            f"{rollout.max_completion_length}; resume with the settings of the checkpoint's run"
        )
