"""Reward given by a model that is served by an endpoint of OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rewards import http
from rewards.contract import Fault, Score
from rewards.forms import prompt_in
from rewards.judges.endpoint import BudgetError, Endpoint, Limits, api_key, endpoint
from rewards.judges.messages import (
    PROMPT,
    PROMPT_WITHOUT_SOLUTION,
    data_url,
    delimited,
    fields_of,
    fill,
    user_message,
)
from rewards.judges.replies import request_key
from rewards.judges.reply import read_reply
from rewards.text import TextOrMessages, completion_text, final_text, gold_text

DEFAULT_BODY = {"temperature": 0}

NO_TEXT = "the judge's answer is no chat completion with a text"


async def judge(
    completions: Sequence[TextOrMessages],
    prompts: Sequence[Any],
    images: Sequence[Sequence[Any]],
    solution: Sequence[Any] | None = None,
    *,
    base_url: str = "",
    model: str = "",
    api_key_env: str = "",
    prompt: str = "",
    send_image: bool = False,
    scale: float = 10.0,
    extra_body: dict[str, Any] | None = None,
    concurrency: int = 8,
    requests_per_minute: float | None = None,
    retries: int = 4,
    timeout: float = 60.0,
    cache: str = "",
    max_calls: int | None = None,
) -> dict[str, list[Any]]:
    """Return the judge's score of each completion divided by `scale`, and its reply as a sub-score.

    The score is None if the template needs a `solution` and the row has none. A failed request, a reply without a
    score, and a spent budget are faults. Raises ValueError if a setting is missing or invalid.
    """
    limits = Limits(base_url, api_key_env, concurrency, requests_per_minute, retries, timeout, cache, max_calls)
    body = {"model": model} | (DEFAULT_BODY if extra_body is None else extra_body)
    check_settings(limits, model, prompt, scale, extra_body or {})
    if not completions:
        return {"reward": [], "reply": []}
    server = endpoint(limits, asyncio.get_running_loop())

    urls = {id(row): [data_url(image) for image in row] for row in images if row} if send_image else {}
    asked = [
        question(completion, conversation, urls.get(id(row), []), gold, prompt, scale)
        for completion, conversation, row, gold in zip(
            completions, prompts, images, solution or [None] * len(completions), strict=True
        )
    ]
    keys = [request_key(server.url, body | {"messages": [it]}) if isinstance(it, dict) else "" for it in asked]
    requests = {key: body | {"messages": [it]} for key, it in zip(keys, asked, strict=True) if key}
    answers = await asyncio.gather(*(reply_to(server, key, request, scale) for key, request in requests.items()))
    replies = dict(zip(requests, answers, strict=True))

    def score(key: str, asked: Any) -> Score:
        reply = replies.get(key)
        if isinstance(reply, str):
            return read_reply(reply, scale)
        return reply or asked

    shown = [reply if isinstance(reply := replies.get(key), str) else None for key in keys]
    return {"reward": list(map(score, keys, asked)), "reply": shown}


def question(
    completion: TextOrMessages, conversation: Any, urls: Sequence[str], solution: Any, prompt: str, scale: float
) -> dict[str, Any] | Score:
    """Build the message to the judge, or return the score if there is nothing to ask.

    An empty completion scores 0.0. If the template needs a `solution` and the row has none, there is no score.
    """
    gold, text = gold_text(solution), completion_text(completion)
    if isinstance(gold, Fault):
        return gold
    template = prompt or (PROMPT_WITHOUT_SOLUTION if gold is None else PROMPT)
    if gold is None and "solution" in fields_of(template):
        return None
    if not text.strip():
        return 0.0
    values = {
        "question": prompt_in("text", conversation),
        "completion": delimited(text),
        "solution": final_text(gold or ""),
        "scale": f"{scale:g}",
    }
    return user_message(fill(template, values), urls)


async def reply_to(server: Endpoint, key: str, body: dict[str, Any], scale: float) -> str | Fault:
    """Return the judge's reply, from the cache if possible, or a fault if there is none.

    Only replies with a score are cached.
    """
    kept = server.cache.get(key) if server.cache else None
    if kept is not None:
        return kept
    try:
        choice = (await server.post(body))["choices"][0]
        reply, is_cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
    except BudgetError as error:
        return Fault("budget", str(error))
    except http.RequestError as error:
        return Fault("request", server.problem(error))
    except (LookupError, TypeError, AttributeError):
        return Fault("reply", NO_TEXT)
    if not isinstance(reply, str):
        return Fault("reply", NO_TEXT)
    if is_cut_off:
        return Fault("reply", "the judge's reply is cut off: raise max_tokens in extra_body")
    if server.cache and not isinstance(read_reply(reply, scale), Fault):
        server.cache.put(key, reply)
    return reply


def check_settings(limits: Limits, model: str, prompt: str, scale: float, extra_body: dict[str, Any]) -> None:
    """Raise ValueError if a setting is missing or invalid."""
    url = "the address of a server, such as http://localhost:8000, without a login"
    own = {"model", "messages", "stream", "n"}
    rules = {
        "base_url": (is_address(limits.base_url), url),
        "model": (model, "the name of the model there"),
        "prompt": (not prompt or "completion" in fields_of(prompt), "a template with the field {completion}"),
        "scale": (0 < scale < math.inf, "a finite number above 0, the judge's best score"),
        "extra_body": (not extra_body.keys() & own, "settings of the request other than model, messages, stream and n"),
        "concurrency": (limits.concurrency >= 1, "1 or more"),
        "requests_per_minute": (limits.requests_per_minute is None or limits.requests_per_minute > 0, "above 0"),
        "retries": (limits.retries >= 0, "0 or more"),
        "timeout": (limits.timeout > 0, "above 0 seconds"),
        "max_calls": (limits.max_calls is None or limits.max_calls >= 0, "0 or more"),
    }
    for name, (is_kept, rule) in rules.items():
        if not is_kept:
            raise ValueError(f"judge: `{name}` must be {rule}")
    api_key(limits.api_key_env)


def is_address(url: str) -> bool:
    """Return whether a URL is the address of a server without a login. A port must be valid."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError:  # an invalid port or brackets
        return False
