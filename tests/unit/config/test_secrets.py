"""Secrets in settings: starred out in all that a run writes, and asked for if a run starts from what is written."""

import json
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rl_vlm.config.changes import changed_settings, flat_settings
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import LogConfig, RunConfig
from rl_vlm.config.secrets import starred
from rl_vlm.data.check import UsableRows
from rl_vlm.distributed.trackers import Trackers
from rl_vlm.errors import ConfigError
from rl_vlm.evaluation.run import what_matters
from rl_vlm.log.starts import command_line
from rl_vlm.log.terminal import shown_log

KWARGS = {"api_key": "opensesame7", "server": {"url": "https://me:opensesame7@host/v1?token=opensesame7"}, "limit": 7}


def config(kwargs: dict[str, Any] = KWARGS) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": "m"},
            "data": {"dataset_name": "rows.jsonl", "system_prompt": "Write ***bold***, as in sk-learn-tutorial."},
            "rewards": {"reward_funcs": ["exact_match", {"function": "mine.py:f", "kwargs": kwargs}]},
        }
    )


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("api_key", "a", True),
        ("OPENAI_API_KEY", "a b", True),
        ("openaiApiKey", "a", True),
        ("aws_secret_access_key", "a", True),
        ("password", 12345, True),
        ("authorization", "a", True),
        ("auth", {"user": "me", "pass": "a"}, True),
        ("token", "abcdef", True),
        ("hf_token", 12345, True),
        ("anything", "sk-abc123def456", True),
        ("header", "Bearer abc", True),
        ("license_key", "A1b2C3d4E5f6G7h8", True),
        ("hub", "hf_abcdefghijklmnopqrstuvwx", True),
        ("model_name_or_path", "hf_base_model_v1", False),
        ("run_name", "sk-baseline-01", False),
        ("end_token", "STOP", False),
        ("answer_key", "ground_truth_2024_v1", False),
        ("api_key_env", "JUDGE_KEY", False),
        ("api_key", "", False),
        ("password", None, False),
        ("use_auth", True, False),
        ("micro_batch_tokens", "auto", False),
        ("max_token", 512, False),
        ("stop_token", "<|im_end|>", False),
        ("label_key", "category", False),
        ("author", "me", False),
        ("text", "mail me@host, at https://host/a@b, a sk-abc123def456", False),
    ],
)
def test_what_looks_like_a_secret(name: str, value: Any, is_secret: bool):
    assert starred({name: value}) == {name: "***" if is_secret else value}
    assert starred({name: [value]}) == {name: ["***" if is_secret else value]}


def test_of_an_address_the_login_and_the_parameters_are_starred():
    found = starred("see https://me:a@b@host:80/x?n=1&api_key=abc and http://host/y")
    assert found == "see https://***@host:80/x?n=1&api_key=*** and http://host/y"


def test_nothing_that_a_run_writes_has_a_secret(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rl_vlm.evaluation.run.file_stamps", lambda name: [])
    evaluation = what_matters(config(), "m", Mock(spec=UsableRows, indices=[]))
    trackers = Trackers(LogConfig(), str(tmp_path))
    sent: dict[str, Any] = {}
    monkeypatch.setattr(trackers.accelerator, "init_trackers", lambda name, config: sent.update(config))
    trackers.start("run", config().model_dump())
    override = f"rewards.reward_funcs={json.dumps([{'function': 'mine.py:f', 'kwargs': KWARGS}])}"
    command = command_line(["rl-vlm", "train", "c.yaml", override, "max_steps=3"])
    with shown_log():
        logging.getLogger("rl_vlm.test").warning("https://me:opensesame7@host refuses sk-opensesame7-1a2b")
    written = [to_yaml(config()), json.dumps(flat_settings(config())), str(evaluation), str(sent), command]
    assert all("mine.py:f" in text for text in written)
    written += [capsys.readouterr().err]
    assert not [text for text in written if "opensesame7" in text or "***" not in text]
    assert command.endswith(" max_steps=3") and "limit: 7" in written[0]


def test_another_secret_is_no_changed_setting():
    later = config(KWARGS | {"api_key": "another"})
    assert changed_settings(flat_settings(config()), later) == {}
    functions = config().model_dump()["rewards"]["reward_funcs"]
    of_an_earlier_version = flat_settings(config()) | {"rewards.reward_funcs": functions}
    assert changed_settings(of_an_earlier_version, later) == {}
    (changed,) = changed_settings(flat_settings(config()), config(KWARGS | {"limit": 8})).items()
    assert changed[0] == "rewards.reward_funcs" and "opensesame7" not in changed[1]


def test_another_model_with_a_name_like_a_key_is_a_changed_setting():
    models = [RunConfig.model_validate({"model": {"model_name_or_path": f"hf_model_v{n}"}}) for n in (1, 2)]
    assert list(changed_settings(flat_settings(models[0]), models[1])) == ["model.model_name_or_path"]


def test_a_run_that_starts_from_a_written_config_names_what_is_starred(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config()))
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert [line.partition(" is starred out")[0] for line in str(raised.value).splitlines()] == [
        f"{path}: `rewards.reward_funcs[1].kwargs.api_key`",
        f"{path}: `rewards.reward_funcs[1].kwargs.server.url`",
    ]
    again = f"rewards.reward_funcs={json.dumps(config().model_dump()['rewards']['reward_funcs'])}"
    assert load_config(path, [again]) == config()


def test_errors_of_settings_show_no_secret(tmp_path: Path):
    path = tmp_path / "run.yaml"
    path.write_text("model_name_or_path: m\nreward_funcs: [{function: 3, kwargs: {password: opensesame7}}]\n")
    with pytest.raises(ConfigError, match="reward_funcs") as raised:
        load_config(path, ["evaluation.endpoint_url=ftp://me:opensesame7@host"])
    assert "opensesame7" not in str(raised.value)
