"""Python code that comes with a checkpoint: the classes that `auto_map` names, for processors and for models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
"""transformers' classes under which an `auto_map` names a model that generates text. Earlier ones come first."""
VISION_TOKEN_TYPE = 1
"""Value of CogVLM's `token_type_ids` at tokens of an image. Text has 0."""


def has_own_code(config: PreTrainedConfig) -> bool:
    """Return whether a config was loaded from code that came with its checkpoint."""
    return type(config).__module__.startswith("transformers_modules.")


def auto_name(config: PreTrainedConfig) -> str:
    """Return the first name in `AUTO_CLASSES` that the config's `auto_map` has."""
    named = getattr(config, "auto_map", None) or {}
    return next((name for name in AUTO_CLASSES if name in named), AUTO_CLASSES[0])


def class_name(config: PreTrainedConfig) -> str:
    """Return the name of the model's class in the checkpoint's code. It is empty if `auto_map` names none."""
    named = getattr(config, "auto_map", None) or {}
    return named.get(auto_name(config), "").rpartition(".")[2]


def own_class(config: PreTrainedConfig) -> Any:
    """Load the model's class from the code that `auto_map` names. This runs the code."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    commit = getattr(config, "_commit_hash", None)  # of a name on the hub; code of another repository has its own
    named: Any = config.auto_map
    return get_class_from_dynamic_module(named[auto_name(config)], config._name_or_path, revision=commit)


def conversation_inputs(config: PreTrainedConfig, tokenizer: Any, **arguments: Any) -> dict[str, Any]:
    """Call CogVLM's published `build_conversation_input_ids`, which reads no part of the model but its config.

    `arguments` are `query`, `history`, `images` and `template_version`. Returns `input_ids` and `token_type_ids`, each
    (tokens,), and `images`: a list of one tensor (3, height, width), or nothing.
    """
    return own_class(config).build_conversation_input_ids(SimpleNamespace(config=config), tokenizer, **arguments)


def conversation_image_token(config: PreTrainedConfig, tokenizer: Any) -> int:
    """Return the id of the token that CogVLM's published function writes for an image, from a small image."""
    from PIL import Image

    found = conversation_inputs(config, tokenizer, query="", images=[Image.new("RGB", (8, 8))])
    return int(found["input_ids"][found["token_type_ids"] == VISION_TOKEN_TYPE][0])
