"""Python code that comes with a checkpoint: the classes that its `auto_map` names, and its files in new checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.errors import ModelError
from rl_vlm.model.remote.kinds import OWN_KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM", "AutoModel")
"""transformers' classes under which an `auto_map` names a model that generates text. Earlier ones come first."""


def model_class(config: PreTrainedConfig, is_trusted: bool) -> Any:
    """Return the class that loads a model: transformers' own, or the checkpoint's if its code is trusted.

    `auto_map` names the code's class. A kind of model in `OWN_KINDS` gets its adapter.
    """
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    name, named = auto_name(config), getattr(config, "auto_map", None) or {}
    if not is_trusted or name not in named:
        return getattr(transformers, AUTO_CLASSES[0])
    commit = getattr(config, "_commit_hash", None)  # of a name on the hub; code of another repository has its own
    found: Any = get_class_from_dynamic_module(named[name], config._name_or_path, revision=commit)
    found.register_for_auto_class(name)
    kind = OWN_KINDS.get(config.model_type)
    return add_generation_mixin_to_remote_model(found) if kind is None else kind.adapted(found)


def auto_name(config: PreTrainedConfig) -> str:
    """Return the first name in `AUTO_CLASSES` that the config's `auto_map` has."""
    named = getattr(config, "auto_map", None) or {}
    return next((name for name in AUTO_CLASSES if name in named), AUTO_CLASSES[0])


def create(config: PreTrainedConfig, is_trusted: bool, **arguments: Any) -> Any:
    """Create the model of a config with `arguments` such as `dtype`, without weights of a checkpoint."""
    found = model_class(config, is_trusted)
    make = found.from_config if hasattr(found, "from_config") else found._from_config  # an auto class, or a model's
    return make(config, **arguments)


def with_placeholder(config: Any, source: str, revision: str) -> Any:
    """Add the id of the image token to the config of a kind in `OWN_KINDS`, whose code gets it from the tokenizer."""
    kind = OWN_KINDS.get(config.model_type) if has_own_code(config) else None
    if kind is not None:
        kind.complete(config)
        if getattr(config, "image_token_id", None) is None:
            config.image_token_id = token_id(kind.image_token, source, revision)
    return config


@cache
def token_id(token: str, source: str, revision: str) -> int:
    """Return the id of a token. Raises ModelError if the checkpoint's tokenizer does not have it."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=True)
    found = tokenizer.get_vocab().get(token)
    if found is None:
        raise ModelError(f"the tokenizer of {source} has no token {token!r}, which takes the place of images")
    return found


def has_own_code(config: PreTrainedConfig) -> bool:
    """Return whether a config was loaded from code that came with its checkpoint."""
    return type(config).__module__.startswith("transformers_modules.")


def save_code(model: PreTrainedModel, directory: Path) -> None:
    """Copy the code of a model to a checkpoint, and name its class in the model's config. Other models have none."""
    from transformers.dynamic_module_utils import custom_object_save

    inner: Any = model
    if inner._auto_class is not None:
        custom_object_save(model, directory, config=inner.config)
