"""Which families the installed transformers has."""

from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.errors import ModelError
from rl_vlm.model import families
from rl_vlm.model.families import family_of


def config(model_type: str) -> Any:
    return SimpleNamespace(model_type=model_type)


@pytest.mark.parametrize("model_type", ["mllama", "minicpmv4_6", "minicpmv4_7"])
def test_a_family_that_this_version_of_transformers_gets_wrong_is_refused(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "version", lambda package: "5.18.2")
    with pytest.raises(ModelError, match=f"{model_type} needs transformers 5.19, found 5.18.2"):
        family_of(config(model_type))
    assert family_of(config("qwen2_5_vl")).is_available
    monkeypatch.setattr(families, "version", lambda package: "5.19.0")
    assert family_of(config(model_type)).is_available
