"""Requests and answers of `rl-vlm chat`, without a model."""

import json
import tracemalloc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import image_urls
from rl_vlm.tools.serving import service
from rl_vlm.tools.serving.protocol import APIError, ChatAnswer, Choice, count_values, read_request
from rl_vlm.tools.serving.service import check_served, refuse_long, to_choice, to_sample, to_sampling
from rl_vlm.types import Completion, Sample
from tests.helpers.builders import noise_image

HELLO: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def read(**body: Any) -> Any:
    return read_request(json.dumps(HELLO | body).encode())


def image_part(url: str, **extra: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **extra}}


def refusal(content: bytes) -> tuple[int, dict[str, Any]]:
    with pytest.raises(APIError) as refused:
        read_request(content)
    return refused.value.status, refused.value.body["error"]


def test_defaults_are_those_of_openai():
    request = read()
    assert (request.n, request.temperature, request.top_p, request.stop, request.stream) == (1, 1.0, 1.0, [], False)
    assert (request.token_limit, request.seed, request.continues) == (None, None, False)


def test_both_names_of_the_token_limit_and_both_forms_of_stop():
    assert read(max_tokens=5).token_limit == read(max_completion_tokens=5).token_limit == 5
    assert (read(stop="x").stop, read(stop=["x", "y"]).stop) == (["x"], ["x", "y"])


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "logprobs": False},
        {
            "temperature": None,
            "anything": None,
            "messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}],
        },
    ],
)
def test_what_changes_nothing_is_taken(harmless):
    assert read(**harmless).temperature == 1.0


@pytest.mark.parametrize(
    ("wrong", "param", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"logprobs": True}, "logprobs", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"guided_json": {}}, "guided_json", "unknown_parameter"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": float("nan")}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", None),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", None),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [image_part("x", max_dynamic_patch="6")]}]},
            "messages[0].content[0].image_url.max_dynamic_patch",
            "invalid_value",
        ),
        ({"continue_final_message": True}, "continue_final_message", None),
        ({"add_generation_prompt": False}, "add_generation_prompt", None),
    ],
)
def test_what_would_have_no_effect_is_refused(wrong, param, code):
    status, error = refusal(json.dumps(HELLO | wrong).encode())
    assert (status, error["type"], error["param"], error["code"]) == (400, "invalid_request_error", param, code)


@pytest.mark.parametrize(
    "part", [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}, {"type": "video"}]
)
def test_a_video_is_refused_in_a_sentence(part):
    body = HELLO | {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    status, error = refusal(json.dumps(body).encode())
    assert (status, error["code"], error["param"]) == (400, "unsupported_content", "messages[0].content[1]")
    assert error["message"] == (
        "messages[0].content[1]: this endpoint takes no videos; send the frames as images (image_url), each after a"
        " text with its time, such as '0.5 s: '"
    )


LONG = "x" * 2**20


@pytest.mark.parametrize(
    "wrong",
    [{"model": LONG}, {LONG: 1}, {"n": LONG}, {"mm_processor_kwargs": {"a": LONG}},
     {"messages": [{"role": "user", "content": "", LONG: 1}]}],
)  # fmt: skip
def test_errors_shorten_texts_of_the_client(wrong):
    with pytest.raises(APIError) as refused:
        check_served(read(**wrong), "m", DataConfig())
    assert len(json.dumps(refused.value.body)) < 2000


def test_values_of_a_body_are_counted_before_it_is_parsed():
    assert count_values(b'{"a": [1, 2, {"b": 3}], "c": []}') == 7
    assert count_values(json.dumps(HELLO).encode()) == 5


def test_a_body_is_parsed_in_the_memory_of_its_texts():
    """One wide character made the whole body four times as large."""
    body = json.dumps(HELLO | {"user": "\U0001f600", "stop": "x" * 2**22}, ensure_ascii=False).encode()
    tracemalloc.start()
    request = read_request(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(request.stop[0]) == 2**22
    assert peak < 2 * len(body)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_object(content):
    assert refusal(content)[0] == 400


def test_images_keep_their_places():
    red = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
    url = f"data:image/png;base64,{red}"
    content = [{"type": "text", "text": "a"}, image_part(url, detail="low"), {"type": "text", "text": "<image>"}]
    sample = to_sample(read(messages=[{"role": "user", "content": content}]).messages, 10)
    assert [block["type"] for block in sample.messages[0]["content"]] == ["text", "image", "text"]
    assert sample.messages[0]["content"][2]["text"] == "<image>", "a benchmark's text is left as it is"
    assert [(image.size, image.getpixel((0, 0))) for image in sample.images] == [((1, 1), (255, 0, 0))]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://127.0.0.1:1/image.png", "invalid_image_url"),
        ("file:///etc/hostname", "invalid_image_url"),
        ("/etc/hostname", "invalid_image_url"),
        ("data:text/plain;base64,aGVsbG8=", "invalid_image_url"),
        ("data:image/png;base64,aGVsbG8=", "invalid_image"),
        ("data:image/png;base64,***", "invalid_image"),
    ],
)
def test_only_images_in_the_request_are_read(url, code):
    request = read(messages=[{"role": "user", "content": [image_part(url)]}])
    with pytest.raises(APIError) as refused:
        to_sample(request.messages, 10)
    error = refused.value.body["error"]
    assert (refused.value.status, error["code"]) == (400, code)
    assert error["param"] == "messages[0].content[0].image_url.url"


def test_large_images_are_refused_by_their_headers():
    (url,) = image_urls(Sample("s", [], [noise_image(4, 3, 0)], {}, ""))
    request = read(messages=[{"role": "user", "content": [image_part(url)]}])
    assert to_sample(request.messages, 12).images[0].size == (4, 3)
    with pytest.raises(APIError, match="4 × 3 = 12 pixels are more"):
        to_sample(request.messages, 11)


class Letters:
    """A tokenizer with a token per letter."""

    def decode(self, ids: torch.Tensor, **_: Any) -> str:
        return "".join(map(chr, ids.tolist()))


def completion(text: str, reason: Any) -> Completion:
    ids = torch.tensor([ord(letter) for letter in text])
    return Completion(ids, torch.zeros(len(ids)), reason, text)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ([], Choice("one two two", "length", 11)),
        (["three"], Choice("one two two", "length", 11)),
        (["two"], Choice("one ", "stop", 7)),
        (["two", "e t"], Choice("on", "stop", 5)),
    ],
)
def test_a_completion_ends_before_its_first_stop_text(stops, expected):
    assert to_choice(completion("one two two", "length"), stops, Letters()) == expected


def test_answers_have_openais_form():
    answer = ChatAnswer("m", [Choice("a", "stop", 2), Choice("b", "length", 3)], 7)
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    body = answer.body()
    assert (body["object"], body["model"], body["usage"]) == ("chat.completion", "m", usage)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["a", "b"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "length"]

    *events, done = answer.events(include_usage=True)
    chunks = [json.loads(event) for event in events]
    assert (done, chunks[-1]["choices"], chunks[-1]["usage"]) == ("[DONE]", [], usage)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:2]] == [{"role": "assistant", "content": "a"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, "stop", None, "length"]
    assert len(answer.events(include_usage=False)) == 5


def test_the_length_of_a_completion():
    assert to_sampling(read(), 10**6, None, 512).max_completion_length == 512
    assert to_sampling(read(), 600, 1000, 512).max_completion_length == 400, "what is left, if none is asked for"
    assert to_sampling(read(max_tokens=400), 600, 1000, 512).max_completion_length == 400
    for body, num_tokens in (({"max_tokens": 401}, 600), ({}, 1000)):
        with pytest.raises(APIError, match="maximum context length is 1000 tokens") as refused:
            to_sampling(read(**body), num_tokens, 1000, 512)
        assert refused.value.body["error"]["code"] == "context_length_exceeded"


def test_sampling_is_that_of_the_request():
    sampling = to_sampling(read(n=3, temperature=0, top_p=0.5, top_k=-1, min_p=0.0), 1, None, 512)
    assert (sampling.num_generations, sampling.temperature, sampling.top_p) == (3, 0, 0.5)
    assert (sampling.top_k, sampling.min_p) == (0, None)


@pytest.mark.parametrize(("asked", "used"), [(1e-300, 0.0), (9e-6, 0.0), (1e-5, 1e-5), (2, 2.0)])
def test_temperatures_that_logits_cannot_be_divided_by_are_greedy(asked, used):
    assert to_sampling(read(temperature=asked), 1, None, 512).temperature == used


class Words:
    """A tokenizer with a token per word, which records the length of its texts."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        self.lengths.append(len(text))
        return {"input_ids": [0] * len(text.split())}


@pytest.mark.parametrize(
    ("text", "is_refused", "lengths"),
    [("a " * 100, False, []), ("a" * 201, False, [100, 100, 1]), ("a " * 300, True, [100, 100, 100, 100, 100])],
)
def test_a_text_beyond_the_context_is_refused_from_its_first_pieces(text, is_refused, lengths, monkeypatch):
    monkeypatch.setattr(service, "PIECE", 100)
    words, sample = Words(), to_sample(read(messages=[{"role": "user", "content": text}]).messages, 10)
    found = "maximum context length is 100 tokens, and the text has over 200"
    with pytest.raises(APIError, match=found) if is_refused else nullcontext():
        refuse_long(sample, words, 100)
    assert words.lengths == lengths


def test_only_the_served_model_and_its_own_limits():
    data = DataConfig(max_pixels=64)
    check_served(read(mm_processor_kwargs={"max_pixels": 64}, chat_template_kwargs={}), "m", data)
    with pytest.raises(APIError, match="no model 'other'; this endpoint serves 'm'") as refused:
        check_served(read(model="other"), "m", data)
    assert refused.value.status == 404
    with pytest.raises(APIError, match=r"the endpoint has {'max_pixels': 64}"):
        check_served(read(mm_processor_kwargs={"max_pixels": 65}), "m", data)
    with pytest.raises(APIError, match="chat_template_kwargs"):
        check_served(read(chat_template_kwargs={"enable_thinking": False}), "m", data)
