"""Layouts of rows for other systems: they tell which column is the prompt, and which value the `solution`.

Each row's layout is recognised by its filled columns, so one file may hold several layouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from rl_vlm.data.grounding import fill_objects
from rl_vlm.data.messages import ends_with_answer, read_conversations
from rl_vlm.data.tables import MEDIA_COLUMNS, VIDEO_COLUMNS, TableRow, is_filled
from rl_vlm.errors import DataError

logger = logging.getLogger(__name__)


def read_turns(row: TableRow, where: str) -> Any:
    """Return the turns before the last answer as messages. LLaVA marks a video as an image."""
    turns = row["conversations"]
    messages = read_conversations(turns[:-1] if ends_with_answer(turns) else turns, where)
    kinds = {block["type"] for message in messages for block in message["content"]}
    filled = {name for name in MEDIA_COLUMNS if is_filled(row.get(name))}
    if "video" in kinds or not filled or not filled.issubset(VIDEO_COLUMNS):
        return messages
    return [
        message | {"content": [{"type": "video"} if one["type"] == "image" else one for one in message["content"]]}
        for message in messages
    ]


def read_question(row: TableRow, where: str) -> Any:
    """Return a question with its options, one per line, as Video-R1 does."""
    options = row.get("options")
    if not isinstance(options, list) or not all(isinstance(text, str) for text in (row["problem"], *options)):
        return row["problem"]
    return "\n".join([row["problem"], "Options:", *options]) if options else row["problem"]


def with_media(row: TableRow) -> TableRow:
    """Return a row with Video-R1's `path` as `image` or `video`, whichever its `data_type` says."""
    kind, path = row.get("data_type"), row.get("path")
    has_media = any(is_filled(row.get(name)) for name in MEDIA_COLUMNS)
    if kind not in ("image", "video") or "problem" not in row or not is_filled(path) or has_media:
        return row
    return row | {str(kind): path}


def last_turn(row: TableRow, where: str) -> Any:
    """Return the last answer of `conversations`, or None."""
    turns = row["conversations"]
    return turns[-1].get("value") if ends_with_answer(turns) else None


def read_messages(row: TableRow, where: str) -> Any:
    """Return `messages` without a final answer, with the marks of objects filled in."""
    messages = fill_objects(row["messages"], row.get("objects"), where)
    return messages[:-1] if is_answered(messages) else messages


def last_message(row: TableRow, where: str) -> Any:
    """Return the text of the assistant's final message, with the marks of objects filled in, or None."""
    if not is_answered(row["messages"]):
        return None
    content = fill_objects(row["messages"], row.get("objects"), where)[-1].get("content")
    return "".join(block.get("text") or "" for block in content) if isinstance(content, list) else content


def is_answered(messages: Any) -> bool:
    """Return whether the assistant wrote the last message."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def ground_truth(row: TableRow, where: str) -> Any:
    """Return verl's `reward_model.ground_truth`, or None."""
    return row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], dict) else None


class Layout(NamedTuple):
    """The layout of another system's rows."""

    system: str
    columns: tuple[str, ...]
    """Columns of rows with this layout. The first one is filled."""
    prompt: Callable[[TableRow, str], Any] | None
    """Returns the prompt from the first column. None if column `prompt` holds it."""
    gold: str
    """Description of the value that becomes `solution`."""
    solution: Callable[[TableRow, str], Any]
    """Returns the value that becomes `solution`, or None."""
    yields: bool
    """Whether a column `solution` takes precedence over the layout's value. If not, a row is refused if they differ."""

    def fits(self, row: TableRow) -> bool:
        """Return whether a row has this layout."""
        return is_filled(row.get(self.columns[0])) and all(name in row for name in self.columns)


LAYOUTS = (
    Layout("VLM-R1 and LLaVA", ("conversations",), read_turns, "its last answer", last_turn, False),
    Layout("EasyR1", ("problem", "answer"), lambda row, where: row["problem"], "answer",
           lambda row, where: row["answer"], False),
    Layout("Video-R1", ("problem", "data_type", "path"), read_question, "solution", lambda row, where: None, True),
    Layout("ms-swift", ("messages",), read_messages, "a final answer", last_message, True),
    Layout("verl", ("reward_model",), None, "reward_model.ground_truth", ground_truth, True),
)  # fmt: skip

LAYOUT_COLUMNS = {"prompt", "solution", "objects", "options", *(name for layout in LAYOUTS for name in layout.columns)}
"""Every column that `read_layout` reads."""


def layouts_of(columns: Collection[str]) -> list[Layout]:
    """Return the layouts whose columns all exist."""
    return [layout for layout in LAYOUTS if set(layout.columns).issubset(columns)]


def read_layout(row: TableRow, where: str, with_prompt: bool) -> TableRow:
    """Add `prompt` and `solution` to a row if its layout is another system's.

    The column that held the prompt is removed. Without `with_prompt`, a template makes the prompt, so only `solution`
    is added. Raises DataError if several columns could be the prompt or the solution.
    """
    found = [layout for layout in LAYOUTS if layout.fits(row)]
    prompts = {layout.columns[0]: layout.prompt for layout in found if with_prompt and layout.prompt}
    holders = [*(["prompt"] if is_filled(row.get("prompt")) else []), *prompts]
    if prompts and len(holders) > 1:
        raise ambiguous(where, "prompt", holders)
    gold = find_solution(row, found, where)
    read: TableRow = {name: value for name, value in row.items() if name not in prompts}
    for prompt in prompts.values():
        read["prompt"] = prompt(row, where)
    return read if gold is None else read | {"solution": gold}


def find_solution(row: TableRow, found: list[Layout], where: str) -> Any:
    """Return the value of `solution`, or None. Raises DataError if several values differ."""
    given = row.get("solution")
    if given is not None and all(layout.yields for layout in found):
        return given
    golds = {layout.columns[-1]: layout.solution(row, where) for layout in found}
    golds = {name: value for name, value in ({"solution": given} | golds).items() if value is not None}
    if len(set(map(str, golds.values()))) > 1:
        raise ambiguous(where, "solution", list(golds))
    return next(iter(golds.values()), None)


def ambiguous(where: str, role: str, holders: list[str]) -> DataError:
    """Build the error for columns that could all be the prompt, or all be the solution."""
    other = "solution" if "solution" in holders else holders[-1]
    return DataError(
        f"{where}: columns {' and '.join(holders)} are filled, and each could be the {role}. Leave one out with "
        f"data.ignore_columns: [{other}], or keep it for reward functions under another name with data.columns: "
        f"{{other_{other}: {other}}}."
    )


def log_layouts(name: str, columns: Collection[str], with_prompt: bool) -> None:
    """Log the layouts of the rows, and the sources of prompt and solution."""
    for layout in layouts_of(columns):
        is_prompt = with_prompt and layout.prompt is not None
        gold = "column solution" if "solution" in columns and layout.yields else layout.gold
        meaning = f"{layout.columns[0]} is the prompt, {gold} the solution" if is_prompt else f"{gold} is the solution"
        logger.info("%s has the layout of %s: %s", name, layout.system, meaning)
