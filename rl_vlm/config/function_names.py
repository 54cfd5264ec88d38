"""How settings name functions: `file.py:function`, `module:function`, or an object of a Python session.

The name of an object of a session is `python:LABEL#DIGEST`. `functions.py` loads them.
"""

from __future__ import annotations

import hashlib
import re

PREFIX = "python:"


def is_live_name(name: str) -> bool:
    """Return whether a setting names an object of a Python session, this one or another."""
    return name.startswith(PREFIX) and "#" in name


def live_name(label: str, content: str) -> str:
    """Return the name of an object: `label`, and the first 12 hex digits of the SHA-256 of `content`."""
    return f"{PREFIX}{label}#{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def label_of_live(name: str) -> str:
    """Return the label in the name of an object."""
    return name.removeprefix(PREFIX).rpartition("#")[0]


def names_function(name: str) -> bool:
    """Return whether a setting looks like the name of a function in a file, a module or a Python session."""
    return is_live_name(name) or re.fullmatch(r"(.+\.py|[\w.]+):\w+(\.\w+)*", name) is not None
