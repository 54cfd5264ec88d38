"""Pages of the documentation, and the parts of them that tests read."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.md"))
PAGES = [README, CONTRIBUTING, *DOCS, *EXAMPLES]


def block(page: str, language: str, opening: str) -> str:
    """Return the code block of a page that has this language and this opening."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
    return next(text for text in blocks if text.startswith(opening))


def links(page: Path) -> list[str]:
    """Return the addresses that a page links to or shows as a picture."""
    return re.findall(r"\]\(([^)\s]+)\)", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
