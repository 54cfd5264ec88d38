"""Every completion with its rewards.

completions/completions_00000.parquet   of the generation window for this optimizer step, from 0
completions/held_out_00000.parquet      of the evaluation after this many optimizer steps
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config.schema import LogConfig
from rl_vlm.data.tables import is_plain
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.trackers import RolloutTable
from rl_vlm.log.files import atomic_write, disk_errors
from rl_vlm.log.images import PromptImages
from rl_vlm.log.metrics import is_number
from rl_vlm.log.trajectories import has_trajectories, trajectory_columns, turns_json, turns_text
from rl_vlm.stages import is_column
from rl_vlm.types import Completion, Group, Prompt, RewardTable, ScoredGroup, ServedCompletion, Video

if TYPE_CHECKING:
    import pyarrow

FOLDER = "completions"
ANSWER = re.compile(r"(?s).*<answer>(.*)</answer>")
"""The last closed `<answer>` tag, as in the built-in reward functions."""
MOST_TRACKED_GROUPS, MOST_TRACKED_COMPLETIONS = 4, 8
"""Maximum groups of a window, and completions of a group, that are sent to trackers."""
LONGEST_VALUE = 10_000
"""Maximum characters of a list or mapping from the data that is written as JSON."""


class CompletionsLog:
    """Writes and prints the completions of each generation window."""

    def __init__(self, output_dir: Path, ranks: Ranks, log: LogConfig, num_prompts: int = 0) -> None:
        """`num_prompts` is the number of distinct prompts of the run. The images of some of them are kept."""
        self.output_dir = output_dir
        self.ranks = ranks
        self.writes = log.log_completions
        self.num_to_print = log.num_completions_to_print
        self.images = PromptImages(output_dir / FOLDER / "images", num_prompts) if log.report else None

    def write(self, step: int, groups: Sequence[ScoredGroup], table: RewardTable) -> None:
        """Write the groups of all ranks, generated for optimizer step `step`. Raises CheckpointError on disk errors."""
        if not self.writes and not self.num_to_print:
            return
        own_rows = completion_rows(step, groups, table)
        with self.ranks.agree(), disk_errors(self.output_dir):
            if self.writes:
                self.add_data(own_rows, groups)
        rows = self.ranks.gather(own_rows)
        with self.ranks.agree(), disk_errors(self.output_dir):
            if self.ranks.is_main:
                print_rows(rows[: self.num_to_print])
                if self.writes:
                    write_rows(window_path(self.output_dir, step), rows)

    def write_held_out(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write the completions of an evaluation after `step` optimizer steps. All ranks have the same rows.

        Raises CheckpointError on disk errors.
        """
        with self.ranks.agree(), disk_errors(self.output_dir):
            if self.ranks.is_main and self.writes and rows:
                write_rows(held_out_path(self.output_dir, step), rows)

    def add_data(self, rows: Sequence[dict[str, Any]], groups: Sequence[ScoredGroup]) -> None:
        """Add the columns of the data to the rows, and write the images to keep."""
        columns = [each for scored in groups for each in columns_of(scored.group, self.images)]
        for row, added in zip(rows, columns, strict=True):
            row.update(added)
        if self.images is not None:
            keep_observations(rows, groups, self.images)


def completion_rows(step: int, groups: Sequence[ScoredGroup], table: RewardTable) -> list[dict[str, Any]]:
    """Build a row per completion.

    A reward is None if it does not apply or failed. A length is None if it is unknown. A fault is None if there is
    none.
    """
    in_turns = has_trajectories(groups)
    return [
        {
            "step": step,
            "group_id": scored.group.group_id,
            "sample_id": scored.group.prompt.sample.sample_id,
            "completion_index": g,
            "policy_version": scored.group.policy_version,
            "prompt": prompt_text(prompt),
            "completion": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_length": len(prompt.token_ids) or None,
            "completion_length": num_tokens(completion),
            **size_columns(prompt),
            **{name: number(scored.scores_GF[g, f].item()) for f, name in enumerate(table.names)},
            "reward": number(scored.rewards_G[g].item()),
            "advantage": scored.advantages_G[g].item(),
            "fault": "\n".join(table.faults.get((p, g), [])) or None,
            **(trajectory_columns(completion, advantages_of_turns(scored, g)) if in_turns else {}),
            **{name: column[p][g] for name, column in table.breakdown.items()},
        }
        for p, scored in enumerate(groups)
        for g, completion in enumerate(scored.group.completions)
        for prompt in [scored.group.prompt_of(g)]
    ]


def size_columns(prompt: Prompt) -> dict[str, Any]:
    """Return the sizes of a prompt's images, and the times of its videos if it has some."""
    sample = prompt.sample
    return {
        "image_sizes": [list(image.size) for image in sample.own_images],
        "model_image_sizes": [list(size) for size in prompt.own_image_sizes or []],
        **video_columns(sample.all_videos),
    }


def video_columns(videos: Sequence[Video]) -> dict[str, Any]:
    """Return the times of videos as reward functions receive them, or no columns without videos."""
    if not videos:
        return {}
    times = [[round(time, 3) for time in video.times] for video in videos]
    return {"video_duration": [video.duration for video in videos], "video_frame_times": times}


def keep_observations(rows: Sequence[dict[str, Any]], groups: Sequence[ScoredGroup], images: PromptImages) -> None:
    """Write copies of the images of tools' results, and add their paths to the turns of each completion's row."""
    of_rows = [(scored, g) for scored in groups for g in range(len(scored.group.completions))]
    for row, (scored, g) in zip(rows, of_rows, strict=True):
        turns = scored.group.completions[g].turns
        if turns and (keep := images.of_completion(scored.group.prompt.sample, g)) is not None:
            row["turns"] = turns_json(turns, advantages_of_turns(scored, g), keep)


def advantages_of_turns(scored: ScoredGroup, g: int) -> list[float]:
    """Return the advantages of the turns of a completion, if turns have their own."""
    return scored.turn_advantages[g].tolist() if scored.turn_advantages else []


def columns_of(group: Group, images: PromptImages | None) -> list[dict[str, Any]]:
    """Return `data_columns` of each completion, and the paths of the images and videos of its prompt.

    They can differ, since environments can start differently.
    """
    found: dict[int, dict[str, Any]] = {}
    for members in group.by_prompt():
        sample = group.prompt_of(members[0]).sample
        columns = data_columns(sample.columns)
        if images is not None:
            with disk_errors(images.folder):
                columns |= images.write(sample)
        found.update((member, columns) for member in members)
    return [found[member] for member in range(len(group.completions))]


def data_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the columns of a data row to `data/<column>`. Keep texts and numbers; write lists and mappings as JSON.

    Leave out values that JSON cannot hold, and long lists and mappings.
    """
    found: dict[str, Any] = {}
    for name, value in columns.items():
        if is_plain(value):
            found[f"data/{name}"] = value
        elif isinstance(value, list | tuple | dict) and (text := short_json(value)) is not None:
            found[f"data/{name}"] = text
    return found


def short_json(value: Any) -> str | None:
    """Return a value as JSON, or None if JSON cannot hold it or the text is too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return None
    return text if len(text) <= LONGEST_VALUE else None


def num_tokens(completion: Completion) -> int | None:
    return completion.reported_tokens if isinstance(completion, ServedCompletion) else len(completion.token_ids)


def number(value: float) -> float | None:
    """Return the value, or None for NaN."""
    return None if value != value else value


def rollout_table(path: Path, step: int, functions: Sequence[str]) -> RolloutTable:
    """Return a few groups of a window for trackers. Groups with kept images come first.

    The rollouts are sent with the metrics of `step`.
    """
    import pyarrow.parquet

    windows = windows_of(pyarrow.parquet.read_table(path).to_pylist()).values()
    groups = [group for window in windows for group in window]
    chosen = sorted(groups, key=lambda group: not kept_files(group[0]))[:MOST_TRACKED_GROUPS]
    columns = ["sample_id", "prompt", "completion", *functions, "reward", "advantage", "finish_reason"]
    tracked = [row for group in chosen for row in group[:MOST_TRACKED_COMPLETIONS]]
    if any(row.get("turns") for row in tracked):
        columns.append("turns")
        tracked = [row | {"turns": turns_text(row)} for row in tracked]
    files = [kept_files(row) for row in tracked]
    rows = [
        [path.parent / kept[0] if kept else None, step, *(row.get(name) for name in columns)]
        for row, kept in zip(tracked, files, strict=True)
    ]
    return RolloutTable(["image", "step", *columns], rows)


def kept_files(row: Mapping[str, Any]) -> list[str]:
    """Return the paths of a row's kept images, and of the strips of its videos."""
    return [path for name in ("images", "videos") for path in row.get(name) or []]


def windows_of(rows: Sequence[dict[str, Any]]) -> dict[int, list[list[dict[str, Any]]]]:
    """Group rows by step, and within a step by their groups."""
    windows: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        windows.setdefault(row["step"], {}).setdefault(row["group_id"], []).append(row)
    return {step: list(groups.values()) for step, groups in windows.items()}


def function_columns(columns: Sequence[str]) -> list[str]:
    """Return the reward functions among the columns of a completions file: those before `reward` but our own."""
    return [name for name in columns[: columns.index("reward")] if not is_column(name)]


def answer(row: Mapping[str, Any], name: str) -> str:
    """Return a completion's answer to a reward function.

    This is the logged `answer`, or else the content of the last closed `<answer>` tag, or else the text.
    """
    return answer_in(row["completion"], row.get(f"{name}/answer", row.get("answer")))


def answer_in(text: str, logged: Any) -> str:
    """Return the answer of a text with the logged `answer`, if that is not None."""
    if logged is not None:
        return str(logged)
    tagged = ANSWER.match(text)
    return (tagged[1] if tagged else text).strip()


def distinct_answers(group: Sequence[Mapping[str, Any]], name: str) -> int:
    """Return the number of different answers of a group to a reward function."""
    return len({answer(row, name) for row in group})


def values_of(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """Return the values of a column that are finite numbers."""
    return [row[column] for row in rows if is_number(row.get(column))]


def prompt_text(prompt: Prompt) -> str:
    """Return the messages of a prompt as plain text, with images and videos as `<image>` and `<video>`."""
    lines = []
    for message in prompt.sample.messages:
        blocks = message["content"]
        texts = [block["text"] if block["type"] == "text" else f"<{block['type']}>" for block in blocks]
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
        tqdm.write(f"\n{title}\n{row['prompt']}\n{turns_text(row) or '-> ' + row['completion']}")


def window_path(output_dir: Path, step: int) -> Path:
    return output_dir / FOLDER / f"completions_{step:05d}.parquet"


def held_out_path(output_dir: Path, step: int) -> Path:
    return output_dir / FOLDER / f"held_out_{step:05d}.parquet"


def drop_after(output_dir: Path, step: int | None, next_window: int) -> None:
    """Delete the files that a run resumed from `step` rewrites: windows from `next_window` on, and later evaluations.

    If `step` is None, the run starts anew, and all files are deleted.
    """
    if step is None:
        shutil.rmtree(output_dir / FOLDER, ignore_errors=True)
        return
    windows = [path for path in window_paths(output_dir) if step_of(path) >= next_window]
    evaluations = [path for path in held_out_paths(output_dir) if step_of(path) > step]
    for path in windows + evaluations:
        path.unlink()


def window_paths(output_dir: Path) -> list[Path]:
    """Return the files of all windows, in order of their steps."""
    return sorted((output_dir / FOLDER).glob("completions_*.parquet"), key=step_of)


def held_out_paths(output_dir: Path) -> list[Path]:
    """Return the files of all evaluations within the run, in order of their steps."""
    return sorted((output_dir / FOLDER).glob("held_out_*.parquet"), key=step_of)


def window_before(output_dir: Path, step: int) -> Path | None:
    """Return the file of the window that an optimizer step trained on. Steps count from 1."""
    paths = [path for path in window_paths(output_dir) if step_of(path) < step]
    return paths[-1] if paths else None


def step_of(path: Path) -> int:
    """Return the optimizer step in the name of a file."""
    return int(re.sub(r"\D", "", path.stem))
