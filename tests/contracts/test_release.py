"""The version of the package is that of its changelog and of its citation."""

import re
import tomllib

import yaml

from tests.helpers.pages import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_has_the_keys_of_its_format():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["title"] and citation["type"] == "software"
    assert citation["authors"] == [{"name": "The rl-vlm project"}]
    assert citation["license"] == "Apache-2.0"


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(\d\S*)\] - (\d{4}-\d{2}-\d{2})$", CHANGELOG, re.MULTILINE)
    assert released[0] == (citation["version"], citation["date-released"])
    assert citation["version"] == VERSION


def test_the_changelog_is_short_and_opens_with_what_is_not_released():
    entries = re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]
    assert entries[0].startswith("[Unreleased]")
    assert len(re.findall(r"^- ", entries[1], re.MULTILINE)) == 10
