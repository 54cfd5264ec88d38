"""`rl-vlm chat` with a tiny model: what it answers is what the model answers, with the limits of its run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from rl_vlm.rollout.hf import HFEngine
from rl_vlm.tools.serving.budget import Budget
from rl_vlm.tools.serving.server import MAX_BODIES
from tests.helpers.builders import make_policy, noise_image, sharp_checkpoint
from tests.helpers.chat_client import chat, fetch, question, write_run
from tests.helpers.chat_server import RecordingServer

CLIENTS = Path(__file__).parents[1] / "data/chat_clients"
LARGE = noise_image(64, 64, 0)
MAX_PIXELS = 1024
TEXT = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"max_pixels": MAX_PIXELS, "system_prompt": "Be brief.", "max_completion_length": 5}
    return write_run(model, tmp_path_factory.mktemp("run"), **settings)


@pytest.fixture(scope="module")
def server_of_module(run: Path) -> Iterator[RecordingServer]:
    server = RecordingServer(run)
    yield server
    server.end()


@pytest.fixture
def server(server_of_module: RecordingServer) -> RecordingServer:
    server_of_module.key = ""
    return server_of_module


def refused(server: RecordingServer, **body: Any) -> tuple[int, dict[str, Any]]:
    sent = {"model": "tiny", "messages": TEXT, "temperature": 0, "max_tokens": 4} | body
    status, content = fetch(f"{server.url}/chat/completions", json.dumps(sent).encode())
    return status, json.loads(content)["error"]


def generate(model: Path, image: Any, num_tokens: int) -> tuple[str, int]:
    """The greedy answer of transformers' own `generate`, and the length of the prompt."""
    processor: Any = AutoProcessor.from_pretrained(model)
    processor.image_processor = AutoImageProcessor.from_pretrained(model, max_pixels=MAX_PIXELS)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "Which digit is this?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, add_generation_prompt=True,
        return_tensors="pt",
    )  # fmt: skip
    own: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    ids = own.generate(**inputs, do_sample=False, max_new_tokens=num_tokens)[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(ids, skip_special_tokens=True), inputs["input_ids"].shape[1]


def test_greedy_answers_are_those_of_generate(server, model):
    answer = chat(server.url, question(LARGE), max_tokens=12)
    text, num_prompt_tokens = generate(model, LARGE, 12)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert answer["usage"]["prompt_tokens"] == num_prompt_tokens
    assert answer["usage"]["total_tokens"] == num_prompt_tokens + answer["usage"]["completion_tokens"]


def test_the_runs_limits_are_applied_and_its_system_prompt_is_not(server, model):
    """A token is 8 x 8 pixels, between 2 tokens that frame the image: 64 x 64 pixels become 32 x 32, which are 16."""
    alone = chat(server.url, question())["usage"]["prompt_tokens"]
    assert chat(server.url, question(LARGE))["usage"]["prompt_tokens"] == alone + 16 + 2
    assert chat(server.url, question(noise_image(16, 24, 1)))["usage"]["prompt_tokens"] == alone + 6 + 2
    asked = chat(server.url, [{"role": "system", "content": "Be brief."}, *question()])["usage"]["prompt_tokens"]
    assert asked > alone

    without_run = RecordingServer(model)
    assert chat(without_run.url, question(LARGE))["usage"]["prompt_tokens"] == alone + 64 + 2
    without_run.end()


def test_an_adapter_that_peft_has_saved(server, model, tmp_path):
    """It has no processor of its own, and no run."""
    torch.manual_seed(0)  # of the adapter
    policy = make_policy(model, use_peft=True, lora_r=4)
    policy.model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*processor*"))
    adapter = RecordingServer(tmp_path)
    text = chat(adapter.url, TEXT)["choices"][0]["message"]["content"]
    adapter.end()
    assert text != chat(server.url, TEXT)["choices"][0]["message"]["content"]

    processor: Any = AutoProcessor.from_pretrained(model)
    rendered = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], add_generation_prompt=True, tokenize=True,
        return_dict=True, return_tensors="pt",
    )  # fmt: skip
    ids = policy.model.eval().generate(**rendered, do_sample=False, max_new_tokens=8)[0]
    assert text == processor.tokenizer.decode(ids[rendered["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_default_length_is_that_of_the_run(server):
    answer = chat(server.url, TEXT, max_tokens=None)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (5, "length")


def test_n_completions_and_seeds(server):
    def texts(**body: Any) -> list[str]:
        answer = chat(server.url, TEXT, temperature=1.0, n=3, **body)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        return [choice["message"]["content"] for choice in answer["choices"]]

    assert len(set(texts(seed=1))) == 3
    assert texts(seed=1) == texts(seed=1) != texts(seed=2)
    assert texts() != texts()


def test_stop_texts(server):
    whole = chat(server.url, TEXT, max_tokens=16)["choices"][0]["message"]["content"]
    stop = whole[5:7]
    choice = chat(server.url, TEXT, max_tokens=16, stop=[stop, "never there"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_a_stream_holds_the_same_text(server):
    body = {"model": "tiny", "messages": TEXT, "temperature": 0, "max_tokens": 8, "stream": True}
    status, content = fetch(f"{server.url}/chat/completions", json.dumps(body).encode())
    lines = content.removesuffix("\n\n").split("\n\n")
    assert (status, lines[-1]) == (200, "data: [DONE]")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == chat(server.url, TEXT)["choices"][0]["message"]["content"]


def test_a_final_assistant_message_is_continued(server):
    whole = chat(server.url, TEXT)["choices"][0]["message"]["content"]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    begun = [*TEXT, {"role": "assistant", "content": "Hi"}]
    assert chat(server.url, begun)["choices"] == chat(server.url, begun, **flags)["choices"]
    assert chat(server.url, begun)["choices"][0]["message"]["content"] != whole


def test_errors_name_the_parameter(server):
    status, error = refused(server, model="other")
    assert (status, error["code"], error["message"]) == (
        404, "model_not_found", "there is no model 'other'; this endpoint serves 'tiny'",
    )  # fmt: skip
    assert refused(server, max_tokens=5000)[1]["code"] == "context_length_exceeded"
    assert refused(server, tools=[{}])[1]["param"] == "tools"
    marked = [{"role": "user", "content": "<|image_pad|>"}]
    assert "<|image_pad|>" in refused(server, messages=marked)[1]["message"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    status, error = refused(server, messages=[{"role": "user", "content": [image]}])
    assert (status, error["param"]) == (400, "messages[0].content[0].image_url.url")


def test_routes(server):
    root = server.url.removesuffix("/v1")
    assert fetch(f"{root}/health") == (200, '{"status": "ok"}')
    status, content = fetch(f"{root}/v1/models")
    assert (status, [model["id"] for model in json.loads(content)["data"]]) == (200, ["tiny"])
    for url, body in ((f"{root}/", None), (f"{root}/v1/completions", b"{}"), (f"{root}/v1/models", b"{}")):
        assert fetch(url, body)[0] == 404


def test_the_key_protects_all_but_health(server):
    server.key = "secret"
    body = json.dumps({"model": "tiny", "messages": TEXT, "max_tokens": 1}).encode()
    for authorization in ("", "secret", "Bearer wrong", "Bearer secret\u00e9"):
        assert fetch(f"{server.url}/chat/completions", body, authorization)[0] == 401
        assert fetch(f"{server.url}/models", None, authorization)[0] == 401
    assert fetch(f"{server.url}/chat/completions", body, "Bearer secret")[0] == 200
    assert fetch(f"{server.url.removesuffix('/v1')}/health")[0] == 200


@pytest.mark.parametrize(("length", "status"), [(str(MAX_BODIES + 1), 413), ("-1", 411), ("\u00b2", 411)])
def test_bodies_have_a_bounded_length(length, status, server):
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", length)
    connection.endheaders()
    assert connection.getresponse().status == status
    connection.close()


def test_the_pixels_of_a_request_are_bounded(server, monkeypatch):
    monkeypatch.setattr(server.service, "pixels", Budget(2 * 64 * 64))
    assert chat(server.url, question(LARGE, LARGE))["usage"]["prompt_tokens"] > 0
    status, error = refused(server, messages=question(LARGE, LARGE, noise_image(8, 8, 0)))
    assert (status, error["code"]) == (400, "too_many_pixels")
    assert error["message"] == "the images have 8256 pixels, and the endpoint takes at most 8192"


def test_the_images_of_a_request_are_bounded(server, monkeypatch):
    """A small image of 576 × 16 pixels becomes 192 × 8 in fp32, twice, as two frames, and a grid of 3 numbers."""
    assert server.service.images.total == 3 * 2**30 // (192 * 8 * 3 * 4 * 2 + 3 * 8)
    monkeypatch.setattr(server.service, "images", Budget(2))
    assert chat(server.url, question(LARGE, LARGE))["usage"]["prompt_tokens"] > 0
    status, error = refused(server, messages=question(LARGE, LARGE, LARGE))
    assert (status, error["code"]) == (400, "too_many_images")
    assert error["message"] == "the messages have 3 images, and the endpoint takes at most 2"
    assert server.service.images.left == 2


def test_a_long_text_is_refused_before_it_is_processed(server, monkeypatch):
    monkeypatch.setattr(server.service.builder, "build", lambda sample: pytest.fail("built"))
    status, error = refused(server, messages=[{"role": "user", "content": "a b " * 50_000}])
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_a_request_that_waits_for_the_processor_is_answered_in_time(server, monkeypatch):
    monkeypatch.setattr("rl_vlm.tools.serving.server.REQUEST_SECONDS", 0.5)
    start = time.monotonic()
    with server.service.building.held(1, 9.0):
        assert refused(server)[0] == 503
    assert time.monotonic() - start < 10


def test_images_of_all_requests_share_their_pixels(server, monkeypatch):
    monkeypatch.setattr(server.service, "pixels", Budget(2 * 64 * 64))
    sizes, generate = [], HFEngine.generate

    def counted(engine: HFEngine, requests: Any, sampling: Any) -> Any:
        sizes.append(len(requests))
        time.sleep(0.2)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", counted)
    threads = [threading.Thread(target=chat, args=[server.url, question(LARGE)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (sum(sizes), max(sizes), server.service.pixels.left) == (6, 2, server.service.pixels.total)


def test_a_request_that_takes_too_long_is_answered_and_leaves_the_queue(server, monkeypatch):
    generate = HFEngine.generate

    def slow(engine: HFEngine, requests: Any, sampling: Any) -> Any:
        time.sleep(1.5)
        return generate(engine, requests, sampling)

    monkeypatch.setattr(HFEngine, "generate", slow)
    monkeypatch.setattr("rl_vlm.tools.serving.server.REQUEST_SECONDS", 0.5)
    status, error = refused(server)
    assert (status, error["code"]) == (503, "unavailable")
    monkeypatch.undo()
    assert chat(server.url, TEXT)["choices"]
    assert server.service.batches.unanswered == set()


def test_requests_at_once_share_batches(server, monkeypatch):
    sizes, generate = [], HFEngine.generate

    def counted(engine: HFEngine, requests: Any, sampling: Any) -> Any:
        sizes.append(len(requests))
        time.sleep(0.3)
        return generate(engine, requests, sampling)

    alone = [chat(server.url, question(noise_image(16, 16, i)))["choices"] for i in range(8)]
    monkeypatch.setattr(HFEngine, "generate", counted)
    answers: dict[int, Any] = {}

    def ask(i: int) -> None:
        answers[i] = chat(server.url, question(noise_image(16, 16, i)))["choices"]

    threads = [threading.Thread(target=ask, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(8)] == alone
    assert sum(sizes) == 8 and len(sizes) <= 4


def test_requests_of_lmms_eval(server):
    """What `generate_until` reads: the text and the numbers of tokens."""
    recorded = json.loads((CLIENTS / "lmms_eval.json").read_text())
    for request in recorded["requests"]:
        body = json.dumps(request["body"]).encode()
        status, content = fetch(f"{server.url}/chat/completions", body, request["authorization"])
        answer = json.loads(content)
        assert status == 200, content
        assert isinstance(answer["choices"][0]["message"]["content"], str)
        assert answer["usage"]["prompt_tokens"] > 16 and 1 <= answer["usage"]["completion_tokens"] <= 16


@pytest.mark.slow
def test_requests_of_vlmevalkit(server):
    """What `generate_inner` reads: the status, and the text of an object or of a stream."""
    recorded = json.loads((CLIENTS / "vlmevalkit.json").read_text())
    for request in recorded["requests"]:
        body = json.dumps(request["body"]).encode()
        status, content = fetch(f"{server.url}/chat/completions", body, request["authorization"])
        assert 200 <= status < 300, content
        if request["body"].get("stream"):
            chunks = [line.removeprefix("data:").strip() for line in content.splitlines() if line.startswith("data:")]
            assert chunks[-1] == "[DONE]"
            text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1])
        else:
            text = json.loads(content)["choices"][0]["message"]["content"]
        assert text.strip()


def test_the_client_of_openai(server):
    openai: Any = pytest.importorskip("openai")
    server.key = "secret"
    client = openai.OpenAI(base_url=server.url, api_key="secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages: Any = question(LARGE)
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(**asked)
    streamed = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert (text, streamed[-1].usage) == (answer.choices[0].message.content, answer.usage)
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.chat.completions.create(**asked | {"model": "other"})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0).models.list()


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_vllm_answers_alike(server, run):
    vllm = RecordingServer(run, "vllm_max_model_length=256", engine="vllm")
    try:
        for messages in (TEXT, question(LARGE), question(LARGE, noise_image(16, 24, 1))):
            ours, theirs = chat(server.url, messages), chat(vllm.url, messages)
            assert (ours["choices"], ours["usage"]) == (theirs["choices"], theirs["usage"])
        assert len(chat(vllm.url, TEXT, n=3, temperature=1.0)["choices"]) == 3
        status, error = refused(vllm, max_tokens=250)
        assert (status, error["code"]) == (400, "context_length_exceeded")
    finally:
        vllm.end()
