"""Turns of trajectories in completions files: as JSON, and as text for the terminal and trackers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_vlm.types import Completion, ScoredGroup, ToolResult, Turn

KeepImages = Callable[[Sequence[bytes]], list[str]]
"""Writes copies of the first images of a list, and returns their paths."""


def has_trajectories(groups: Sequence[ScoredGroup]) -> bool:
    """Return whether any completion has turns or an environment."""
    return any(is_trajectory(completion) for scored in groups for completion in scored.group.completions)


def is_trajectory(completion: Completion) -> bool:
    """Return whether a completion has turns or an environment. A fault can leave it without turns."""
    return bool(completion.turns) or completion.environment_name is not None


def trajectory_columns(completion: Completion) -> dict[str, Any]:
    """Return the columns of a trajectory. Images are counted, see `turns_json`."""
    return {
        "turns": turns_json(completion.turns),
        "num_turns": len(completion.turns),
        "environment": completion.environment_name,
        "observed_length": num_observed(completion),
    }


def num_observed(completion: Completion) -> int:
    """Return the number of observed tokens."""
    return completion.num_tokens - len(completion.token_ids)


def turns_json(turns: Sequence[Turn], keep: KeepImages | None = None) -> str:
    """Return turns as JSON: their texts, calls and results. With `keep`, results also have the paths of kept images."""
    return json.dumps(
        [
            {
                "text": turn.text,
                "calls": [{"name": call.name, "arguments": call.arguments} for call in turn.calls],
                "results": [described(result, keep) for result in turn.results],
            }
            for turn in turns
        ],
        ensure_ascii=False,
        default=str,
    )


def described(result: ToolResult, keep: KeepImages | None) -> dict[str, Any]:
    """Describe the result of a call."""
    text = "\n".join(block["text"] for block in result.content if block["type"] == "text")
    kept = {"kept": keep(result.images)} if keep is not None and result.images else {}
    seconds = round(result.seconds, 3)
    return {"text": text, "images": len(result.images), **kept, "error": result.error, "seconds": seconds}


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns in a row of a completions file."""
    return json.loads(row.get("turns") or "[]")


def turns_text(row: Mapping[str, Any]) -> str:
    """Return the turns of a row as text: `->` before those of the model, `<-` before results."""
    parts = [[f"-> {turn['text']}", *map(result_line, turn["results"])] for turn in turns_of(row)]
    return "\n".join(line for lines in parts for line in lines)


def result_line(result: Mapping[str, Any]) -> str:
    """Return one result as text, with its images as `<image>`."""
    marks = ["<image>"] * result["images"]
    failed = ["[error]"] if result["error"] is not None else []
    return " ".join(["<-", *failed, *marks, *filter(None, [result["text"]])])
