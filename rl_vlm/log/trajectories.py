"""Turns of trajectories in completions files: as JSON, and as text for the terminal and trackers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_vlm.types import Completion, ScoredGroup, ToolResult, Turn, is_clip

KeepImages = Callable[[Sequence[bytes]], list[str]]
"""Writes copies of the first images of a list, and strips of clips, and returns their paths."""


def has_trajectories(groups: Sequence[ScoredGroup]) -> bool:
    """Return whether any completion has turns or an environment."""
    return any(is_trajectory(completion) for scored in groups for completion in scored.group.completions)


def is_trajectory(completion: Completion) -> bool:
    """Return whether a completion has turns or an environment. A fault can leave it without turns."""
    return bool(completion.turns) or completion.environment_name is not None


def trajectory_columns(completion: Completion, advantages: Sequence[float] = ()) -> dict[str, Any]:
    """Return the columns of a trajectory. Images and videos are counted, see `turns_json`."""
    return {
        "turns": turns_json(completion.turns, advantages),
        "num_turns": len(completion.turns),
        "environment": completion.environment_name,
        "observed_length": num_observed(completion),
    }


def num_observed(completion: Completion) -> int:
    """Return the number of observed tokens."""
    return completion.num_tokens - len(completion.token_ids)


def turns_json(turns: Sequence[Turn], advantages: Sequence[float] = (), keep: KeepImages | None = None) -> str:
    """Return turns as JSON: their texts, calls and results, and their rewards and advantages if they have some.

    With `keep`, results also have the paths of kept images and of strips of videos.
    """
    return json.dumps(
        [
            {
                "text": turn.text,
                **({} if turn.reward is None else {"reward": turn.reward}),
                **({"advantage": advantages[i]} if i < len(advantages) else {}),
                "calls": [{"name": call.name, "arguments": call.arguments} for call in turn.calls],
                "results": [described(result, keep) for result in turn.results],
            }
            for i, turn in enumerate(turns)
        ],
        ensure_ascii=False,
        default=str,
    )


def described(result: ToolResult, keep: KeepImages | None) -> dict[str, Any]:
    """Describe the result of a call. The digests of its images and videos say which results are equal."""
    text = "\n".join(block["text"] for block in result.content if block["type"] == "text")
    shown: dict[str, Any] = {}
    if result.images:
        shown["digests"] = [hashlib.sha256(file).hexdigest()[:16] for file in result.images]
        if keep is not None:
            shown["kept"] = keep(result.images)
    seconds, videos = round(result.seconds, 3), sum(map(is_clip, result.images))
    counts = {"images": len(result.images) - videos, **({"videos": videos} if videos else {})}
    return {"text": text, **counts, **shown, "error": result.error, "seconds": seconds}


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns in a row of a completions file."""
    return json.loads(row.get("turns") or "[]")


def turns_text(row: Mapping[str, Any]) -> str:
    """Return the turns of a row as text: `->` before the model's turns, `<-` before results."""
    parts = [[f"-> {turn['text']}", *map(result_line, turn["results"])] for turn in turns_of(row)]
    return "\n".join(line for lines in parts for line in lines)


def result_line(result: Mapping[str, Any]) -> str:
    """Return one result as text, with its images as `<image>` and its videos as `<video>`."""
    marks = ["<image>"] * result["images"] + ["<video>"] * result.get("videos", 0)
    failed = ["[error]"] if result["error"] is not None else []
    return " ".join(["<-", *failed, *marks, *filter(None, [result["text"]])])
