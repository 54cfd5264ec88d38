"""Which checkpoint `rl-vlm chat` serves, and with which settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.errors import CheckpointError, ConfigError, ModelError
from rl_vlm.tools.serving.checkpoint import find_served
from tests.helpers.tiny_run import make_config

pytestmark = pytest.mark.ci


def write_checkpoint(run: Path, step: int, name: str = "config.json") -> Path:
    unfinished = store.unfinished_path(run, step)
    store.begin(unfinished)
    (unfinished / name).write_text("{}")
    return store.commit(unfinished, [name])


def make_run(path: Path, **settings: Any) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(make_config("base", path, **settings)))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints 4, 8 and an incomplete 12."""
    path = make_run(tmp_path / "run", max_pixels=1024, dtype="bfloat16", system_prompt="Be brief.", top_k=3)
    for step in (4, 8, 12):
        write_checkpoint(path, step)
    (path / "checkpoint-12" / "config.json").unlink()
    return path


def test_the_newest_complete_checkpoint_of_a_run_with_its_settings(run):
    served = find_served(str(run), "hf", [])
    assert served.checkpoint == served.config.model.model_name_or_path == str(run / "checkpoint-8")
    config = served.config
    assert (config.data.max_pixels, config.model.dtype, config.rollout.max_completion_length) == (1024, "bfloat16", 6)
    assert served.sources["data.max_pixels"] == str(run / "config.yaml")
    assert (config.data.system_prompt, config.rollout.top_k, config.data.dataset_name) == (None, 0, None)


def test_a_run_whose_config_lacks_secrets_is_served(tmp_path):
    entry = {"function": "mine.py:f", "kwargs": {"api_key": "a"}}
    run = make_run(tmp_path / "run", reward_funcs=[entry], reward_weights=[2.0], max_pixels=1024)
    write_checkpoint(run, 4)
    assert "api_key: '***'" in (run / "config.yaml").read_text()
    assert find_served(str(run), "hf", []).config.data.max_pixels == 1024


def test_the_checkpoint_of_the_summary_comes_first(run):
    (run / "summary.json").write_text(json.dumps({"checkpoint": "moved/checkpoint-4"}))
    assert find_served(str(run), "hf", []).checkpoint == str(run / "checkpoint-4")


def test_a_checkpoint_has_the_settings_of_its_run(run):
    served = find_served(str(run / "checkpoint-4"), "hf", ["max_pixels=2048"])
    assert (served.config.data.max_pixels, served.config.model.dtype) == (2048, "bfloat16")
    assert served.sources["data.max_pixels"] == "the command line"
    with pytest.raises(CheckpointError, match="checkpoint-12 is not"):
        find_served(str(run / "checkpoint-12"), "hf", [])


def test_a_model_without_a_run_has_defaults(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in (str(tmp_path), "Qwen/Qwen2.5-VL-3B-Instruct"):
        served = find_served(name, "hf", ["min_pixels=64"])
        assert (served.checkpoint, served.config.data.min_pixels, served.config.data.max_pixels) == (name, 64, None)
        assert served.sources == {"data.min_pixels": "the command line"}
    with pytest.raises(ConfigError, match="model_revision 'v2' has no effect"):
        find_served(str(tmp_path), "hf", ["model_revision=v2"])


def test_an_adapter_of_a_run_keeps_its_lora_settings_and_revision(tmp_path):
    run = make_run(tmp_path / "run", use_peft=True, lora_r=4, model_revision="v2")
    write_checkpoint(run, 4, "adapter_config.json")
    model = find_served(str(run), "hf", []).config.model
    assert (model.use_peft, model.lora_r, model.model_revision) == (True, 4, "v2")


def test_settings_of_vllm_count_if_it_serves(tmp_path):
    run = make_run(tmp_path / "run", engine="vllm", vllm_max_model_length=256, vllm_enable_sleep_mode=True)
    write_checkpoint(run, 4)
    vllm = find_served(str(run), "vllm", []).config.vllm
    assert (vllm.vllm_max_model_length, vllm.vllm_enable_sleep_mode) == (256, False)
    assert find_served(str(run), "hf", []).config.vllm.vllm_max_model_length is None


@pytest.mark.parametrize("override", ["learning_rate=1", "system_prompt=Hello", "engine=vllm", "model_name_or_path=x"])
def test_settings_without_effect_are_refused(run, override):
    with pytest.raises(ConfigError, match=r"no effect on `rl-vlm chat`, which reads .*data.max_pixels"):
        find_served(str(run), "hf", [override])


def test_what_holds_nothing_to_serve(tmp_path):
    with pytest.raises(ModelError, match="holds no model"):
        find_served(str(tmp_path), "hf", [])
    with pytest.raises(CheckpointError, match="has no complete checkpoint yet"):
        find_served(str(make_run(tmp_path / "run")), "hf", [])
