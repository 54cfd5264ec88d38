"""Users' functions by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rl_vlm.errors import RLVLMError


def find_function(name: str, error: type[RLVLMError]) -> Callable[..., Any]:
    """The function `module:function`; modules of the working directory are found too. Raises `error` if none is."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as failure:
        raise error(f"function {name!r} cannot be loaded: {failure}") from failure
