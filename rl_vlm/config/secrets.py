"""Replace secrets by `***` wherever a run writes or prints settings or text.

starred           replace secrets in settings, for files, checkpoints and trackers
without_secrets   replace secrets in text, for pages, logs, errors and commands
starred_places    find `***` in settings: a run cannot start with it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

STARS = "***"

SECRET_NAME = r"""[\w-]*
    (?: (?:api|access|private|secret|auth)[_-]?key | (?:api|access|refresh|auth|bearer|hub|hf)[_-]?token
      | secret | password | passwd | passphrase | credential
    )s?(?:[_-](?:id|value))?
    | (?:[\w-]*[_-])?(?:pwd|auth|authorization)"""
TOKEN_NAME = r"[\w-]*token(?:[_-](?:id|value))?"
"""Names of secrets or of text tokens: token ids, and special tokens such as `<|im_end|>`."""
KEY_NAME = r"[\w-]*keys?"
"""Names of secrets, or of columns and fields. The value decides (`KEY_VALUE`)."""
KEY = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|ghp_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}"
    r"|(?:sk|xox[abprs])-(?=[\w-]*\d)[\w-]{12,})"
)
"""Keys of known services. Names such as `hf_base_model_v1` have other characters, or are shorter."""
KEY_VALUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/=~-]{16,}")
HEADER = re.compile(r"(?i)(?:bearer|basic)\s+\S+")
TOKEN_VALUE = re.compile(r"(?=.*[^\W\d])[^\s<>|\[\]]+")

VALUE_IN_TEXT = re.compile(
    rf"""(?<![\w-])(?P<name>{SECRET_NAME}|(?P<token>{TOKEN_NAME}))(?P<equals>['"]?\s*[=:]\s*)
    (?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>(?:(?:bearer|basic)\s+)?[^\s'",;&\]}}]+))""",
    re.IGNORECASE | re.VERBOSE,
)
LOGIN = re.compile(r"(?<=://)[^\s/?#'\"]+@")
URL = re.compile(r"\w+://[^\s'\"]+")
NO_VALUES = ("null", "none", "true", "false")


def starred(value: Any, name: str = "") -> Any:
    """Replace values of settings by `***` if their `name` or the values themselves look like secrets.

    In any other text, replace only secrets in URLs: logins, and values of parameters with such names.
    """
    if isinstance(value, Mapping) and not _is_secret(name, value):
        return {key: starred(of_key, str(key)) for key, of_key in value.items()}
    if isinstance(value, list | tuple):
        return [starred(one, name) for one in value]
    if _is_secret(name, value):
        return STARS
    return URL.sub(lambda url: without_secrets(url[0]), value) if isinstance(value, str) else value


def without_secrets(text: str) -> str:
    """Replace everything in a text that looks like a secret by `***`.

    Missing values and numbers of tokens stay: `micro_batch_tokens=16384` is no secret.
    """
    return VALUE_IN_TEXT.sub(_star_value, LOGIN.sub(f"{STARS}@", KEY.sub(STARS, text)))


def starred_places(value: Any, name: str) -> Iterator[str]:
    """Yield the names of the values that are starred out in the setting `name`."""
    if isinstance(value, Mapping):
        for key, of_key in value.items():
            yield from starred_places(of_key, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from starred_places(one, f"{name}[{i}]")
    elif isinstance(value, str) and (value == STARS or any(STARS in url for url in URL.findall(value))):
        yield name


def _is_secret(name: str, value: Any) -> bool:
    """Return whether a value with this name looks like a secret."""
    if value is None or isinstance(value, bool) or value in ("", STARS):
        return False
    if re.fullmatch(SECRET_NAME, name, re.IGNORECASE | re.VERBOSE):
        return not isinstance(value, list | tuple)
    if not isinstance(value, str):
        return False
    if KEY.fullmatch(value) or HEADER.fullmatch(value):
        return True
    if name.lower() == "token":
        return TOKEN_VALUE.fullmatch(value) is not None
    is_named = re.fullmatch(f"{TOKEN_NAME}|{KEY_NAME}", name, re.IGNORECASE) is not None
    return is_named and KEY_VALUE.fullmatch(value) is not None


def _star_value(found: re.Match[str]) -> str:
    quote = '"' if found["double"] is not None else "'" if found["single"] is not None else ""
    value = found["double"] or found["single"] or found["bare"] or ""
    is_none = value.lower() in ("", *NO_VALUES) or (found["token"] is not None and not TOKEN_VALUE.fullmatch(value))
    return found[0] if is_none else f"{found['name']}{found['equals']}{quote}{STARS}{quote}"
