"""The site is built with strict links, from this checkout alone."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.helpers.pages import DOCS, ROOT

pytestmark = pytest.mark.ci
LOADING = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
"""Attributes that a browser loads by itself."""


class Addresses(HTMLParser):
    """Addresses of a page: what it loads, what it links to, and the ids of its elements."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.linked: list[str] = []
        self.ids: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        if "id" in values:
            self.ids.add(values["id"])
        if tag in LOADING and LOADING[tag] in values and values.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append(values[LOADING[tag]])
        elif tag == "a" and "href" in values:
            self.linked.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material, of the extra `dev`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_page_is_in_the_site_and_in_its_menu(site: Path):
    pages = {page.with_suffix(".html").name for page in DOCS} | {"index.html"}
    assert pages <= {page.name for page in site.glob("*.html")}
    menu = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert {page.name for page in DOCS} <= set(menu)


def test_files_of_the_repository_are_copies_in_the_site(site: Path):
    folder = site / "repository"
    assert "Apache License" in (folder / "LICENSE.html").read_text()
    assert "Where the code is" in (folder / "CONTRIBUTING.html").read_text()
    assert "boxes of random places" in (folder / "examples/grounding/index.html").read_text()
    assert not list(site.rglob("site.py*"))


def test_links_lead_to_files_and_headings_of_the_site(site: Path):
    pages = {page: Addresses(page) for page in site.rglob("*.html") if page.name != "404.html"}
    pages = {page: found for page, found in pages.items() if "reports" not in page.parts}
    missing = []
    for page, found in pages.items():
        for address in [*found.loaded, *found.linked]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            has_anchor = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
            if not target.exists() or not has_anchor:
                missing.append(f"{page.relative_to(site)}: {address}")
    assert missing == []


def test_pages_load_nothing_from_elsewhere(site: Path):
    found = {address for page in site.rglob("*.html") for address in Addresses(page).loaded}
    assert {address for address in found if urlsplit(address).netloc} == set()
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*|@import[^;]*//[^;]*", styles) == []


def test_reports_of_the_gallery_are_small():
    reports = list((ROOT / "docs/reports").glob("*.html"))
    assert 1 <= len(reports) <= 2
    assert [report.name for report in reports if report.stat().st_size > 300_000] == []


def test_the_settings_of_the_site_name_no_address():
    assert "://" not in (ROOT / "mkdocs.yml").read_text()
