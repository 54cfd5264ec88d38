import ast
import dataclasses
from pathlib import Path

import pytest

from rl_vlm.config import trl_fields
from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.schema import SETTINGS, RewardSpec

ROOT = Path(__file__).parents[2]


def test_leaf_names_are_unique():
    leaves = sorted(setting.split(".")[1] for setting in SETTINGS)
    assert leaves == sorted(set(leaves))


def test_every_setting_has_a_docstring():
    fields = {**SETTINGS, **RewardSpec.model_fields}
    assert [name for name, field in fields.items() if not field.description] == []


def test_every_setting_is_read():
    code = [path for folder in ("rl_vlm", "launch") for path in (ROOT / folder).rglob("*.py")]
    read = {
        node.attr
        for path in code
        if path.name != "schema.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert sorted({*FULL_NAMES, *RewardSpec.model_fields} - read) == []


def test_settings_named_in_the_trl_table_exist():
    assert trl_fields.SAME.issubset(FULL_NAMES)


def test_the_trl_table_has_each_field_once():
    trl = pytest.importorskip("trl", reason="needs trl to list its fields")
    from trl.scripts.grpo import GRPOScriptArguments

    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for arguments in (trl.GRPOConfig, trl.ModelConfig, GRPOScriptArguments)
        for field in dataclasses.fields(arguments)
    }
    absent = [name for fields in trl_fields.NOT_HERE.values() for name in fields]
    assert sorted([*trl_fields.SAME, *trl_fields.CONVERTED, *absent]) == sorted(defaults)
    assert set(trl_fields.OLD_NAMES).isdisjoint(defaults)

    def refused(name: str) -> bool:
        try:
            return trl_fields.translate(name, defaults[name], {}) is None
        except ValueError:
            return True

    assert [name for name in absent if refused(name)] == ["lora_dropout"]
