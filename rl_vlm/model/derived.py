"""Facts about a model type that has no row in `FAMILIES`, from the model itself.

    get_encoder("image")   the vision tower
    get_decoder()          the language model
    get_image_features     the arguments that have pixels; with `forward`, the parts that images need: further towers,
                           and projectors. The other parts never get a gradient
    get_rope_index         positions, if the model has this function
    config                 the ids of placeholder tokens, under their usual names. `with_placeholder` has added that of
                           images from the processor if it is missing

Only the proof before the first step says whether they are right, and whether images of several prompts share a run of
the vision tower (`rl_vlm/passes/start_check.py`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from inspect import isfunction, signature, unwrap
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_vlm.config.image_tokens import IMAGE_TOKENS, image_token_key
from rl_vlm.config.own_code import class_name, has_own_code
from rl_vlm.errors import ModelError, shorten
from rl_vlm.model.family import Family, rope_positions, text_positions
from rl_vlm.model.remote.code import create

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PLACEHOLDER = r"(image|img|video|audio)_(token|pad_token|context_token)_(id|index)"
"""Keys of configs that hold the token ids of placeholders, of any kind."""
_derived: dict[str, Family] = {}
"""Known facts, by the content of the config. To create a large model takes seconds."""
AUDIO = re.compile("audio|speech|sound")
INDEXER = "indexer"
"""Name of the modules of language models that select tokens. A choice has no gradient."""
UNSHARDABLE = "its model_type has no row in the table of families, so nobody has checked that ranks make equal calls"


def derived_family(config: PreTrainedConfig) -> Family:
    """Create a copy of a model without storage, and return the facts about it.

    Raises ModelError if the installed transformers has no such model, or if images do not become features of
    placeholder tokens in the input of a language model.
    """
    content = config.to_json_string(use_diff=False)
    if content not in _derived:
        _derived[content] = derive(config)
    return _derived[content]


def derive(config: PreTrainedConfig) -> Family:
    """Derive the facts of a model as `derived_family` does, but do not look at the known ones."""
    model, name = empty_model(config), named(config)
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(name, "it is an encoder and a decoder, and not one language model")
    if not hasattr(model.base_model, "get_image_features"):
        raise refusal(name, "it has no get_image_features, so its images cannot be encoded once per prompt")
    if model.get_output_embeddings() is None:
        raise refusal(name, "its LM head is unknown: get_output_embeddings returns None")
    if model.get_decoder() is model.base_model:
        raise refusal(name, "its language model is not a separate module, so its other parts cannot be found")
    image_token = image_token_key(config)
    if image_token is None:
        raise refusal(name, f"neither config ({', '.join(IMAGE_TOKENS)}) nor processor name the token of images")
    towers, projectors, unused = modules_beside_language(model)
    if not towers:
        raise refusal(name, "it has no modules other than its language model")
    return Family(
        name,
        (*towers, *projectors),
        num_towers=len(towers),
        other_modules=(*unused, *modules_without_gradient(model)),
        pixels=pixels_of(model.base_model.get_image_features),
        row_positions=rope_positions if hasattr(model.base_model, "get_rope_index") else text_positions,
        image_token=image_token,
        other_placeholders=tuple(each for each in vars(config) if re.fullmatch(PLACEHOLDER, each)),
        first_images_only=getattr(model, "first_images_only", None),
        unshardable=UNSHARDABLE,
        is_derived=True,
    )


def pixels_of(function: Any) -> tuple[str, ...]:
    """Return the arguments of `get_image_features` that have pixels and no default. A model can have two towers."""
    arguments = signature(function).parameters.values()
    needed = tuple(each.name for each in arguments if "pixel_values" in each.name and each.default is each.empty)
    return needed or ("pixel_values",)


def named(config: PreTrainedConfig) -> str:
    """Return the `model_type`, or the name of the model's class if its own code has no `model_type`."""
    return config.model_type or class_name(config)


def refusal(model_type: str, reason: str) -> ModelError:
    """Return the error for a type that cannot be trained."""
    return ModelError(f"model_type {model_type!r} is not supported: {reason}")


def empty_model(config: PreTrainedConfig) -> Any:
    """Create the model of a config without storage for its weights. Raises ModelError if that fails."""
    try:
        with torch.device("meta"):
            return create(copy.deepcopy(config), is_trusted=has_own_code(config))
    except Exception as error:  # of the model's own code
        raise refusal(named(config), f"it cannot be created ({type(error).__name__}: {shorten(error)})") from error


def modules_beside_language(model: Any) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the paths of all parts but the language model, its embeddings and its head: vision towers, projectors, and
    parts that images do not use.

    If transformers names the vision tower, it comes first. It can be inside the language model (CogVLM). Otherwise the
    first part counts as one. Vectors of the base model count as projectors. Parts for audio are unused.
    """
    base, tower = model.base_model, model.get_encoder(modality="image")
    inside = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    parts = {name: part for name, part in base.named_children() if inside.isdisjoint(part.modules())}
    decoder: nn.Module = model.get_decoder()
    within = [path for path, part in base.named_modules() if part is tower and tower in list(decoder.modules())[1:]]
    vectors = [name for name, _ in base.named_parameters(recurse=False)]
    used = names_used(base, "get_image_features", "forward")
    unused = [name for name in (*parts, *vectors) if AUDIO.search(name) or (used & parts.keys() and name not in used)]
    first = [name for name, part in parts.items() if tower in part.modules()]
    images = [name for name in dict.fromkeys([*within, *first, *parts, *vectors]) if name not in unused]
    towers = [*images[:1], *(name for name in images[1:] if name in parts and takes_pixels(parts[name]))]
    projectors = [name for name in images if name not in towers]
    root = next(path for path, module in model.named_modules() if module is base)
    prefix = f"{root}." if root else ""
    found = [tuple(f"{prefix}{name}" for name in names) for names in (towers, projectors, unused)]
    return found[0], found[1], found[2]


def takes_pixels(part: nn.Module) -> bool:
    """Return whether a part is a vision tower. A projector gets features."""
    return any("pixel_values" in name for name in signature(part.forward).parameters)


def names_used(model: nn.Module, *functions: str) -> set[str]:
    """Return the names in the code of these functions of a model, and of the model's functions that they call.

    Functions for videos and audio are not looked at.
    """
    used, todo = set[str](), list(functions)
    while todo:
        name = todo.pop()
        if name in used:
            continue
        used.add(name)
        if "video" in name or AUDIO.search(name):
            continue
        for owner in own_classes(model):
            found: Any = owner.__dict__.get(name)
            getter: Any = found.fget if isinstance(found, property) else found
            if isfunction(function := unwrap(getter)):
                todo += names_in(function.__code__)
    return used


def own_classes(model: nn.Module) -> list[type]:
    """Return the classes of a model below transformers' and torch's general ones."""
    from transformers import PreTrainedModel

    return [owner for owner in type(model).__mro__ if not issubclass(PreTrainedModel, owner)]


def names_in(code: CodeType) -> Iterator[str]:
    """Yield names of attributes and functions in a function's code, and its texts: an attribute's name can be one."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, str):
            yield each
        elif isinstance(each, CodeType):
            yield from names_in(each)


def modules_without_gradient(model: nn.Module) -> list[str]:
    """Return the paths of modules that have weights and run under `torch.no_grad`, or select tokens."""
    return [
        path
        for path, module in model.named_modules()
        if (path.rpartition(".")[2] == INDEXER or runs_without_gradient(type(module).forward))
        and next(module.parameters(), None) is not None
    ]


def runs_without_gradient(function: Any) -> bool:
    """Return whether a decorator of a function disables gradients."""
    while function is not None:
        owners = [getattr(cell.cell_contents, "__self__", None) for cell in function.__closure__ or ()]
        if any(isinstance(owner, torch.no_grad | torch.inference_mode) for owner in owners):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
