"""Tables of docs/support.md and other pages are those of the tests' lists and of the checks of a run."""

import pytest

from tests.helpers import support_tables
from tests.helpers.support_tables import (
    ENVIRONMENT_TABLES,
    ENVIRONMENTS_PAGE,
    FAMILIES_PAGE,
    FAMILY_TABLES,
    PAGE,
    accepted,
    family_row,
    with_tables,
)


def test_the_page_has_the_tables_as_they_are():
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "write them: python -m tests.helpers.support_tables"
    page = FAMILIES_PAGE.read_text()
    assert with_tables(page, FAMILY_TABLES) == page, "write it: python -m tests.helpers.support_tables"
    page = ENVIRONMENTS_PAGE.read_text()
    assert with_tables(page, ENVIRONMENT_TABLES) == page, "write it: python -m tests.helpers.support_tables"


@pytest.mark.parametrize(
    ("family", "row"),
    [
        ("gemma3", "`gemma3` yes yes yes yes yes trained yes every-change"),
        ("mllama", "`mllama` yes yes yes – – – – every-change"),
        ("paligemma2", "`paligemma2` yes yes – yes – same-calls yes part-in-CI"),
        ("perception_lm", "`perception_lm` yes – yes yes yes same-calls – part-in-CI"),
    ],
)
def test_rows_of_families(family: str, row: str):
    assert " ".join(cell.replace(" ", "-") for cell in family_row(family)) == row


def test_models_with_images_in_the_first_prompt_alone():
    rows = support_tables.first_images().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [
        "paligemma", "got_ocr2", "minimax_m3_vl", "mllama", "CogVLMForCausalLM",
    ]  # fmt: skip


def test_cells_of_engines():
    refused = {"engine": "vllm", "use_peft": True, "load_in_4bit": True}
    assert accepted(refused) == "–"
    assert accepted(refused | {"engine": "hf"}) == "yes"


def test_a_changed_list_changes_the_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support_tables.test_sharding_families, "FAMILIES", ["llava"])
    assert with_tables(PAGE.read_text()) != PAGE.read_text()


def test_every_feature_is_accepted_somewhere():
    rows = support_tables.engines().splitlines()[2:] + support_tables.shardings().splitlines()[2:]
    assert [row for row in rows if "yes" not in row] == []
