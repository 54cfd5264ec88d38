"""Check gold answers: do they get the maximum of their reward functions, and do prompts give them away?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rewards.forms import bare_answer, gold_forms
from rl_vlm.data.samples import ParsedRow, Rows
from rl_vlm.errors import DataError, Finding, Problem, listed, shorten
from rl_vlm.reward.function import Reward
from rl_vlm.reward.golds import (
    PROBED,
    GoldScore,
    columns_to_write,
    find_reading,
    gives_less_than_zero,
    gold_columns,
    gold_scores,
    gold_text,
    is_below,
    reads_media,
    shortest_gold,
    spread_over,
    usual_columns,
    why_not_scored,
)  # fmt: skip
from rl_vlm.tools.checks.boxes import box_findings
from rl_vlm.tools.checks.diagnosis import Checking, Note, attempt
from rl_vlm.tools.checks.model import prompts
from rl_vlm.tools.checks.rows import Split, about_row, every_row
from rl_vlm.tools.checks.settings import rewards
from rl_vlm.tools.checks.table import Subject
from rl_vlm.types import Sample

AT_ONCE = 256
"""Number of rows that are scored at once."""
USUAL = 0.5
"""The highest score counts as the score of a right answer if at least this fraction of the rows gets it. If fewer rows
get it, the score may depend on lengths."""

UNMARKED = ("alone", "as it stands")
"""Forms of gold answers that any text may have."""

NO_GOLD = "Fill the column, leave the row out, or add a reward function that applies to it."
FAILS = "Correct the gold answer or the function: completions on which it fails are masked."
BELOW = "Correct the gold answer, or its form: the model cannot learn an answer that its reward refuses."
CONSTANT = "Check data.columns: a model that always gives this answer gets the full reward."
UNREAD = "Write the file again, or leave the row out: the other rows were not scored."
LONG = "Raise rollout.max_completion_length, or leave the row out: no completion can give this answer."
GIVEN = "Leave the answer out of the prompt."


def golds(subject: Subject) -> Checking[None]:
    """Check the gold answers of both splits, also their lengths if the files of the model are here."""
    splits, functions, found = subject.value(every_row), subject.value(rewards) or [], subject.value(prompts)
    for split in splits.loaded if splits else ():
        yield from check_golds(split, functions, found and found.builder.video_processor)
        if found is not None:
            limit = subject.config.rollout.max_completion_length
            yield from gold_lengths(split, functions, found.builder.processor.tokenizer, limit)


def check_golds(split: Split, functions: Sequence[Reward], video_processor: Any = None) -> Checking[None]:
    """Check the gold answers of the usable rows of a split.

    `video_processor` is the checkpoint's, which chooses the frames of videos. Without it, frames have even distances.
    """
    rows, used = split.rows.with_frames_of(video_processor), split.usable.indices
    columns = gold_columns(rows.columns, functions)
    if not columns or not used:
        return
    scored: list[list[GoldScore] | None] = []
    for reward in functions:
        if gold_columns(rows.columns, [reward]):
            check = scores_of_function(rows, used, reward, columns)
            scored.append((yield from attempt(check, Problem("gold answers", UNREAD))))
    known = [scores for scores in scored if scores is not None]
    if known and len(known) == len(scored):
        yield from missing_golds(rows, used, columns, known)
    yield from column_findings(rows, used, columns)
    yield from box_findings(rows, used, columns)


def scores_of_function(
    rows: Rows, used: Sequence[int], reward: Reward, columns: Sequence[str]
) -> Checking[list[GoldScore] | None]:
    """Check the scores of gold answers under one function. Return None if they are not scored."""
    if reason := why_not_scored(reward, rows.columns):
        yield Note(f"gold answers of {rows.name} under {reward.name}: {reason}", is_checked=False)
        return None
    try:
        scores = scores_of_rows(rows, used, reward, columns_to_write(reward, rows.columns))
    except DataError:
        yield Note(f"gold answers of {rows.name} under {reward.name}: a row cannot be read", is_checked=False)
        raise
    subtracts = gives_less_than_zero(reward, example_of(rows, used[0], reward))
    yield Note(f"gold answers of {rows.name} under {reward.name}")
    yield from score_findings(rows, used, columns, reward.name, scores, subtracts)
    return scores


def gold_lengths(split: Split, functions: Sequence[Reward], tokenizer: Any, limit: int) -> Iterator[Finding]:
    """Yield a finding for each gold answer that has more tokens than a completion may have."""
    rows = split.rows
    columns = usual_columns(rows.columns) or gold_columns(rows.columns, functions)
    for row in split.usable.indices if columns else ():
        answer = shortest_gold(rows.parse(row).columns, columns)
        if len(answer.encode("utf-8", "replace")) <= limit:  # no tokenizer makes more tokens than bytes
            continue
        num_tokens = len(tokenizer(answer, add_special_tokens=False)["input_ids"])
        if num_tokens > limit:
            what = (
                f": its gold answer has {num_tokens} tokens, more than rollout.max_completion_length {limit}: "
                f"{shorten(answer, 80)}"
            )
            yield about_row(rows, row, "gold answer longer than a completion", what, LONG)


def scores_of_rows(rows: Rows, used: Sequence[int], reward: Reward, columns: Sequence[str]) -> list[GoldScore]:
    """Score the gold answer of each row. Read images and videos only for functions that read them."""
    reward.use_form(reward.find_form(example_of(rows, used[0], reward)))
    probed = [example_of(rows, row, reward) for row in spread_over(used, PROBED)]
    reading = find_reading(reward, probed, columns, rows.columns)
    scores = []
    for start in range(0, len(used), AT_ONCE):
        part = [example_of(rows, row, reward) for row in used[start : start + AT_ONCE]]
        scores += gold_scores(reward, part, columns, reading, rows.columns)
    return scores


def example_of(rows: Rows, row: int, reward: Reward) -> Sample:
    """Return a row as a sample, with its images and with black videos if the function reads images or videos."""
    if reads_media(reward):
        return rows.sample(row, decode_videos=False)
    parsed = rows.parse(row)
    return Sample(rows.sample_ids[row], parsed.messages, [], parsed.columns, parsed.prompt)


def score_findings(
    rows: Rows, used: Sequence[int], golds: Sequence[str], name: str, scores: Sequence[GoldScore], subtracts: bool
) -> Iterator[Finding]:
    """Yield a finding for each gold answer on which a function fails, or which it scores below its maximum.

    If `subtracts` is true, the maximum may be 0.
    """
    numbers = [found.score for found in scores if found.score is not None]
    highest = max(numbers, default=0.0)
    is_usual = sum(not is_below(number, highest) for number in numbers) >= USUAL * len(numbers)
    for row, (score, fault) in zip(used, scores, strict=True):
        is_zero = score == 0 and subtracts
        if fault is not None:
            what = f": {name} fails on its gold answer: {fault}"
            yield about_row(rows, row, "gold answer that a reward fails on", what, FAILS)
        elif score is not None and ((score <= 0 and not is_zero) or (is_usual and is_below(score, highest))):
            found = rows.parse(row).columns
            if all(found.get(gold) is None for gold in golds):
                what = f": {name} scores a row without a value for {listed(golds)}"
                yield about_row(rows, row, "row without a gold answer", what, NO_GOLD)
                continue
            what = f": {name} gives its gold answer {score:g}, and others {highest:g}: {described(found, golds)}"
            yield about_row(rows, row, "gold answer below the maximum of its reward", what, BELOW)


def missing_golds(
    rows: Rows, used: Sequence[int], golds: Sequence[str], scores: Sequence[Sequence[GoldScore]]
) -> Iterator[Finding]:
    """Yield a finding for each row if none of the functions that read gold answers applies to it."""
    for row, found in zip(used, zip(*scores, strict=True), strict=True):
        if all(score == GoldScore(None) for score in found):
            what = f": no reward function applies to {described(rows.parse(row).columns, golds)}"
            yield about_row(rows, row, "row without a gold answer", what, NO_GOLD)


def column_findings(rows: Rows, used: Sequence[int], golds: Sequence[str]) -> Iterator[Finding]:
    """Yield findings for gold columns with the same value in all rows, and for prompts that end with their answer."""
    values = defaultdict(set)
    for row in used:
        parsed = rows.parse(row)
        for name in golds:
            gold = parsed.columns.get(name)
            values[name].add(repr(gold))
            if gives_away(parsed, gold):
                what = f": the prompt ends with the answer of column {name}: {shorten(gold, 80)}"
                yield about_row(rows, row, "prompt that ends with its answer", what, GIVEN)
    all_constant = all(len(found) == 1 for found in values.values())
    for name, found in values.items():
        if len(found) == 1 and len(used) > 1 and (all_constant or name == "solution"):
            what = f"{rows.name}: column {name} is {shorten(next(iter(found)), 80)} in all {len(used)} rows"
            yield Finding("warning", "constant gold answer", what, CONSTANT, rows.name)


def gives_away(parsed: ParsedRow, gold: Any) -> bool:
    """Return whether the prompt ends with the gold answer, in a form that marks answers or announced as the answer."""
    texts = [block["text"] for message in parsed.messages for block in message["content"] if "text" in block]
    given, gold = texts[-1] if texts else "", gold_text(gold) or ""
    answer = r"\s*".join(map(re.escape, bare_answer(gold).split()))
    if not answer:
        return False
    marked = [text for form, text in gold_forms(gold).items() if form not in UNMARKED]
    if any(squeezed(given).endswith(squeezed(text)) for text in marked):
        return True
    return re.search(rf"\b(answer|solution)(\s+is)?\s*[:=]?\s+{answer}[\s.]*\Z", given, re.IGNORECASE) is not None


def squeezed(text: str) -> str:
    """Return a text without whitespace, without full stops at its end, and in lower case."""
    return "".join(text.split()).rstrip(".").casefold()


def described(row: dict[str, Any], golds: Sequence[str]) -> str:
    """Describe the gold answers of a row."""
    return ", ".join(f"{name} {shorten(repr(row.get(name)), 80)}" for name in golds)
