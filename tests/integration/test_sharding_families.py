"""Families under ZeRO-3 and FSDP2: three steps, the last without an image, with a reference that is sharded as well."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import mixed_run
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.sharded_runs import Runs, differences

FAMILIES = [
    "qwen2_5_vl",
    "qwen3_vl",  # features for several layers
    "qwen3_vl_moe",  # experts
    "internvl",
    "gemma3",  # tied embeddings, buffers of sliding windows
    "glm4v",  # a position table that is read without calling its module
    "qwen3_5",  # layers with a state
    "qwen3_5_moe",
    "lfm2_vl",  # projectors that transformers calls once per image
    "minicpmv4_6",
    "minicpmv4_7",
    "paddleocr_vl",
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("families")
    return {family: sharp_checkpoint(family, directory / family) for family in FAMILIES}


BY_LAYER = {"qwen3_vl_by_layer": "qwen3_vl", "glm4v_by_layer": "glm4v", "qwen3_5_by_layer": "qwen3_5"}
"""Runs whose rollouts gather the weights layer by layer."""


WITH_VIDEOS = ["qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3"]
"""Families of runs in which one rank has videos alone while the other has images alone. Gemma 3 gets frames."""


def settings(checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    plain = {family: {"checkpoint": path, "max_steps": 3, "beta": 0.04} for family, path in checkpoints.items()}
    videos = {"dataset_name": mixed_run.VIDEO_ROWS, "micro_batch_tokens": 400}
    return plain | {f"{family}_videos": plain[family] | videos for family in WITH_VIDEOS}


@pytest.fixture(scope="module")
def one(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs.of(tmp_path_factory.mktemp("one"), settings(checkpoints)).train()


@pytest.fixture(scope="module", params=["zero3", "fsdp2"])
def two(checkpoints: dict[str, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    plain = settings(checkpoints)
    by_layer = {name: plain[family] | {"ds3_gather_for_generation": False} for name, family in BY_LAYER.items()}
    return Runs.of(tmp_path_factory.mktemp(request.param), plain | by_layer).launch(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *BY_LAYER, *(f"{family}_videos" for family in WITH_VIDEOS)])
def test_every_family_trains_as_on_one_process(one: Runs, two: Runs, name: str) -> None:
    found = differences(one[BY_LAYER.get(name, name)], two[name])
    print(two.directory.name, name, found)
    assert found.losses <= 1e-5
    assert found.gradients <= 1e-5
    assert found.weights <= 1e-3
