"""The index of the log has one phrase for each entry."""

import re
from collections import defaultdict

from tests.helpers.pages import ROOT

LOG = ROOT / "docs/LOG.md"
PLAIN = set(
    "a an and are as at be by for from had has have in is it its no not of on only or that the to was were with".split()
)
"""Words that say nothing about an entry."""


def index_phrases(log: str) -> dict[str, list[str]]:
    """Return the phrases of the index by day."""
    found = defaultdict(list)
    for row in re.findall(r"^\| (?:.*) \| (\[.*) \|$", log, flags=re.MULTILINE):
        for days in re.split(r"\. (?=\[\d\d-\d\d\])", row):
            [(day, phrases)] = re.findall(r"^\[\d\d-\d\d\]\(#(\d{4}-\d\d-\d\d)\): (.*)", days)
            found[day] += phrases.split("; ")
    return found


def entries(log: str) -> dict[str, list[str]]:
    """Return the titles by day: the bold words at the beginning of paragraphs."""
    _, *parts = re.split(r"^## (\d{4}-\d\d-\d\d)$", log, flags=re.MULTILINE)
    days = zip(parts[::2], parts[1::2], strict=True)
    return {day: re.findall(r"^\*\*(.+?)\*\*", text, flags=re.MULTILINE | re.DOTALL) for day, text in days}


def stems(text: str) -> set[str]:
    """Return the beginnings of the words that say something."""
    return {word[:5] for word in re.findall(r"\w+", text.lower()) if word not in PLAIN}


def problems(log: str) -> list[str]:
    """Return days with unequal numbers of entries and phrases, and entries whose titles share no word with a phrase."""
    phrases, titles = index_phrases(log), entries(log)
    counts = [
        f"{day}: {len(titles.get(day, []))} entries, {len(phrases[day])} phrases"
        for day in sorted(titles.keys() | phrases.keys())
        if len(titles.get(day, [])) != len(phrases[day])
    ]
    absent = [
        f"{day}: {title}"
        for day, found in titles.items()
        for title in found
        if not any(stems(title) & stems(phrase) for phrase in phrases[day])
    ]
    return counts + absent


def test_what_the_index_lacks():
    row = "[11-02](#2026-11-02): a fast head. [11-01](#2026-11-01): rows; a tower"
    index = f"| topic | entries |\n|---|---|\n| Speed | {row} |\n"
    day_two = "## 2026-11-02\n\n**The head is fast.** It takes 1 ms.\n\n"
    day_one = "## 2026-11-01\n\n**Rows** are long.\n\n**A tower.** It is frozen.\n"
    assert problems(index + day_two + day_one) == []
    assert problems(index + day_two + "**Kernels of\nCPUs.** Slow.\n\n" + day_one) == [
        "2026-11-02: 2 entries, 1 phrases",
        "2026-11-02: Kernels of\nCPUs.",
    ]
    assert problems(index + day_one) == ["2026-11-02: 0 entries, 1 phrases"]
    assert problems(index + day_two + day_one.replace("A tower", "An image")) == ["2026-11-01: An image."]


def test_the_index_of_the_log_has_each_entry():
    log = LOG.read_text()
    assert len(index_phrases(log)) >= 8
    assert problems(log) == []
