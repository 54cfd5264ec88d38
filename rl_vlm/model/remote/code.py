"""Python code that comes with a checkpoint: the classes that its `auto_map` names, and its files in new checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config.image_tokens import image_token_id, image_token_key
from rl_vlm.config.own_code import (
    AUTO_CLASSES,
    auto_name,
    class_name,
    conversation_image_token,
    has_own_code,
    own_class,
)
from rl_vlm.errors import ModelError
from rl_vlm.model.remote.kinds import OWN_KINDS, OwnKind

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def own_kind(config: PreTrainedConfig) -> OwnKind | None:
    """Return the kind of a model that is reached by an adapter, or None for any other."""
    return OWN_KINDS.get(class_name(config)) if has_own_code(config) else None


def model_class(config: PreTrainedConfig, is_trusted: bool) -> Any:
    """Return the class that loads a model: transformers' own, or the checkpoint's if its code is trusted.

    `auto_map` names the code's class. A kind of model in `OWN_KINDS` gets its adapter.
    """
    import transformers
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    name, named = auto_name(config), getattr(config, "auto_map", None) or {}
    if not is_trusted or name not in named:
        return getattr(transformers, AUTO_CLASSES[0])
    found, kind = own_class(config), own_kind(config)
    found.register_for_auto_class(name)
    return add_generation_mixin_to_remote_model(found) if kind is None else kind.adapted(found)


def create(config: PreTrainedConfig, is_trusted: bool, **arguments: Any) -> Any:
    """Create the model of a config with `arguments` such as `dtype`, without weights of a checkpoint."""
    found = model_class(config, is_trusted)
    make = found.from_config if hasattr(found, "from_config") else found._from_config  # an auto class, or a model's
    return make(config, **arguments)


def with_placeholder(config: Any, source: str, revision: str) -> Any:
    """Add the id of the image token to a config that lacks it, from the tokenizer or the processor."""
    kind = own_kind(config)
    if kind is not None:
        kind.complete(config)
        if getattr(config, "image_token_id", None) is None:
            config.image_token_id = (
                conversation_image_token(config, tokenizer_of(source, revision))
                if kind.image_token is None
                else token_id(kind.image_token, source, revision)
            )
    elif image_token_key(config) is None:
        found = token_of_processor(source, revision, is_trusted=has_own_code(config))
        if found is not None:
            config.image_token_id = found
    return config


@cache
def token_of_processor(source: str, revision: str, is_trusted: bool) -> int | None:
    """Return the id of the image token of a checkpoint's processor, or None if there is no such processor or token."""
    from transformers import AutoProcessor

    try:
        processor: Any = AutoProcessor.from_pretrained(source, revision=revision, trust_remote_code=is_trusted)
    except (OSError, ValueError, ImportError):  # loading the data's processor says why
        return None
    return image_token_id(processor) if hasattr(processor, "image_processor") else None


@cache
def token_id(token: str, source: str, revision: str) -> int:
    """Return the id of a token. Raises ModelError if the checkpoint's tokenizer does not have it."""
    found = tokenizer_of(source, revision).get_vocab().get(token)
    if found is None:
        raise ModelError(f"the tokenizer of {source} has no token {token!r}, which takes the place of images")
    return found


@cache
def tokenizer_of(source: str, revision: str) -> Any:
    """Load the tokenizer of a checkpoint whose code is trusted."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=True)


def save_code(model: PreTrainedModel, directory: Path) -> None:
    """Copy the code of a model to a checkpoint, and name its class in the model's config. Other models have none."""
    from transformers.dynamic_module_utils import custom_object_save

    inner: Any = model
    if inner._auto_class is not None:
        custom_object_save(model, directory, config=inner.config)
