"""The tiny models of all families, by `model_type`."""

from __future__ import annotations

from rl_vlm.tiny.cohere import COHERE
from rl_vlm.tiny.deepseek import DEEPSEEK
from rl_vlm.tiny.family import TinyFamily
from rl_vlm.tiny.gemma import GEMMA
from rl_vlm.tiny.glm import GLM
from rl_vlm.tiny.grids import GRIDS
from rl_vlm.tiny.hybrid import HYBRID
from rl_vlm.tiny.llava import LLAVA
from rl_vlm.tiny.mllama import MLLAMA
from rl_vlm.tiny.ocr import OCR
from rl_vlm.tiny.omni import OMNI
from rl_vlm.tiny.qwen import QWEN
from rl_vlm.tiny.sparse import SPARSE
from rl_vlm.tiny.tiles import TILES

TINY_FAMILIES: dict[str, TinyFamily] = {
    **QWEN, **GLM, **LLAVA, **TILES, **GEMMA, **COHERE, **DEEPSEEK, **OCR, **MLLAMA, **HYBRID, **GRIDS,
    **OMNI, **SPARSE,
}  # fmt: skip
"""Some need a newer transformers, or a package such as timm."""
