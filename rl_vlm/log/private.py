"""Text for others: without secrets, and for a public page without folders of this machine as well."""

from __future__ import annotations

import re

ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\",;|\]})]+/)*([^\s/'\",;|\]})]+)/?")
SECRET_NAME = r"[\w-]*(?:api[_-]?key|token|secret|password|passwd|credential)s?(?:[_-](?:id|value))?"
SECRET_VALUE = re.compile(rf"(?i)(?<![\w-])({SECRET_NAME})(['\"]?\s*[=:]\s*['\"]?)([^\s'\",;\]}}]+)")
KEY = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{8,}")
LOGIN = re.compile(r"(?<=://)[^\s/@]+@")
HIDDEN = "…"
PLAIN = ("null", "None", "true", "false")


def without_secrets(text: str) -> str:
    """Return text with `…` in place of what looks like a secret.

    A number is no secret, and neither is a missing value: `micro_batch_tokens=16384` stays.
    """
    text = LOGIN.sub("", KEY.sub(HIDDEN, text))
    return SECRET_VALUE.sub(
        lambda found: found[0] if found[3].isdigit() or found[3] in PLAIN else f"{found[1]}{found[2]}{HIDDEN}", text
    )


def for_everyone(text: str) -> str:
    """Return text without secrets, with absolute paths cut to their last part."""
    return ABSOLUTE_PATH.sub(r"\1", without_secrets(text))
