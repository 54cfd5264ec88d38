import asyncio
import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rewards import http
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.images import image_urls
from rl_vlm.errors import RolloutError
from rl_vlm.rollout.endpoint import MessageBuilder, OpenAIEngine, chat_messages, read_completion
from rl_vlm.rollout.weights import CheckpointWeights
from rl_vlm.types import RolloutRequest, Sample, Sampling, Video
from tests.helpers.judge_server import JudgeServer
from tests.helpers.serving import in_thread

TEXT = {"type": "text", "text": "Which?"}
CONFIG = RunConfig.model_validate(
    {"model": {"model_name_or_path": "m"}, "evaluation": {"endpoint_url": "http://localhost:1/v1/"}}
)


def sample(*messages: tuple[str, list[dict[str, Any]]], num_images: int = 0) -> Sample:
    images = [Image.new("RGB", (1, 1 + i)) for i in range(num_images)]
    return Sample("s", [{"role": role, "content": content} for role, content in messages], images, {}, "Which?")


def test_images_go_where_their_blocks_are():
    image = {"type": "image"}
    (message,) = chat_messages(sample(("user", [image, TEXT, image]), num_images=2))
    first, text, second = message["content"]
    assert text == TEXT
    urls = [part["image_url"]["url"] for part in (first, second)]
    assert all(url.startswith("data:image/png;base64,iVBOR") for url in urls)
    assert urls[0] != urls[1]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_rows_own_file_is_sent_as_it_is(format):
    file = BytesIO()
    Image.new("RGB", (3, 2), (0, 99, 200)).save(file, format, quality=30)
    row = sample(("user", [{"type": "image"}, {"type": "image"}]), num_images=2)
    row.encoded_images[1] = file.getvalue()
    made, own = image_urls(row)
    assert own == f"data:image/{format.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
    assert made.startswith("data:image/png;base64,iVBOR")
    with Image.open(BytesIO(base64.b64decode(made.partition(",")[2]))) as decoded:
        assert (decoded.mode, decoded.tobytes()) == ("RGB", row.images[0].tobytes())

    prompt = MessageBuilder().build(row)
    for body in OpenAIEngine(CONFIG).bodies(RolloutRequest("g", prompt), Sampling(2, 8, 1.0, seed=0)):
        assert [part["image_url"]["url"] for part in body["messages"][0]["content"]] == [made, own]


def test_frames_of_a_video_are_images_after_their_times():
    frames = np.random.default_rng(0).integers(256, size=(2, 4, 6, 3), dtype=np.uint8)
    clip = Video(frames, (0, 15), 10.0, 20, 2.0)
    row = replace(sample(("user", [TEXT, {"type": "video"}])), videos=[clip])
    (message,) = chat_messages(MessageBuilder().build(row).sample)
    asked, first_time, first, second_time, second = message["content"]
    assert [asked, first_time, second_time] == [TEXT, *({"type": "text", "text": f"{time} s: "} for time in (0.0, 1.5))]
    for part, frame in ((first, frames[0]), (second, frames[1])):
        with Image.open(BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))) as decoded:
            assert np.array_equal(np.asarray(decoded), frame)


def test_text_alone_is_a_string():
    assert chat_messages(sample(("system", [TEXT]), ("user", [TEXT, TEXT]))) == [
        {"role": "system", "content": "Which?"},
        {"role": "user", "content": [TEXT, TEXT]},
    ]


def test_a_final_assistant_turn_is_continued():
    prompt = MessageBuilder().build(sample(("user", [TEXT]), ("assistant", [TEXT])))
    (body,) = OpenAIEngine(CONFIG).bodies(RolloutRequest("g", prompt), Sampling(1, 8, 0.0, seed=0))
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def answer(**changes: Any) -> dict[str, Any]:
    choice = {"message": {"content": "7"}, "finish_reason": "stop", **changes}
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


def test_answers():
    found = read_completion(answer())
    assert (found.text, found.finish_reason, found.reported_tokens, len(found.token_ids)) == ("7", "stop", 3, 0)
    assert read_completion(answer(finish_reason="length")).finish_reason == "length"
    assert read_completion(answer(message={"content": None})).text == ""
    assert read_completion({**answer(), "usage": None}).reported_tokens is None


@pytest.mark.parametrize("wrong", [{"detail": "?"}, {"choices": []}, {"choices": [{"text": "7"}]}, ["7"]])
def test_answers_that_are_none(wrong):
    with pytest.raises(RolloutError, match="no chat completion: "):
        read_completion(wrong)


def engine(**changes: Any) -> OpenAIEngine:
    return OpenAIEngine(CONFIG.model_copy(update={"evaluation": CONFIG.evaluation.model_copy(update=changes)}))


def status(code: int, retry_after: float | None = None) -> http.RequestError:
    return http.RequestError(f"answers with status {code}", "busy", code in http.RETRIED_STATUSES, code, retry_after)


def unreachable(reason: str) -> http.RequestError:
    return http.RequestError("cannot be reached", reason)


def test_pauses_double_up_to_a_minute_and_heed_the_server(monkeypatch):
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    client = engine(endpoint_max_retries=4)
    failures = iter([status(500), status(429, 7.0), status(503, 999.0), unreachable("timed out"), unreachable("gone")])

    async def fail(*arguments: Any) -> bytes:
        raise next(failures)

    monkeypatch.setattr(http, "send", fail)
    with pytest.raises(RolloutError, match=r"http://localhost:1/v1/chat/completions cannot be reached.* \(5 tries\)"):
        client.post({}, "s")
    assert pauses == [0.5, 7.0, 60.0, 4.0]


@pytest.mark.parametrize("content", [b"<html>", b"[" * 100_000])
def test_a_malformed_answer_is_named_after_the_last_try(content, monkeypatch):
    client = engine(endpoint_max_retries=1)

    async def send(*arguments: Any) -> bytes:
        return content

    monkeypatch.setattr(http, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(http, "send", send)
    with pytest.raises(RolloutError, match=r"JSON: .* \(2 tries\)"):
        client.post({}, "s")


def test_a_prompt_that_is_refused_is_named(monkeypatch):
    client = engine()

    async def refuse(*arguments: Any) -> bytes:
        raise status(400)

    monkeypatch.setattr(http, "send", refuse)
    with pytest.raises(RolloutError, match=r"refuses the prompt of sample row-7 \(status 400\): busy"):
        client.post({"model": "m"}, "row-7")


def test_an_answer_has_a_bound_in_bytes():
    with in_thread(JudgeServer()) as server:
        server.answers = [(200, {}, b" " * (8 * 2**20 + 1))]
        client = engine(endpoint_url=f"{server.url}/v1")
        with pytest.raises(RolloutError, match="answers with more than 8 MiB to sample row-7"):
            client.post({"model": "m"}, "row-7")
        assert len(server.bodies) == 1


def test_weights_cannot_be_sent_to_an_endpoint(tmp_path: Path):
    with pytest.raises(RolloutError, match="weights of its own"):
        OpenAIEngine(CONFIG).sync(CheckpointWeights(tmp_path, False), 1)


def test_after_an_error_no_further_request_is_begun(monkeypatch):
    engine = OpenAIEngine(CONFIG)
    engine.max_concurrency = 1
    asked: list[str] = []

    def refuse(_: dict[str, Any], sample_id: str) -> dict[str, Any]:
        asked.append(sample_id)
        sleep(0.05)
        raise RolloutError("refused")

    monkeypatch.setattr(engine, "post", refuse)
    requests = [RolloutRequest(f"g{i}", MessageBuilder().build(sample(("user", [TEXT])))) for i in range(50)]
    with pytest.raises(RolloutError, match="refused"):
        engine.generate(requests, Sampling(1, 8, 0.0, seed=0))
    assert len(asked) < 50
