"""The states in a run's checkpoint, and checks that the settings, data and model of a resumed run fit them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl_vlm.config.batches import batch_sizes, settings_that_keep
from rl_vlm.config.changes import (
    OF_BATCHES,
    changed_settings,
    changed_sources,
    flat_settings,
    refused_changes,
)
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError
from rl_vlm.passes.budget import TokenBudget
from rl_vlm.rollout.redistribute import redistributed
from rl_vlm.run.history import Record
from rl_vlm.types import Progress

logger = logging.getLogger(__name__)


def state_files(
    config: RunConfig,
    progress: Progress,
    budget: TokenBudget,
    record: Record,
    fingerprints: Mapping[str, str],
    sources: Mapping[str, str],
    own_states: Sequence[Mapping[str, Any]],
) -> dict[str, bytes]:
    """Return the files that `SavedRun.load` reads, by name.

    `sources` is the result of `function_sources` at the start of the run. `own_states` has a state per rank.
    """
    sizes = batch_sizes(config, len(own_states))
    state = {
        "progress": asdict(progress),
        "budget": budget.state_dict(),
        "record": asdict(record),
        "world_size": len(own_states),
        "prompts_per_step": sizes.prompts_per_step,
        "steps_per_window": sizes.steps_per_window,
        "settings": flat_settings(config),
        "sources": dict(sources),
        "fingerprints": dict(fingerprints),
    }
    files = {"trainer_state.json": json.dumps(state, indent=1).encode()}
    for rank, own_state in enumerate(own_states):
        content = io.BytesIO()
        torch.save(own_state, content)
        files[f"rank_{rank}.pt"] = content.getvalue()
    return files


@dataclass(frozen=True)
class SavedRun:
    """A run's state in a checkpoint, as one rank reads it. Weights and optimizer are read later."""

    path: Path
    state: dict[str, Any]
    """Content of `trainer_state.json`."""
    own_state: dict[str, Any]
    """The rank's random states, the state of its collector, and the forms of the reward functions.

    The random states are None if the checkpoint has none for this rank."""
    changes: dict[str, str]
    """The settings that differ from the saved run's, as `old -> new`."""

    @classmethod
    def load(cls, path: Path, config: RunConfig, rank: int, world_size: int) -> SavedRun:
        """Read a checkpoint, and log changed settings, which apply from now on.

        Raises CheckpointError if another version wrote it, if a changed setting cannot be applied, or if the batch
        would change on this number of processes.
        """
        state = json.loads((path / "trainer_state.json").read_text())
        if "budget" not in state:
            raise CheckpointError(f"{path} was written by an earlier version of rl-vlm; resume it with that one")
        own_state = read_own_state(path, state["world_size"], rank, world_size)
        changes = changed_sources(state.get("sources", {}), config) | changed_settings(state["settings"], config)
        saved = cls(path, state, own_state, changes)
        saved.check_settings(world_size, keeps_best=config.train.load_best_model_at_end)
        if state["world_size"] != world_size:
            saved.check_batch(config, world_size)
        return saved

    @property
    def step(self) -> int:
        return self.state["progress"]["global_step"]

    @property
    def last_line(self) -> int:
        """Return the last step with complete metrics: the one before the saved step if its evaluation failed."""
        return self.step - (self.state["record"]["unevaluated"] is not None)

    @property
    def holds_completions(self) -> bool:
        """Return whether completions were generated before the checkpoint and are trained on after it."""
        collector = self.own_state["collector"]
        return any(collector[part] for part in ("window", "next_window", "in_flight"))

    def check_settings(self, world_size: int, keeps_best: bool) -> None:
        """Log changed settings, which apply from now on. Raise CheckpointError if one of them cannot change.

        On another number of processes, `check_batch` checks the batch sizes instead.
        """
        same_ranks = self.state["world_size"] == world_size
        changes = self.changes if same_ranks else {n: c for n, c in self.changes.items() if n not in OF_BATCHES}
        if refused := refused_changes(changes, self.holds_completions, keeps_best):
            between = " Checkpoints between two windows hold no completions." if self.holds_completions else ""
            lines = "\n".join(refused)
            raise CheckpointError(
                f"{self.path} cannot be resumed with changed settings:\n{lines}\nSet them back, or start a new run "
                f"with model.model_name_or_path={self.path} and a new train.output_dir.{between}"
            )
        for name, change in self.changes.items():
            logger.warning("resumed with a changed setting: %s %s", name, change)

    def check_batch(self, config: RunConfig, world_size: int) -> None:
        """Raise CheckpointError if the prompts per step or the steps per window would differ from the saved run's."""
        prompts, steps = self.state["prompts_per_step"], self.state["steps_per_window"]
        sizes = batch_sizes(config, world_size)
        if (sizes.prompts_per_step, sizes.steps_per_window) == (prompts, steps):
            return
        settings = settings_that_keep(prompts, steps, config, world_size)
        way_out = (
            f"Set {', '.join(f'train.{name}: {value}' for name, value in settings.items())} to keep the batch"
            if settings
            else f"Choose a number of processes that divides {prompts}"
        )
        raise CheckpointError(
            f"{self.path} was written by {self.state['world_size']} processes, with {prompts} prompts per optimizer "
            f"step and {steps} steps per generation window. This run has {world_size} processes, and its "
            f"settings make {sizes.prompts_per_step} and {sizes.steps_per_window}. {way_out}."
        )

    def check_fingerprints(self, present: Mapping[str, str]) -> None:
        """Raise CheckpointError if the training data or the initial model differ from the saved run's."""
        changed = [name for name in self.changes if name.startswith(("data.", "model."))]
        settings = f" These settings have changed: {', '.join(changed)}." if changed else ""
        for name, saved in self.state["fingerprints"].items():
            if present[name] != saved:
                raise CheckpointError(
                    f"{self.path} cannot be resumed: the {name} has changed since it was written ({saved}, now "
                    f"{present[name]}).{settings} Restore it, or start a new run with "
                    f"model.model_name_or_path={self.path} and a new train.output_dir."
                )


def read_own_state(path: Path, num_saved: int, rank: int, num_ranks: int) -> dict[str, Any]:
    """Read a rank's own state from a checkpoint of `num_saved` ranks.

    If the run has another number of ranks, distribute the collectors' states among them. A rank without a saved state
    gets no random states.
    """
    if num_saved == num_ranks:
        return torch.load(path / f"rank_{rank}.pt", weights_only=True)
    states = [torch.load(path / f"rank_{r}.pt", weights_only=True) for r in range(num_saved)]
    collector = redistributed([state["collector"] for state in states], rank, num_ranks)
    return {**states[0], "collector": collector, "random": states[rank]["random"] if rank < num_saved else None}
