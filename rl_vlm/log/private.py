"""Text for everyone: without secrets and without folders of this machine."""

from __future__ import annotations

import re

from rl_vlm.config.secrets import without_secrets

ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\",;|\]})]+/)*([^\s/'\",;|\]})]+)/?")


def for_everyone(text: str) -> str:
    """Return text without secrets, with absolute paths cut to their last part."""
    return ABSOLUTE_PATH.sub(r"\1", without_secrets(text))
