"""Shallow copies of a model's config. Their traces are extrapolated to the whole model.

Each further layer adds the same bytes to a step. So three shallow models are traced: one with few layers, one with more
language layers, and one with more vision layers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

LEAST_LAYERS = 2
"""The first and the last layer can differ from the others."""


@dataclass(frozen=True)
class Depth:
    """Numbers of layers."""

    language: int
    vision: int


@dataclass(frozen=True)
class Extrapolation:
    """The depths of three shallow models and of the whole model."""

    shallow: Depth
    more_language: Depth
    more_vision: Depth
    whole: Depth

    @staticmethod
    def of(config: Any) -> Extrapolation:
        """Choose the depths for a transformers config."""
        whole = Depth(config.get_text_config().num_hidden_layers, num_vision_layers(config))
        period = layer_period(config.get_text_config())
        least = max(LEAST_LAYERS, num_deepstack(config), 1 + num_dense_layers(config))
        language = min(-(-least // period) * period, whole.language)
        vision = min(max(LEAST_LAYERS, num_deepstack(config)), whole.vision)
        return Extrapolation(
            Depth(language, vision),
            Depth(min(language + period, whole.language), vision),
            Depth(language, min(vision + 1, whole.vision)),
            whole,
        )

    def depths(self) -> tuple[Depth, Depth, Depth]:
        return self.shallow, self.more_language, self.more_vision

    def extrapolate(self, shallow: float, more_language: float, more_vision: float) -> float:
        """Extrapolate from the values of the three shallow models to the whole model."""
        language = _slope(more_language - shallow, self.more_language.language - self.shallow.language)
        vision = _slope(more_vision - shallow, self.more_vision.vision - self.shallow.vision)
        layers = (self.whole.language - self.shallow.language, self.whole.vision - self.shallow.vision)
        return shallow + language * layers[0] + vision * layers[1]

    def beyond_one_layer(self, shallow: float, more_language: float, more_vision: float) -> float:
        """Return the share of the whole model's value that comes from all but one language and one vision layer."""
        one = replace(self, whole=Depth(1, 1))
        three = (shallow, more_language, more_vision)
        return self.extrapolate(*three) - one.extrapolate(*three)


def _slope(difference: float, num_layers: int) -> float:
    return difference / num_layers if num_layers else 0.0


def with_depth(config: Any, depth: Depth) -> Any:
    """Return a copy of a transformers config with other numbers of layers."""
    made = copy.deepcopy(config)
    text, vision = made.get_text_config(), made.vision_config
    text.num_hidden_layers = depth.language
    if name := depth_name(vision):
        setattr(vision, name, depth.vision)
    for part, num_layers in ((text, depth.language), (vision, depth.vision)):
        if getattr(part, "layer_types", None):
            part.layer_types = [part.layer_types[i % layer_period(part)] for i in range(num_layers)]
    if getattr(vision, "fullatt_block_indexes", None):
        vision.fullatt_block_indexes = list(range(depth.vision))  # windows hold as much as full attention does
    if num_deepstack(config):
        vision.deepstack_visual_indexes = list(range(num_deepstack(config)))
    return made


def depth_name(vision: Any) -> str | None:
    """Return the attribute with a vision tower's number of layers, or None if there is none, as in timm's towers."""
    return next((name for name in ("depth", "num_hidden_layers") if hasattr(vision, name)), None)


def num_vision_layers(config: Any) -> int:
    """Return the number of vision layers. If it is unknown, the tower counts as one layer and is traced whole."""
    name = depth_name(config.vision_config)
    return getattr(config.vision_config, name) if name else 1


def num_deepstack(config: Any) -> int:
    """Return the number of vision layers whose features deeper language layers add (Qwen3-VL)."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def num_dense_layers(config: Any) -> int:
    """Return the number of leading layers without experts in a mixture-of-experts model."""
    return getattr(config.get_text_config(), "first_k_dense_replace", None) or 0


def layer_period(text: Any) -> int:
    """Return the number of layers after which the types of layers repeat."""
    types = list(getattr(text, "layer_types", None) or [None])
    return next(n for n in range(1, len(types) + 1) if all(a == b for a, b in zip(types, types[n:], strict=False)))
