"""The text of a completion, and the answer in it."""

from __future__ import annotations

from typing import Any

Completion = str | list[dict[str, Any]]


def completion_text(completion: Completion) -> str:
    """Return the text of a plain completion, or of the last message of a conversational one."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block["type"] == "text")


def answer_text(text: str) -> str:
    """Return the content of the last closed `<answer>` tag, or the whole text if there is none, stripped."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return text.strip()
    return text[start + len("<answer>") : end].strip()
