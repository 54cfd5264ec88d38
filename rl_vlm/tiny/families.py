"""The tiny models by `model_type`, of the families that new projects can have."""

from __future__ import annotations

from rl_vlm.tiny.family import TinyFamily
from rl_vlm.tiny.gemma import GEMMA
from rl_vlm.tiny.internvl import INTERNVL
from rl_vlm.tiny.llava import LLAVA
from rl_vlm.tiny.qwen import QWEN

TINY_FAMILIES: dict[str, TinyFamily] = {**QWEN, **INTERNVL, **LLAVA, **GEMMA}
