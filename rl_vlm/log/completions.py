"""`completions/completions_00000.parquet`: every completion of a generation window, with its rewards.

The number is the optimizer step, from 0, that the window was generated for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config.schema import LogConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.files import atomic_write, disk_errors
from rl_vlm.types import Completion, Prompt, RewardTable, ScoredGroup, ServedCompletion

if TYPE_CHECKING:
    import pyarrow


class CompletionsLog:
    """Writes and prints the completions of each generation window."""

    def __init__(self, output_dir: Path, ranks: Ranks, log: LogConfig) -> None:
        self.output_dir = output_dir
        self.ranks = ranks
        self.writes = log.log_completions
        self.num_to_print = log.num_completions_to_print

    def write(self, step: int, groups: Sequence[ScoredGroup], table: RewardTable) -> None:
        """Write the groups of all ranks, generated for optimizer step `step`. Raises CheckpointError on disk errors."""
        if not self.writes and not self.num_to_print:
            return
        rows = self.ranks.gather(completion_rows(step, groups, table))
        with self.ranks.agree(), disk_errors(self.output_dir):
            if self.ranks.is_main:
                print_rows(rows[: self.num_to_print])
                if self.writes:
                    write_rows(window_path(self.output_dir, step), rows)


def completion_rows(step: int, groups: Sequence[ScoredGroup], table: RewardTable) -> list[dict[str, Any]]:
    """Build a row per completion. A reward is None if it does not apply or failed, a length if it is not known."""
    return [
        {
            "step": step,
            "group_id": scored.group.group_id,
            "sample_id": scored.group.prompt.sample.sample_id,
            "completion_index": g,
            "policy_version": scored.group.policy_version,
            "prompt": prompt_text(scored.group.prompt),
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_length": len(scored.group.prompt.token_ids) or None,
            "completion_length": num_tokens(completion),
            **{name: number(scored.scores_GF[g, f].item()) for f, name in enumerate(table.names)},
            "reward": number(scored.rewards_G[g].item()),
            "advantage": scored.advantages_G[g].item(),
            **{name: column[p][g] for name, column in table.breakdown.items()},
        }
        for p, scored in enumerate(groups)
        for g, completion in enumerate(scored.group.completions)
    ]


def num_tokens(completion: Completion) -> int | None:
    return completion.num_tokens if isinstance(completion, ServedCompletion) else len(completion.token_ids)


def number(value: float) -> float | None:
    """Return the value, or None for NaN."""
    return None if value != value else value


def prompt_text(prompt: Prompt) -> str:
    """Return the messages of a prompt as plain text, images as `<image>`."""
    lines = []
    for message in prompt.sample.messages:
        blocks = message["content"]
        texts = ["<image>" if block["type"] == "image" else block["text"] for block in blocks]
        lines.append(f"{message['role']}: {' '.join(texts)}")
    return "\n".join(lines)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a parquet file completely or not at all. A column is None in rows that do not have it."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: arrow_column([row.get(name) for row in rows]) for name in names})
    with atomic_write(path) as unfinished:
        pyarrow.parquet.write_table(table, unfinished)


def arrow_column(values: list[Any]) -> pyarrow.Array:
    """Convert values to an Arrow array, of text if reward functions logged types that Arrow cannot combine."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except pyarrow.ArrowException:
        return pyarrow.array([None if value is None else str(value) for value in values])


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print completions in the terminal, above a progress bar if there is one."""
    from tqdm import tqdm

    for row in rows:
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        title = f"[{row['group_id']} #{row['completion_index']}, reward {reward}]"
        tqdm.write(f"\n{title}\n{row['prompt']}\n-> {row['completion']}")


def window_path(output_dir: Path, step: int) -> Path:
    return output_dir / "completions" / f"completions_{step:05d}.parquet"


def drop_windows_from(output_dir: Path, step: int) -> None:
    """Delete windows generated for `step` or later: a run that resumes from `step` generates them again."""
    for path in (output_dir / "completions").glob("completions_*.parquet"):
        if int(re.sub(r"\D", "", path.stem)) >= step:
            path.unlink()
