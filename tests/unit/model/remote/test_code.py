"""Code of checkpoints: the class that loads a model, and when code of the hub can change."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig

from rl_vlm.config.own_code import auto_name
from rl_vlm.config.schema import ModelConfig
from rl_vlm.model.families import family_of
from rl_vlm.model.files import moving_code, warn_of_moving_code
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.model.remote.code import model_class, with_placeholder
from tests.tiny.build import build_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def settings(name: str | Path, **others: Any) -> ModelConfig:
    return ModelConfig.model_validate({"model_name_or_path": str(name), "trust_remote_code": True, **others})


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (["AutoConfig", "AutoModel"], "AutoModel"),
        (["AutoModel", "AutoModelForCausalLM"], "AutoModelForCausalLM"),
        (["AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText"], "AutoModelForImageTextToText"),
        (["AutoConfig"], "AutoModelForImageTextToText"),
    ],
)
def test_the_first_class_of_an_auto_map_loads_the_model(named: list[str], expected: str) -> None:
    config: Any = PreTrainedConfig()
    config.auto_map = {name: f"modeling.{name}" for name in named}
    assert auto_name(config) == expected
    assert model_class(config, is_trusted=False) is AutoModelForImageTextToText


def test_the_processor_has_the_image_token_that_a_config_lacks(tmp_path: Path) -> None:
    build_tiny("blip-2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    expected = config.pop("image_token_index")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checkpoint_config(str(tmp_path), ModelConfig(model_name_or_path=str(tmp_path)))
    assert found.image_token_id == expected
    assert family_of(found).banned_token_ids(found) == [expected]


def test_a_config_without_a_processor_stays_as_it_is(tmp_path: Path) -> None:
    config: Any = AutoConfig.for_model("blip-2")
    assert with_placeholder(config, str(tmp_path), "main").image_token_id is None


def test_code_of_the_hub_at_a_branch_or_tag_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    expected = "runs the code of owner/model at the revision 'main', which can change. Read the code, and set "
    assert expected in (moving_code(settings("owner/model")) or "")
    assert "at the revision 'v2'" in (moving_code(settings("owner/model", model_revision="v2")) or "")
    assert moving_code(settings("owner/model", model_revision=COMMIT)) is None
    assert moving_code(settings("owner/model", trust_remote_code=False)) is None
    with caplog.at_level(logging.WARNING):
        warn_of_moving_code(settings("owner/model", model_revision=COMMIT))
        assert caplog.text == ""
        warn_of_moving_code(settings("owner/model"))
    assert expected in caplog.text


def test_code_of_another_repository_is_warned_of_at_any_revision(tmp_path: Path) -> None:
    named = {
        "AutoConfig": "config.Mine",
        "AutoModel": "other/code--modeling.Model",
        "AutoTokenizer": ["third/x--a.B", None],
    }
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": named}))
    warning = moving_code(settings(tmp_path)) or ""
    assert "runs the newest code of other/code, third/x, which the auto_map of" in warning
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": f"{tmp_path}--modeling.Model"}}))
    assert moving_code(settings(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": ["no mapping"]}))
    assert moving_code(settings(tmp_path)) is None


def test_code_in_a_directory_is_the_users(tmp_path: Path) -> None:
    assert moving_code(settings(tmp_path)) is None
    assert moving_code(settings("models.py:small")) is None
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for base, is_moving in ((str(tmp_path), False), ("owner/base", True)):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        assert ("runs the code of owner/base" in (moving_code(settings(adapter)) or "")) == is_moving
