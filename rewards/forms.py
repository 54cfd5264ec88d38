"""The two forms in which reward functions get prompts and completions: messages, or text.

TRL gives text for rows whose prompt is text, and messages for conversations. A function is often written for one form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rewards.text import completion_text

Form = Literal["messages", "text"]
OTHER: dict[Form, Form] = {"messages": "text", "text": "messages"}


def form_of(prompt: Any) -> Form:
    """Return the form of a row's prompt."""
    return "text" if isinstance(prompt, str) else "messages"


def prompt_in(form: Form | None, prompt: Any) -> Any:
    """Return a prompt in this form, or unchanged if it has it. The text of a conversation has a line per message."""
    if form is None or form == form_of(prompt):
        return prompt
    if form == "messages":
        return [{"role": "user", "content": prompt}]
    return "\n".join(completion_text([message]) for message in prompt)


def completion_in(form: Form, text: str) -> str | list[dict[str, str]]:
    """Return a completion in this form."""
    return text if form == "text" else [{"role": "assistant", "content": text}]


def made_up_completion(columns: Mapping[str, Any]) -> str:
    """Return a completion that gives the row's solution, for a call that only shows whether a function can read it."""
    solution = columns.get("solution")
    answer = "7" if solution is None else str(solution)
    return f"<think>This completion is made up.</think>\n{tagged(answer)}"


def tagged(answer: str) -> str:
    """Return an answer in `<answer>` tags."""
    return answer if "<answer>" in answer else f"<answer>{answer}</answer>"


def gold_forms(answer: str) -> dict[str, str]:
    """Return completions that give this answer, by name. A function may read one of the forms only."""
    return {
        "gold": answer,
        "gold in tags": tagged(answer),
        "gold after a thought": made_up_completion({"solution": answer}),
    }
