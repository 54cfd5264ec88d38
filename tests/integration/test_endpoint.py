"""Evaluation of a model that is only served, by the server of `rl-vlm chat` with the tiny model."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from launch import cli
from rewards import http
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed import installation
from rl_vlm.errors import ConfigError, RolloutError
from rl_vlm.rollout import endpoint as openai
from tests.helpers import tiny_run
from tests.helpers.chat_server import RecordingServer
from tests.helpers.evaluating import evaluate_run
from tests.helpers.tiny_run import make_config

KEY = "sk-secret"


def letters(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """A reward of the text, which tells most completions apart."""
    return [sum(map(ord, completion[0]["content"])) % 97 / 97 for completion in completions]


@pytest.fixture(scope="module")
def server_of_module(tiny_checkpoint) -> Iterator[RecordingServer]:
    """With a `min_pixels` that is the size of the images."""
    server = RecordingServer(tiny_checkpoint, "min_pixels=256")
    yield server
    server.end()


@pytest.fixture
def server(server_of_module: RecordingServer, monkeypatch: pytest.MonkeyPatch) -> RecordingServer:
    """As if it had just been started, and retries that do not wait."""
    server_of_module.key, server_of_module.statuses, server_of_module.most_at_once = "", [], 0
    server_of_module.bodies.clear()
    monkeypatch.delenv(openai.API_KEY, raising=False)
    monkeypatch.setattr(http, "FIRST_PAUSE", 0.001)
    return server_of_module


def endpoint_config(server: RecordingServer, output_dir: Path, **settings: Any) -> RunConfig:
    given = {"eval_dataset_name": tiny_run.HELD_OUT_ROWS, "reward_funcs": [f"{__name__}:letters"], **settings}
    return make_config("tiny", output_dir, **{"endpoint_url": server.url, **given})


def rows(output_dir: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(output_dir / "evaluation" / "completions.parquet").to_pylist()


def test_greedy_scores_are_those_of_the_model_itself(server, tiny_checkpoint, tmp_path):
    settings = {"system_prompt": "Be brief.", "eval_dataset_name": tiny_run.HELD_OUT_ROWS}
    served = evaluate_run(endpoint_config(server, tmp_path / "served", **settings))
    functions = [f"{__name__}:letters"]
    local = evaluate_run(make_config(tiny_checkpoint, tmp_path / "local", reward_funcs=functions, **settings))
    assert served == local
    unknown = {"prompt_length": None, "model_image_sizes": []}
    assert rows(tmp_path / "served") == [row | unknown for row in rows(tmp_path / "local")]
    assert len(server.bodies) == 5
    (system, user) = server.bodies[0]["messages"]
    assert (system["content"], [part["type"] for part in user["content"]]) == ("Be brief.", ["image_url", "text"])


def test_the_machine_of_an_endpoints_client_needs_no_gpu(server, tiny_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()  # a card that torch cannot use
    monkeypatch.setattr(installation, "DEVICES", tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    evaluate_run(endpoint_config(server, tmp_path / "served"))
    with pytest.raises(ConfigError, match="this machine has NVIDIA cards"):
        evaluate_run(make_config(tiny_checkpoint, tmp_path / "local", eval_dataset_name=tiny_run.HELD_OUT_ROWS))


def test_completions_of_a_prompt_have_seeds_of_their_own(server, tmp_path):
    settings = {"eval_temperature": 1.0, "num_generations_eval": 3, "top_k": 5, "min_pixels": 256}
    evaluate_run(endpoint_config(server, tmp_path, **settings))
    assert len({body["seed"] for body in server.bodies}) == 15
    assert all(0 <= body["seed"] < 2**31 for body in server.bodies)
    body = server.bodies[0]
    assert (body["temperature"], body["max_tokens"], body["top_p"]) == (1.0, 6, 1.0)
    assert (body["top_k"], body["mm_processor_kwargs"]) == (5, {"min_pixels": 256})
    assert "min_p" not in body and "chat_template_kwargs" not in body
    assert len({row["completion"] for row in rows(tmp_path)}) > 10
    assert 1 < server.most_at_once <= 15


def test_requests_at_once_are_bounded(server, tmp_path):
    evaluate_run(endpoint_config(server, tmp_path, endpoint_max_concurrency=2))
    assert server.most_at_once <= 2


def test_an_overloaded_server_is_asked_again(server, tmp_path):
    server.statuses = [500, 429, 503]
    evaluate_run(endpoint_config(server, tmp_path))
    assert (len(rows(tmp_path)), server.statuses) == (5, [])


def test_what_is_finished_is_kept_when_the_server_fails_for_good(server, tmp_path):
    """One request at once, and four prompts a chunk: the fifth prompt never gets an answer."""
    settings = {"endpoint_max_concurrency": 1, "endpoint_max_retries": 2}
    evaluate_run(endpoint_config(server, tmp_path / "straight", **settings))
    server.bodies.clear()
    server.statuses = [200] * 4 + [500] * 3
    with pytest.raises(
        RolloutError, match=r"answers with status 500: .*out of order.* \(3 tries\).*Finished samples are kept"
    ):
        evaluate_run(endpoint_config(server, tmp_path / "cut", **settings))
    assert len(server.bodies) == 4
    evaluate_run(endpoint_config(server, tmp_path / "cut", **settings))
    assert len(server.bodies) == 5
    cut, straight = (tmp_path / name / "evaluation" / "completions.parquet" for name in ("cut", "straight"))
    assert cut.read_bytes() == straight.read_bytes()


def test_the_key_comes_from_the_environment_and_is_never_shown(server, tmp_path, capsys, monkeypatch):
    server.key = KEY
    (tmp_path / "run.yaml").write_text(to_yaml(endpoint_config(server, tmp_path)))
    evaluation = ["eval", str(tmp_path / "run.yaml")]
    assert cli.main(evaluation) == 2
    assert "refuses a request without an API key; set OPENAI_API_KEY (status 401)" in capsys.readouterr().err

    monkeypatch.setenv(openai.API_KEY, "sk-other")
    assert cli.main(evaluation) == 2
    printed = capsys.readouterr().err
    assert "refuses the API key in OPENAI_API_KEY (status 401)" in printed
    assert "wrong key: Bearer ***" in printed and "sk-other" not in printed

    monkeypatch.setenv(openai.API_KEY, KEY)
    assert cli.main(evaluation) == 0
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_an_address_where_nobody_listens(server, tmp_path):
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}/v1"
        config = endpoint_config(server, tmp_path, endpoint_url=url, endpoint_max_retries=1)
        with pytest.raises(RolloutError, match=rf"{url}/chat/completions cannot be reached: .*refused.* \(2 tries\)"):
            evaluate_run(config)


@pytest.mark.parametrize("settings", [{"model_name_or_path": "tinny"}, {"endpoint_url": "root"}])
def test_a_model_or_address_that_is_not_served(settings, server, tmp_path):
    if "endpoint_url" in settings:
        settings = {"endpoint_url": server.url.removesuffix("/v1")}
    with pytest.raises(RolloutError, match=r"or does not serve 'tin+y' \(status 404\): .* ends in /v1"):
        evaluate_run(endpoint_config(server, tmp_path, **settings))


def test_served_models_are_compared_by_name(server, tmp_path):
    (tmp_path / "run.yaml").write_text(to_yaml(endpoint_config(server, tmp_path)))
    assert cli.main(["eval", str(tmp_path / "run.yaml"), "--checkpoint", "tiny", "--checkpoint", "other"]) == 2
    unfinished = tmp_path / "evaluation" / "tiny" / "unfinished"
    assert len(list(unfinished.glob("row_*.json"))) == 1
    asked = len(server.bodies)
    assert cli.main(["eval", str(tmp_path / "run.yaml"), "--checkpoint", "tiny", "--checkpoint", "other"]) == 2
    assert len(server.bodies) == asked, "the finished one is not repeated"
    assert json.loads((tmp_path / "evaluation" / "tiny" / "summary.json").read_text())["num_samples"] == 5
