"""What the README shows works as it is written."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image

from launch import cli
from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import check_trainable, load_config
from rl_vlm.config.schema import RewardsConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.shardings import UNSHARDED
from rl_vlm.functions import live
from rl_vlm.grpo_trainer import GRPOTrainer
from rl_vlm.model.families import FAMILIES
from rl_vlm.plan.build import inspect_model, plan_memory
from rl_vlm.plan.hardware import Hardware, parse_card
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import Completion, Group, Prompt, Sample, TrainerState
from tests.tiny.build import TINY_FAMILIES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MESSAGES = [{"role": "user", "content": "Which digit is this?"}]


EXAMPLES = sorted((ROOT / "examples").rglob("*.md"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def block(language: str, opening: str) -> str:
    """The code block of a language that starts with `opening`."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return next(text for text in blocks if text.startswith(opening))


def group(prompt: str | list, texts: list[str]) -> Group:
    sample = Sample("s0", MESSAGES, [], {"solution": "7"}, prompt)
    completions = [Completion(torch.tensor([1]), torch.zeros(1), "stop", text) for text in texts]
    return Group("g0", Prompt(sample, torch.tensor([1]), {}, {}), completions, policy_version=0)


@pytest.mark.parametrize("prompt", ["Which digit is this?", MESSAGES], ids=["text", "messages"])
def test_the_custom_reward(prompt: str | list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = block("python", "# my_reward.py")
    assert len(source.splitlines()) <= 10
    (tmp_path / "my_reward.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    override = re.search(r"rewards\.reward_funcs='([^']+)'", README)
    assert override
    config = load_config(ROOT / "configs/digits.yaml", [f"rewards.reward_funcs={override[1]}"])

    texts = ["<answer>7</answer>", "It is a <answer>1</answer>.", "x" * 40]
    with RewardSuite(RewardsConfig(reward_funcs=config.rewards.reward_funcs)) as suite:
        table = suite.score([group(prompt, texts)], TrainerState(0, 1, 0.0))
    assert table.fault_messages == []
    assert table.names == ["exact_match", "short_answer"]
    assert table.scores_PGF.tolist() == [[[1.0, 1.0], [0.0, 0.5], [0.0, 0.0]]]
    assert table.metrics == {"characters": [pytest.approx((18 + 27 + 40) / 3)]}


def test_the_larger_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = re.search(r'`(\{"image": .*?\})`', README)
    assert row
    (tmp_path / "my_run.yaml").write_text(block("yaml", "# my_run.yaml"))
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "data/train.jsonl").write_text(row[1] + "\n")
    Image.new("RGB", (4, 3)).save(tmp_path / "data" / json.loads(row[1])["image"])
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
    pages = README + (ROOT / "docs/distributed.md").read_text()
    commands = [shlex.split(found) for found in re.findall(r"rl-vlm (launch my_run\.yaml[^`#>\n]*)", pages)]
    assert len(commands) == 5
    (tmp_path / "my_run.yaml").write_text(block("yaml", "# my_run.yaml"))
    monkeypatch.chdir(tmp_path)
    assert [command for command in commands if cli.main(command) != 0] == []


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> GRPOTrainer:
    """The trainer of the README's run from Python, which is not started."""
    rows = datasets.Dataset.from_list([{"prompt": "How many?", "solution": "3"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: rows)
    monkeypatch.setattr(GRPOTrainer, "train", lambda trainer: {"optimizer_steps": 0})
    names: dict[str, Any] = {}
    exec(block("python", "from datasets import load_dataset"), names)
    return names["trainer"]


def test_the_run_from_python(trainer: GRPOTrainer):
    config = trainer.config
    check_trainable(config)
    assert batch_sizes(config, world_size=1).completions_per_step == 128
    with live(trainer.objects), RewardSuite(config.rewards) as suite:
        table = suite.score([group("How many?", ["<answer>7</answer>", "7"])], TrainerState(0, 1, 0.0))
        suite.check_columns(load_rows(config.data, "train")[0].columns)
    assert [round(brevity, 3) for _, brevity in table.scores_PGF[0].tolist()] == [-0.018, -0.001]


@pytest.mark.ci
def test_the_run_from_python_fits_the_card_that_is_named(trainer: GRPOTrainer):
    size = re.search(r"By the memory plan, it fits one card of (\d+) GB", README)
    assert size
    hardware = Hardware(parse_card(f"{size[1]}GB"), 1, 1, UNSHARDED)
    assert plan_memory(trainer.config, hardware, inspect_model(trainer.config)).fits


def test_the_page_of_families_names_each_and_its_table_holds_what_is_built():
    page = (ROOT / "docs" / "families.md").read_text()
    assert [family for family in FAMILIES if f"`{family}`" not in page] == []
    assert [name for name in TINY_FAMILIES if f"| {name} |" not in page] == []


def test_the_page_about_the_code_names_every_module():
    page = (ROOT / "docs/code.md").read_text()
    modules = {path.name for path in (ROOT / "rl_vlm").glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in (ROOT / "rl_vlm").glob("*/__init__.py")}
    assert [name for name in sorted(modules | folders) if name not in page] == []


def test_links_of_pages_lead_somewhere():
    """Links to files, and to headings of pages."""
    missing = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *EXAMPLES]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert missing == []


def test_every_page_is_reached():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    linked = {Path(link).name for link in re.findall(r"\]\(([^)#\s]+\.md)", pages)}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - linked == set()
