"""Two ranks with callbacks, of which one asks to stop; both save and push the model, and the first saves it once more.

A launcher starts `tests/integration/calls_on_ranks.py CHECKPOINT OUTPUT_DIR`. Events go to `OUTPUT_DIR/../RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rl_vlm import GRPOTrainer
from tests.helpers import tiny_run

RANK = int(os.environ["RANK"])
SETTINGS = ("num_generations", "max_completion_length", "prompts_per_step", "learning_rate", "micro_batch_tokens")


class Events(TrainerCallback):
    """Records each event with its step. On rank 1 alone, it asks to stop after step 2."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, bool]] = []

    def note(self, event: str, state: Any) -> None:
        self.found.append((event, state.global_step, state.is_world_process_zero))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("begin", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("evaluate", state)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("log", state)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("step", state)
        control.should_training_stop = RANK == 1 and state.global_step == 2

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("save", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.note("end", state)


def main(checkpoint: str, output_dir: Path) -> None:
    events = Events()
    trainer = GRPOTrainer(
        checkpoint, tiny_run.token_sum, None, tiny_run.rows(), tiny_run.held_out_rows(), callbacks=[events],
        output_dir=output_dir, max_steps=5, eval_steps=2, save_steps=9, disable_tqdm=True, async_save=False,
        push_to_hub=True, hub_model_id="owner/mine", hub_token="hf_secret",
        **{name: tiny_run.DEFAULTS[name] for name in SETTINGS},
    )  # fmt: skip
    summary = trainer.train()
    directory = trainer.save_model(output_dir.parent / "model")
    address = trainer.push_to_hub("By the call")
    if RANK == 0:  # calls of one rank wait for no other
        trainer.save_model(output_dir.parent / "of_rank_0")
    score = trainer.evaluate()["reward"]
    found = {"events": events.found, "steps": summary["optimizer_steps"], "checkpoint": trainer.checkpoint}
    found |= {"directory": str(directory), "address": address, "score": score}
    (output_dir.parent / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
