"""A real vLLM server, started as a run starts it: weights by files, requests over HTTP, and what can go wrong there."""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from PIL import Image

from rl_vlm.config.schema import VLLMConfig
from rl_vlm.errors import DataError, RolloutError
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.preemptions import totals_of_servers
from rl_vlm.rollout.vllm.process import ServerProcess, free_port, server_environment, wait_until_healthy
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.run.run import train
from rl_vlm.types import RolloutRequest
from tests.helpers import tiny_run
from tests.helpers.builders import make_prompt, noise_image, sharp_checkpoint
from tests.helpers.vllm_parity import Side, generator_logprobs, make_config, sampling, token_ids

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")

HOST, TIMEOUT = "127.0.0.1", 240.0
NUM_UPDATES = 6


@dataclass
class Served:
    """A running server and what it serves."""

    checkpoint: Path
    process: ServerProcess
    client: VLLMClient

    def engine(self, side: Side, folder: Path, run: str = "", **expected: object) -> VLLMServers:
        return VLLMServers([self.client], side.tokens, side.builder, folder, True, expected, run=run)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    checkpoint = sharp_checkpoint("qwen2_5_vl", folder / "checkpoint")
    arguments = engine_arguments(make_config(checkpoint, engine="vllm_server"), str(checkpoint), lora_rank=None)
    token = secrets.token_urlsafe()
    process = ServerProcess(arguments, server_environment(VLLMConfig(), token, None), folder / "server.log", HOST)
    client = VLLMClient(process.url, token, TIMEOUT)
    try:
        wait_until_healthy([process], [client], TIMEOUT)
        yield Served(checkpoint, process, client)
    finally:
        process.stop()
    assert not psutil.pid_exists(process.process.pid)


def test_log_probs_follow_the_policy(served: Served, tmp_path: Path) -> None:
    side = Side.of(served.checkpoint)
    engine, source = served.engine(side, tmp_path / "weights"), PolicyWeights(side.policy, "adapter")
    for version in range(NUM_UPDATES):
        assert engine.sync(source, version) == sum(w.nbytes for _, w in source.trained_weights())
        groups = engine.generate(side.requests, sampling(seed=version))
        assert {group.policy_version for group in groups} == {version}
        assert (generator_logprobs(groups) - side.scores(groups)).abs().max() <= 1e-3
        before = side.scores(groups).detach()
        side.update(groups)
        assert (side.scores(groups) - before).abs().max() > 0.01
    assert not (tmp_path / "weights").exists()
    engine.sync(source, NUM_UPDATES)
    greedy = sampling(seed=0, num_generations=1, temperature=0.0)
    assert token_ids(engine.generate(side.requests, greedy)) == token_ids(side.hf.generate(side.requests, greedy))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_file_is_sent_as_it_is_and_decodes_to_the_trainers_pixels(
    served: Served, tmp_path: Path, format: str
) -> None:
    side = Side.of(served.checkpoint)
    engine, source = served.engine(side, tmp_path / "weights"), PolicyWeights(side.policy, "adapter")
    engine.sync(source, 0)
    file, other = (encoded(noise_image(48, 32, seed), format) for seed in (5, 6))
    sample = make_prompt(served.checkpoint, [Image.open(BytesIO(file)).convert("RGB")]).sample

    def mismatch(sent: bytes) -> float:
        request = RolloutRequest("g", side.builder.build(replace(sample, encoded_images={0: sent})))
        groups = engine.generate([request], sampling(seed=0))
        return (generator_logprobs(groups) - side.scores(groups)).abs().max().item()

    assert mismatch(file) <= 1e-4
    assert mismatch(other) > 1e-2


def encoded(image: Image.Image, format: str) -> bytes:
    file = BytesIO()
    image.save(file, format)
    return file.getvalue()


def test_only_health_answers_without_the_token(served: Served) -> None:
    def status(path: str, token: str | None, body: dict[str, str] | None = None) -> int:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(f"{served.process.url}{path}", data, headers), timeout=TIMEOUT) as response:
                return response.status
        except HTTPError as error:
            return error.code

    assert status("/health", None) == 200
    for path in ("/v1/models", "/weight_info", "/rl_vlm/setup", "/metrics", "/docs", "/nowhere"):
        assert status(path, None) == status(path, "wrong") == 401
    for path in ("/update_weights", "/reset_prefix_cache", "/v1/load_lora_adapter", "/inference/v1/generate"):
        assert status(path, None, {}) == 401
    assert status("/weight_info", served.client.token) == 200
    assert status("/collective_rpc", served.client.token, {}) == 404  # of vLLM's development mode


def test_a_server_tells_its_preemptions(served: Served) -> None:
    assert totals_of_servers([served.client]) == {served.client.url: 0}


def test_a_wrong_token_is_named(served: Served, tmp_path: Path) -> None:
    client = VLLMClient(served.process.url, "wrong", TIMEOUT)
    side = Side.of(served.checkpoint)
    with pytest.raises(RolloutError, match=r"refuses the token: set RL_VLM_SERVER_TOKEN"):
        VLLMServers([client], side.tokens, side.builder, tmp_path, True, {})


def test_nothing_listens_outside_of_loopback(served: Served) -> None:
    processes = [psutil.Process(served.process.process.pid)]
    processes += processes[0].children(recursive=True)
    connections = [c for process in processes for c in process.net_connections("inet")]
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert served.process.port in {address.port for address in listening}
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


def test_a_server_with_other_settings_is_refused(served: Served, tmp_path: Path) -> None:
    side = Side.of(served.checkpoint)
    with pytest.raises(RolloutError, match=r"runs with dtype = float32, but this run needs bfloat16.*rl-vlm serve"):
        served.engine(side, tmp_path, dtype="bfloat16")
    with pytest.raises(RolloutError, match="model_type = qwen2_5_vl, but this run needs llava"):
        served.engine(side, tmp_path, model_type="llava")


def test_other_pixel_limits_are_found_before_training(served: Served, tmp_path: Path) -> None:
    side = Side.of(served.checkpoint, min_pixels=64 * 64)
    engine = served.engine(side, tmp_path / "weights")
    engine.sync(PolicyWeights(side.policy, "adapter"), 0)
    request = RolloutRequest("g", side.builder.build(side.requests[0].prompt.sample))
    with pytest.raises(RolloutError, match=r"vLLM reads \d+ prompt tokens, the trainer \d+.*data.min_pixels"):
        engine.generate([request], sampling(seed=0))


def test_weights_of_another_run_are_noticed(served: Served, tmp_path: Path) -> None:
    side = Side.of(served.checkpoint)
    source = PolicyWeights(side.policy, "adapter")
    ours, theirs = (served.engine(side, tmp_path / run, run=f"{run}/") for run in ("ours", "theirs"))
    ours.sync(source, 3)
    theirs.sync(source, 3)
    with pytest.raises(RolloutError, match=r"weights of version theirs/3, but the run last sent version ours/3"):
        ours.generate(side.requests, sampling(seed=0))


def test_a_server_with_older_weights_is_given_up(served: Served, tmp_path: Path) -> None:
    side = Side.of(served.checkpoint)
    engine = served.engine(side, tmp_path / "weights", run="ours/")
    engine.sync(PolicyWeights(side.policy, "adapter"), 3)
    engine.policy_version = 4  # as if it had been away while the others were sent these
    with pytest.raises(RolloutError, match=r"weights that are older than the last.*No server is left"):
        engine.generate(side.requests, sampling(seed=0))


def test_a_prompt_that_is_too_long_is_refused(served: Served, tmp_path: Path) -> None:
    side = Side.of(served.checkpoint)
    prompt = make_prompt(served.checkpoint, [noise_image(32, 24, seed=0)], text="no " * 250)
    with pytest.raises(DataError, match=r"Sample s: .*vllm.vllm_max_model_length"):
        served.engine(side, tmp_path).generate([RolloutRequest("g", prompt)], sampling(seed=0))


def test_a_lost_servers_requests_go_to_the_others(
    served: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side.of(served.checkpoint)
    engine = served.engine(side, tmp_path / "weights")
    gone = VLLMClient(f"http://{HOST}:{free_port(HOST)}", "token", TIMEOUT)
    engine.live.append(gone)
    engine.sync(PolicyWeights(side.policy, "adapter"), 0)
    assert gone not in engine.live and f"{gone.url} does not answer" in caplog.text
    engine.live.append(gone)
    assert len(engine.generate(side.requests * 2, sampling(seed=0))) == 2 * len(side.requests)
    assert gone not in engine.live

    engine.live = [gone]
    with pytest.raises(RolloutError, match=f"{gone.url} does not answer.*No server is left.*resumed"):
        engine.generate(side.requests, sampling(seed=0))


def test_an_unreachable_address_is_named(tmp_path: Path, served: Served) -> None:
    side = Side.of(served.checkpoint)
    client = VLLMClient(f"http://{HOST}:{free_port(HOST)}", "token", TIMEOUT)
    with pytest.raises(ServerLost, match=f"{client.url} does not answer .*Connection refused"):
        VLLMServers([client], side.tokens, side.builder, tmp_path, True, {})


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    token = secrets.token_urlsafe()
    environment = server_environment(VLLMConfig(), token, None)
    process = ServerProcess({"model": str(tmp_path / "nothing")}, environment, tmp_path / "server.log", HOST)
    with pytest.raises(RolloutError, match=r"(?s)ended with status \d+. The end of .*server.log:.*nothing"):
        wait_until_healthy([process], [VLLMClient(process.url, token, TIMEOUT)], TIMEOUT)
    process.stop()


@pytest.mark.slow
def test_a_run_of_lora_samples_from_its_own_adapter_and_leaves_no_server(tmp_path: Path) -> None:
    checkpoint, output = sharp_checkpoint("qwen2_5_vl", tmp_path / "checkpoint"), tmp_path / "run"
    config = tiny_run.make_config(
        checkpoint, output, engine="vllm_server", vllm_max_model_length=256, max_num_seqs=16, use_peft=True, lora_r=4,
        max_steps=5, weight_sync_steps=2, save_steps=0,
    )  # fmt: skip
    children = set(psutil.Process().children(recursive=True))
    train(config)
    lines = MetricsLog(output / "metrics.jsonl").read()
    assert [line["sampling/policy_version_lag"] for line in lines] == [0, 1, 0, 1, 0]
    gaps = [line["sampling/sampling_logp_difference/max"] for line in lines]
    assert max(gaps[::2]) < 1e-4 and min(gaps[1::2]) > 1e-3, gaps
    num_bytes = (output / "checkpoint-5" / "adapter_model.safetensors").stat().st_size
    assert [line.get("weight_sync/bytes") for line in lines] == [num_bytes, None, num_bytes, None, num_bytes]
    assert set(psutil.Process().children(recursive=True)) <= children
