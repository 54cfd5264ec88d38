import ast
import dataclasses
from pathlib import Path

import pytest

from rl_vlm.config import trl_fields
from rl_vlm.config.load import FULL_NAMES
from rl_vlm.config.schema import SECTIONS, SETTINGS, RewardSpec

ROOT = Path(__file__).parents[2]


def test_leaf_names_are_unique():
    leaves = sorted(setting.split(".")[1] for setting in SETTINGS)
    assert leaves == sorted(set(leaves))


def test_every_setting_has_a_docstring():
    fields = {**SETTINGS, **RewardSpec.model_fields}
    assert [name for name, field in fields.items() if not field.description] == []


def settings_read(code: ast.AST) -> set[str]:
    """`Class.leaf` of what is read from something that is named after its section, or annotated with its class."""
    holders = {(section, model.__name__) for section, model in SECTIONS.items()}
    for node in ast.walk(code):
        match node:
            case (
                ast.arg(arg=name, annotation=ast.Name(id=annotation))
                | ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id=annotation))
            ):
                holders.add((name, annotation))
    read = set()
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name(id=holder) | ast.Attribute(attr=holder), attr=leaf):
                read |= {f"{model}.{leaf}" for name, model in holders if name == holder}
    return read


def test_every_setting_is_read():
    code = [path for folder in ("rl_vlm", "launch") for path in (ROOT / folder).rglob("*.py")]
    readers = [path for path in code if path.name not in ("schema.py", "conflicts.py", "describe.py")]
    read = set().union(*(settings_read(ast.parse(path.read_text())) for path in readers))
    settings = {f"{model.__name__}.{leaf}" for model in (*SECTIONS.values(), RewardSpec) for leaf in model.model_fields}
    assert sorted(settings - read) == []


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
