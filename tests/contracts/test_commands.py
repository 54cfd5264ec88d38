"""Commands and settings of the README and of all pages are accepted: their options and names exist."""

import re
import shlex
from pathlib import Path

import pytest

from launch import cli
from launch.chat import chat_parser
from launch.export import export_parser
from launch.migrate import migrate_parser
from launch.new import new_parser
from launch.report import report_parser
from launch.rewards import parse
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import SECTIONS
from tests.helpers.pages import PAGES, ROOT, block

PARSERS = {
    "chat": chat_parser().parse_intermixed_args, "export": export_parser().parse_args,
    "migrate": migrate_parser().parse_args, "new": new_parser().parse_args, "report": report_parser().parse_args,
    "rewards": parse,
}  # fmt: skip
"""Parsers of commands that take no settings of a run. Others are those of `launch.cli`."""
MODULES = {"launch.train": "train", "launch.evaluate": "eval", "launch.preflight": "doctor"}
PLACEHOLDER = re.compile(r"\[|\bCONFIG\b|…")
"""Marks a command that describes others, such as `rl-vlm doctor CONFIG [--pixels]`."""


def commands(page: Path) -> list[str]:
    """Return the lines of shell blocks, without prompts, comments and redirected output."""
    lines = []
    for language, text in re.findall(r"^ *```(bash|console)\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE):
        given = [line.strip() for line in text.replace("\\\n", " ").splitlines()]
        typed = [line[2:] for line in given if line.startswith("$ ")] if language == "console" else given
        lines += [re.split(r"\s(?:>|<|\|)\s", line)[0] for line in typed if line and not line.startswith("#")]
    return lines


def of_this_project(line: str) -> list[str]:
    """Return the words of an `rl-vlm` command or of its module, or nothing for another program."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["rl-vlm"]:
        return words[1:]
    starts = [i for i, word in enumerate(words) if word in MODULES]
    return [MODULES[words[starts[0]]], *words[starts[0] + 1 :]] if starts else []


SHELL = [
    (page.relative_to(ROOT).as_posix(), line) for page in PAGES if page.name != "LOG.md" for line in commands(page)
]
RUNNABLE = [
    (page, line) for page, line in SHELL if of_this_project(line) and not PLACEHOLDER.search(line.split("#")[0])
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages assume it: the repository's own, with the reader's run file and reward."""
    path = tmp_path_factory.mktemp("reader")
    for each in ROOT.iterdir():
        (path / each.name).symlink_to(each)
    run = block((ROOT / "docs/your_run.md").read_text(), "yaml", "# my_run.yaml")
    for name in ("my_run.yaml", "run.yaml"):
        (path / name).write_text(run)
    first = block((ROOT / "README.md").read_text(), "yaml", "# my_first_run.yaml")
    (path / "my_first_run.yaml").write_text(first)
    return path


@pytest.mark.parametrize(("page", "line"), RUNNABLE)
def test_a_command_is_accepted(page: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    name, *words = of_this_project(line)
    if "--help" in words:
        with pytest.raises(SystemExit) as ended:
            cli.main([name, *words])
        assert ended.value.code == 0
        return
    if name in PARSERS:
        PARSERS[name](words)
        return
    options = cli._parser(name).parse_intermixed_args(words)
    load_config(options.config, options.overrides, cli.FIXED.get(name, {}))


def test_each_page_with_commands_is_read():
    assert len(RUNNABLE) > 80 and len({page for page, _ in RUNNABLE}) > 15


SECTION = re.compile(rf"^(?:{'|'.join(SECTIONS)}):", re.MULTILINE)
YAML = [
    (page.relative_to(ROOT).as_posix(), text)
    for page in PAGES
    for text in re.findall(r"^ *```yaml\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE)
    if page.name != "LOG.md" and SECTION.search(text)
]


@pytest.mark.parametrize(("page", "text"), YAML)
def test_settings_of_a_page_are_accepted(page: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    needed = ["environment=game.py:Game"] if "keep_images" in text and "environment:" not in text else []
    load_config(path, ["model_name_or_path=a", *needed])


def test_settings_of_several_pages_are_read():
    assert len(YAML) > 10
