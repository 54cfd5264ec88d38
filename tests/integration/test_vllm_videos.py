"""vLLM in runs, evaluations and servers reads videos as the policy does."""

import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from rl_vlm.config.schema import VLLMConfig
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.model.families import FAMILIES
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.rollout.vllm.client import VLLMClient
from rl_vlm.rollout.vllm.process import ServerProcess, server_environment, wait_until_healthy
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.run.run import train
from tests.helpers import tiny_run
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.evaluating import evaluate_run
from tests.helpers.videos import noise_video
from tests.helpers.vllm_parity import BLOCK_SIZE, LONGER, WIDTH, Side, generator_logprobs, sampling, video_requests

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")]

HOST, TIMEOUT = "127.0.0.1", 600.0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_log_probs_of_prompts_with_videos_are_the_policys(family: str, tmp_path: Path) -> None:
    """Two of the videos in one prompt have other numbers of frames, and other times, than each other."""
    most_videos = FAMILIES[family].videos_in_vllm
    checkpoint = sharp_checkpoint(family, tmp_path / "model", hidden_size=WIDTH)
    side = Side.of(checkpoint, most_videos, engine="vllm_server", **LONGER)
    arguments = engine_arguments(side.config, str(checkpoint), None, side.builder) | {"block_size": BLOCK_SIZE}
    token = secrets.token_urlsafe()
    process = ServerProcess(arguments, server_environment(VLLMConfig(), token, None), tmp_path / "server.log", HOST)
    client = VLLMClient(process.url, token, TIMEOUT)
    try:
        wait_until_healthy([process], [client], TIMEOUT)
        engine = VLLMServers([client], side.tokens, side.builder, tmp_path / "weights", True, {})
        engine.sync(PolicyWeights(side.policy, "merge"), 1)
        groups = engine.generate(video_requests(checkpoint, most_videos), sampling(seed=0))
        assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-5
    finally:
        process.stop()


def rows() -> list[dict[str, Any]]:
    """Rows with one video, with two of other lengths, and with none."""
    return [
        {
            "id": f"row-{i}", "prompt": "What moves?", "solution": "a",
            "videos": [noise_video(4 + 2 * j, seed=10 * i + j, size=(16, 16)).frames for j in range(i % 3)],
        }
        for i in range(6)
    ]  # fmt: skip


ROWS = f"{__name__}:rows"
SHORT: dict[str, Any] = {"vllm_max_model_length": 256, "max_num_seqs": 16}


def evaluated(checkpoint: Path, output: Path, engine: str) -> list[str]:
    """Evaluate with an engine, and return the greedy completions."""
    settings = {} if engine == "hf" else SHORT
    evaluate_run(tiny_run.make_config(checkpoint, output, eval_dataset_name=ROWS, engine=engine, **settings))
    return pyarrow.parquet.read_table(output / "evaluation" / "completions.parquet")["completion"].to_pylist()


def test_an_evaluation_samples_the_same_with_each_engine(tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "model", hidden_size=WIDTH)
    found = {engine: evaluated(checkpoint, tmp_path / engine, engine) for engine in ("hf", "vllm", "vllm_server")}
    assert len(found["hf"]) == 6 and len(set(found["hf"])) > 1
    assert found["vllm"] == found["vllm_server"] == found["hf"]


def test_a_run_trains_on_videos_that_vllm_reads(tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "model", hidden_size=WIDTH)
    given = {"dataset_name": ROWS, "engine": "vllm", "max_steps": 2, **SHORT}
    train(tiny_run.make_config(checkpoint, tmp_path / "run", **given))
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert len(lines) == 2
    assert all(line["sampling/sampling_logp_difference/max"] <= 1e-3 for line in lines)
