"""What the pages show works as it is written, and their links lead somewhere."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from launch import cli
from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.shardings import UNSHARDED
from rl_vlm.functions import live
from rl_vlm.grpo_trainer import GRPOTrainer
from rl_vlm.model.families import FAMILIES
from rl_vlm.plan.build import inspect_model, plan_memory
from rl_vlm.plan.hardware import Hardware, parse_card
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import TrainerState
from tests.helpers.builders import answered_group
from tests.helpers.pages import CONTRIBUTING, DOCS, PAGES, README, ROOT, anchors, block, links
from tests.tiny.build import TINY_FAMILIES

YOUR_RUN = (ROOT / "docs/your_run.md").read_text()
PYTHON = (ROOT / "docs/python.md").read_text()


def test_the_larger_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = block(YOUR_RUN, "json", '{"image"')
    (tmp_path / "my_run.yaml").write_text(block(YOUR_RUN, "yaml", "# my_run.yaml"))
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "data/train.jsonl").write_text(row)
    Image.new("RGB", (4, 3)).save(tmp_path / "data" / json.loads(row)["image"])
    monkeypatch.chdir(tmp_path)

    config = load_config("my_run.yaml")
    check_trainable(config)
    assert batch_sizes(config, world_size=1).completions_per_step == 128
    sample = load_rows(config.data, "train")[0]
    assert sample.prompt == "How many cups are there? Put the number in <answer> tags."
    assert [image.size for image in sample.images] == [(4, 3)]
    with RewardSuite(config.rewards) as suite:
        suite.check_columns(sample.columns)


def test_commands_for_several_machines_fit_the_larger_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run whose prompts cannot be shared equally among these processes would be refused, with status 2."""
    pages = YOUR_RUN + (ROOT / "docs/distributed.md").read_text()
    commands = [shlex.split(found) for found in re.findall(r"rl-vlm (launch my_run\.yaml[^`#>\n]*)", pages)]
    assert len(commands) == 5
    (tmp_path / "my_run.yaml").write_text(block(YOUR_RUN, "yaml", "# my_run.yaml"))
    monkeypatch.chdir(tmp_path)
    assert [command for command in commands if cli.main(command) != 0] == []


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> GRPOTrainer:
    """The trainer of the run from Python, which is not started."""
    rows = datasets.Dataset.from_list([{"prompt": "How many?", "solution": "3"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: rows)
    monkeypatch.setattr(GRPOTrainer, "train", lambda trainer: {"optimizer_steps": 0})
    names: dict[str, Any] = {}
    exec(block(PYTHON, "python", "from datasets import load_dataset"), names)
    return names["trainer"]


def test_the_run_from_python(trainer: GRPOTrainer):
    config = trainer.config
    check_trainable(config)
    assert batch_sizes(config, world_size=1).completions_per_step == 128
    with live(trainer.objects), RewardSuite(config.rewards) as suite:
        table = suite.score([answered_group("How many?", ["<answer>7</answer>", "7"])], TrainerState(0, 1, 0.0))
        suite.check_columns(load_rows(config.data, "train")[0].columns)
    assert [round(brevity, 3) for _, brevity in table.scores_PGF[0].tolist()] == [-0.018, -0.001]


@pytest.mark.ci
def test_the_run_from_python_fits_the_card_that_is_named(trainer: GRPOTrainer):
    size = re.search(r"By the memory plan, it fits one card of (\d+) GB", PYTHON)
    assert size
    hardware = Hardware(parse_card(f"{size[1]}GB"), 1, 1, UNSHARDED)
    assert plan_memory(trainer.config, hardware, inspect_model(trainer.config)).fits


def test_the_page_of_families_names_each_and_its_table_holds_what_is_built():
    page = (ROOT / "docs" / "families.md").read_text()
    assert [family for family in FAMILIES if f"`{family}`" not in page] == []
    assert [name for name in TINY_FAMILIES if f"| {name} |" not in page] == []


def test_the_guide_to_the_code_names_every_module():
    guide = CONTRIBUTING.read_text()
    modules = {path.name for path in (ROOT / "rl_vlm").glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in (ROOT / "rl_vlm").glob("*/__init__.py")}
    assert [name for name in sorted(modules | folders) if name not in guide] == []


def test_links_of_pages_lead_somewhere():
    """Links to files, and to headings of pages."""
    missing = []
    for page in PAGES:
        for link in links(page):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert missing == []


def test_every_page_is_reached():
    linked = {Path(link.partition("#")[0]).name for page in [README, CONTRIBUTING, *DOCS] for link in links(page)}
    assert {page.name for page in DOCS} - linked == set()
