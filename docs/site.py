"""Hooks of mkdocs, which make the site from `docs/` alone.

The README is the first page. Files of the repository that pages link to become pages of the site, below `repository/`:
the site knows no address of the repository.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs"
COPIES = "repository"
"""Folder of the site with the copies."""
HOME = "index.md"
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s]+)\)")
NAME_OF_PAGE = re.compile(r"[\w/]+\.md")
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".py": "python", ".sh": "bash", ".toml": "toml", ".cff": "yaml"}
SHOWN_AS_THEY_ARE = {".md", ".png", ".html"}
"""Other files become a page with their text."""


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and the files that pages link to, also those that these link to."""
    files.append(File.generated(config, HOME, content=translated("README.md")))
    waiting = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    waiting += [f"{DOCS}/{file.src_uri}" for file in files.documentation_pages() if file.src_uri != HOME]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if not source.startswith(f"{DOCS}/") and source != "README.md":
            files.append(copied(source, config))
        for target in targets(source):
            if target not in seen and not target.startswith(f"{DOCS}/"):
                seen.add(target)
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page of `docs/` with its links to files of the repository leading to the copies."""
    return markdown if page.file.generated_by else with_links(markdown, f"{DOCS}/{page.file.src_uri}")


def targets(source: str) -> Iterator[str]:
    """Yield the files of the repository that a page of Markdown links to."""
    if source.endswith(".md"):
        for _, link in LINK.findall(without_code((ROOT / source).read_text())):
            if (target := target_of(source, link)) is not None:
                yield target


def without_code(markdown: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", markdown, flags=re.DOTALL | re.MULTILINE)


def target_of(source: str, link: str) -> str | None:
    """Return the file of the repository that a link of a page leads to.

    None: it leads to an anchor, elsewhere, or nowhere, which mkdocs reports.
    """
    name = link.partition("#")[0]
    if not name or "://" in name or name.startswith("mailto:"):
        return None
    target = os.path.normpath(PurePosixPath(source).parent / name)
    target = f"{target}/README.md" if (ROOT / target).is_dir() else target
    return target if (ROOT / target).is_file() else None


def place(source: str) -> str:
    """Return the place in the site of a file of the repository."""
    if source == "README.md":
        return HOME
    if source.startswith(f"{DOCS}/"):
        return source.removeprefix(f"{DOCS}/")
    return f"{COPIES}/{source}" if PurePosixPath(source).suffix in SHOWN_AS_THEY_ARE else f"{COPIES}/{source}.md"


def with_links(markdown: str, source: str) -> str:
    """Return the text of a page with its links leading to places in the site, and titles in place of names of pages."""

    def rewrite(found: re.Match[str]) -> str:
        text, link = found.groups()
        if (target := target_of(source, link)) is None:
            return found[0]
        anchor = link.partition("#")[2]
        address = os.path.relpath(place(target), PurePosixPath(place(source)).parent)
        shown = title_of(target) if NAME_OF_PAGE.fullmatch(text) else text
        return f"[{shown}]({address}{'#' if anchor else ''}{anchor})"

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if i % 2 else LINK.sub(rewrite, part) for i, part in enumerate(parts))


def title_of(source: str) -> str:
    """Return the first heading of a page."""
    return (ROOT / source).read_text().partition("\n")[0].removeprefix("# ")


def translated(source: str) -> str:
    """Return a file of the repository as a page of the site."""
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return with_links(text, source)
    language = LANGUAGES.get(PurePosixPath(source).suffix, "text")
    return f"# `{source}`\n\n```{language}\n{text}\n```\n"


def copied(source: str, config: Any) -> File:
    if PurePosixPath(source).suffix in SHOWN_AS_THEY_ARE - {".md"}:
        return File.generated(config, place(source), abs_src_path=str(ROOT / source))
    return File.generated(config, place(source), content=translated(source))
