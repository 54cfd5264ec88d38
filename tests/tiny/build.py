"""Tiny models of every family with a row, and of types without one."""

import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_vlm.model.families import FAMILIES
from rl_vlm.tiny import build, families
from rl_vlm.tiny.family import TinyFamily
from rl_vlm.tiny.qwen import qwen3_vl
from tests.tiny.cache import CACHE
from tests.tiny.cohere import COHERE
from tests.tiny.deepseek import DEEPSEEK
from tests.tiny.gemma import GEMMA
from tests.tiny.glm import GLM
from tests.tiny.grids import GRIDS
from tests.tiny.hybrid import HYBRID
from tests.tiny.llava import LLAVA
from tests.tiny.mllama import MLLAMA
from tests.tiny.ocr import OCR
from tests.tiny.omni import OMNI
from tests.tiny.sparse import SPARSE
from tests.tiny.tiles import TILES
from tests.tiny.unlisted import UNLISTED

NUM_DEEPSTACK = 3
"""Of Qwen3-VL: the order of fewer would not show."""
ALL_FAMILIES: dict[str, TinyFamily] = {
    **families.TINY_FAMILIES, **qwen3_vl(NUM_DEEPSTACK), **GLM, **LLAVA, **TILES, **GEMMA, **COHERE, **DEEPSEEK, **OCR,
    **MLLAMA, **HYBRID, **GRIDS, **OMNI, **SPARSE,
}  # fmt: skip
"""Some need a newer transformers, or a package such as timm."""
TINY_FAMILIES = {
    name: family for name, family in ALL_FAMILIES.items() if name not in FAMILIES or FAMILIES[name].is_available
}
"""All that the installed transformers has."""
BUILT = TINY_FAMILIES | UNLISTED


def build_tiny(family: str, directory: str | Path, **options: Any) -> Path:
    """Write a tiny checkpoint, as `rl_vlm.tiny.build.build_tiny` does. A test run builds each once, and copies it."""
    if CACHE not in os.environ:
        return build.build_tiny(family, directory, families=BUILT, **options)
    name = hashlib.sha256(repr((family, sorted(options.items()))).encode()).hexdigest()[:16]
    built = Path(os.environ[CACHE]) / name
    if not built.exists():
        unfinished = Path(tempfile.mkdtemp(dir=built.parent))
        build.build_tiny(family, unfinished, families=BUILT, **options)
        with suppress(OSError):  # another process was first
            unfinished.rename(built)
    shutil.copytree(built, directory, dirs_exist_ok=True)
    return Path(directory)
