"""The two forms of prompts and completions for reward functions, and the forms of answers in completions.

TRL gives text for rows whose prompt is text, and messages for conversations. A function is often written for one form.
It often reads an answer in one form only, too: in `<answer>` tags, in a LaTeX box, after `####` and so on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from rewards.text import answer_text, completion_text

LARGEST_COORDINATE = 1e9

CompletionForm = Literal["messages", "text"]
OTHER: dict[CompletionForm, CompletionForm] = {"messages": "text", "text": "messages"}

THOUGHT = "<think>This completion is made up.</think>\n"
AFTER = " after a thought"
"""Suffix of the names of forms that begin with `THOUGHT`."""
FENCE = re.compile(r"```(?:json)?\s(.*)```", re.DOTALL)
LAST_LINE = re.compile(r"(?:^#### ?|^(?:the )?(?:final )?answer: *)(.+)\Z", re.IGNORECASE | re.MULTILINE)
MATHS = re.compile(r"\$[^$]+\$")


def form_of(prompt: Any) -> CompletionForm:
    """Return the form of a row's prompt."""
    return "text" if isinstance(prompt, str) else "messages"


def prompt_in(form: CompletionForm | None, prompt: Any) -> Any:
    """Convert a prompt to this form, unless it has it already. A conversation becomes text with a line per message."""
    if form is None or form == form_of(prompt):
        return prompt
    if form == "messages":
        return [{"role": "user", "content": prompt}]
    return "\n".join(completion_text([message]) for message in prompt)


def completion_in(form: CompletionForm, text: str) -> str | list[dict[str, str]]:
    """Convert a completion to this form."""
    return text if form == "text" else [{"role": "assistant", "content": text}]


def tagged(answer: str) -> str:
    """Put an answer in `<answer>` tags."""
    return answer if "<answer>" in answer else f"<answer>{answer}</answer>"


def boxed(answer: str) -> str:
    r"""Put an answer in `\boxed{…}`."""
    return f"\\boxed{{{answer}}}"


def as_objects(answer: str, in_list: bool) -> str:
    """Convert the JSON of a box to an object with `bbox_2d`, and of boxes to a list. Return others unchanged."""
    value = json_of(answer)
    boxes = [value] if is_box(value) else value
    if not isinstance(boxes, list) or not boxes or not all(map(is_box, boxes)):
        return answer
    objects = [{"bbox_2d": box} for box in boxes]
    return json.dumps(objects if in_list or len(objects) > 1 else objects[0])


def fenced(answer: str) -> str:
    """Put JSON in a code block within tags, with boxes as objects. Put other answers in tags only."""
    text = as_objects(answer, in_list=True)
    return tagged(f"```json\n{text}\n```" if isinstance(json_of(text), list | dict) else answer)


def json_of(text: str) -> Any:
    """Parse JSON text, or return None if it is not JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None


def is_box(value: Any) -> bool:
    """Return whether a value is a list of four numbers that can be coordinates."""
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(type(number) in (int, float) and abs(number) <= LARGEST_COORDINATE for number in value)


FORMS: dict[str, Callable[[str], str]] = {
    "alone": str,
    "in tags": tagged,
    "in a box": boxed,
    "after ####": lambda answer: f"#### {answer}",
    "after Answer:": lambda answer: f"Answer: {answer}",
    "as an object": lambda answer: as_objects(answer, in_list=False),
    "as an object in tags": lambda answer: tagged(as_objects(answer, in_list=False)),
    "as objects in tags": lambda answer: tagged(as_objects(answer, in_list=True)),
    "as fenced JSON": fenced,
}
"""The forms in which functions expect an answer, by name. Each is tried with and without a thought before it."""


def written(answer: str, form: str, has_thought: bool = True) -> str:
    """Write an answer in one of the forms. Without `has_thought`, leave out the form's thought."""
    name = form.removesuffix(AFTER)
    text = FORMS.get(name, str)(answer)
    return THOUGHT + text if has_thought and name != form else text


def bare_answer(gold: str) -> str:
    r"""Return the bare answer in a gold answer: `7` for `#### 7`, `\boxed{7}` or `$7$`."""
    text = answer_text(gold)
    if fence := FENCE.fullmatch(text):
        return fence[1].strip()
    if last := LAST_LINE.search(text):
        text = last[1].strip()
    return text[1:-1].strip() if MATHS.fullmatch(text) else text


def gold_forms(gold: str) -> dict[str, str]:
    """Build completions that give this gold answer, by form. A function may read only one of the forms.

    Forms with equal texts occur once. "as it stands" is the unchanged gold answer.
    """
    answer = bare_answer(gold)
    forms: dict[str, str] = {}
    for form in (*FORMS, *(name + AFTER for name in FORMS)):
        forms.setdefault(written(answer, form), form)
    forms.setdefault(gold, "as it stands")
    return {form: text for text, form in forms.items()}
