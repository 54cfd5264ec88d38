"""Features of images and videos, computed once for all completions that share a prompt or an observation.

Features of a frozen tower are cached for one optimizer step. Rollout, old and reference log-probs and training share
them. A trained tower runs in the micro-batch of a group, and gradients flow through it. If a group is cut, the tower
runs apart from its micro-batches (`model/features.py`).

    prompts, observations ─ encode ─► ImageFeatures of each ─ given ─► the model's forward, which uses them instead
                                                                      of calling the vision tower
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rl_vlm.errors import ModelError
from rl_vlm.model.family import Family
from rl_vlm.model.features import ImageFeatures, KeptFeatures
from rl_vlm.model.recomputation import recomputes_vision
from rl_vlm.types import MicroBatch, Prompt, Rendered, Sample, concatenate_images, has_video, to_device, to_host

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

KINDS = (
    ("pixel_values", lambda features: features.of_images),
    ("pixel_values_videos", lambda features: features.of_videos),
)
"""For each kind: the argument of the model's forward, and the part of features."""
DEFAULT_PATCH_SIZE = 14
"""Patch size if the tower's config has none."""


class FeatureCache:
    """Features of a frozen tower in this optimizer step, by the digest of their images.

    They go with the last prompt or observation that used them. Policy and reference share them, since their towers are
    equal.
    """

    def __init__(self) -> None:
        self.by_digest: WeakValueDictionary[bytes, ImageFeatures] = WeakValueDictionary()
        self.by_user: WeakKeyDictionary[Rendered, ImageFeatures] = WeakKeyDictionary()
        """Keeps the features alive."""

    def __len__(self) -> int:
        return len(self.by_digest)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.by_digest

    def get(self, user: Rendered) -> ImageFeatures | None:
        """Return the cached features of the user's images, or None. Keep them as long as the user exists."""
        features = self.by_digest.get(user.digest)
        if features is not None:
            self.by_user[user] = features
        return features

    def add(self, user: Rendered, features: ImageFeatures) -> None:
        """Cache the features of the user's images. Keep them as long as the user exists."""
        self.by_digest[user.digest] = features
        self.by_user[user] = features

    def keep_only(self, digests: Container[bytes]) -> None:
        """Drop the features of other images."""
        for user in [user for user in self.by_user if user.digest not in digests]:
            del self.by_user[user]
        for digest in [digest for digest in self.by_digest if digest not in digests]:
            del self.by_digest[digest]

    def clear(self) -> None:
        self.by_user.clear()
        self.by_digest.clear()


@dataclass
class VisionEncoder:
    """The vision tower of a model. If it is frozen, it caches the features of prompts and observations."""

    model: PreTrainedModel
    family: Family
    counters: Counter[str] = field(default_factory=Counter)
    idle_prompt: Prompt | None = None
    """A prompt with an image, for idle runs."""
    features: FeatureCache = field(default_factory=FeatureCache)
    kept: dict[bytes, KeptFeatures] = field(default_factory=dict)
    """Features of a trained tower that several micro-batches use, by the digest of their images."""
    joined: bool | None = None
    """Whether images of several prompts share a run, if the family has no row. None until a proof says so."""

    def join_images(self, joined: bool) -> None:
        """Let images of several prompts share a run from now on, or not."""
        self.joined = joined

    @cached_property
    def is_frozen(self) -> bool:
        return not any(p.requires_grad for p in self.family.vision_parameters(self.model))

    @cached_property
    def is_recomputed(self) -> bool:
        return recomputes_vision(self.model, self.family)

    def clear(self) -> None:
        """Drop all features: cached ones of a frozen tower, and kept ones of a failed pass."""
        self.features.clear()
        self.kept.clear()

    def pixels(self, prompt: Prompt) -> int:
        """Return the number of pixels in the tower's input for a prompt's images."""
        return num_pixels(self.model.config, prompt)

    def encode(self, rendered: Sequence[Rendered]) -> dict[Rendered, ImageFeatures]:
        """Return the features of every prompt and observation that has images. Equal images have the same features.

        Raises ModelError if features and placeholder tokens do not correspond.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            found = {r.digest: features for call in self.calls(rendered) for r, features in self.run(call).items()}
        with_images = [each for each in dict.fromkeys(rendered) if each.mm_inputs]
        if self.is_frozen:
            self.cache(found, with_images)
        for each in with_images:
            cached = self.features.get(each)
            if each.digest in self.kept:
                found.setdefault(each.digest, self.kept[each.digest].features())
            elif cached is not None and each.digest not in found:
                found[each.digest] = cached.map(lambda t: to_device(t, self.model.device))
        return {each: self.in_order(each, found[each.digest]) for each in with_images}

    def in_order(self, rendered: Rendered, features: ImageFeatures) -> ImageFeatures:
        """Return features in the order of placeholders, if images and videos have the same token."""
        if features.num_image_tokens is None or not self.family.has_one_token:
            return features
        return features.placed(self.family.is_video(self.model.config, rendered))

    def cache(self, found: dict[bytes, ImageFeatures], users: Sequence[Rendered]) -> None:
        """Keep features in host memory, since an optimizer step may have any number of prompts."""
        copies = {digest: features.map(to_host) for digest, features in found.items()}
        for user in users:
            if user.digest in copies:
                self.features.add(user, copies[user.digest])

    def calls(self, rendered: Sequence[Rendered], known: Container[bytes] = ()) -> list[list[Rendered]]:
        """Return the inputs of each run of the tower: all in one run if they can be concatenated, else one each.

        Rows of patches of different lengths (Gemma 4) have a run for each length, so that short ones get no padding.
        Without a row in the table of families, inputs of other shapes have other runs. Equal images are one input.
        Images whose digests are `known` are left out.
        """
        unlike: dict[bytes, Rendered] = {}
        for each in rendered:
            if each.mm_inputs and not any(each.digest in owner for owner in (self.features, self.kept, known)):
                unlike.setdefault(each.digest, each)
        new = list(unlike.values())
        if not (self.family.joins_images or self.joined):
            return [[each] for each in new]
        runs: dict[Any, list[Rendered]] = {}
        for each in new:
            runs.setdefault(input_shapes(each) if self.family.is_derived else row_length(each), []).append(each)
        return list(runs.values())

    def apart(self, batch: MicroBatch) -> list[Rendered]:
        """Return the prompts and observations on which a trained tower runs apart from the micro-batch, one for equal
        images."""
        if self.is_frozen or not torch.is_grad_enabled():
            return []
        return list({each.digest: each for s in batch.subgroups for each in s.apart}.values())

    def keep(self, batch: MicroBatch, num_runs: int) -> None:
        """Run the tower without gradients and keep the features. Idle runs bring the number of runs to `num_runs`."""
        new = [each for each in self.apart(batch) if each.digest not in self.kept]
        with torch.no_grad():
            self.idle(num_runs - len(new))
            self.kept |= {each.digest: KeptFeatures(self.run([each])[each]) for each in new}

    def kept_loss(self, rendered: Rendered) -> Tensor:
        """Run the tower with gradients. Return a scalar whose gradient sums up all uses of the kept features.

        The kept features are dropped. For the idle prompt, the gradient is 0.
        """
        if rendered is self.idle_prompt:
            return self.idle(1)
        return self.kept.pop(rendered.digest).loss(self.run([rendered])[rendered])

    def run(self, rendered: Sequence[Rendered]) -> dict[Rendered, ImageFeatures]:
        """Run the tower once on the images and videos of prompts and observations."""
        inputs = tower_inputs(rendered, self.model.device)
        self.counters["vision_forwards"] += 1
        if torch.is_grad_enabled() and self.is_recomputed:
            self.counters["vision_recomputations"] += 1
        self.counters["vision_patches"] += sum(num_patches(self.model.config, each) for each in rendered)
        if self.family.cross_attends:
            return {rendered[0]: cross_attention_features(self.model, inputs)}
        model: Any = self.model.base_model
        with self.family.own_errors():
            if self.family.image_features is not None:
                output = self.family.image_features(model, **inputs)
            else:
                output = model.get_image_features(**inputs, return_dict=True)
        kinds = [self.family.is_video(self.model.config, each) for each in rendered]
        found = split_features(output, rendered, list(map(len, kinds)), [int(kind.sum()) for kind in kinds])
        return dict(zip(rendered, found, strict=True))

    @contextmanager
    def given(self, features: Sequence[ImageFeatures]) -> Iterator[dict[str, Any]]:
        """Make forwards with the yielded arguments use these features instead of running the vision tower.

        The features belong to the rows' images and videos, in order of their placeholders. Only transformers 5.18 and
        later accept them as an argument (`mm_encoder_outputs`).
        """
        if self.family.cross_attends:
            yield {"cross_attention_states": joined_embeddings(features)} if features else {}
            return
        inner: Any = self.model.base_model
        arguments: dict[str, Any] = {}
        outputs: dict[str, list[Any]] = {}
        for (argument, of_kind), getter in zip(KINDS, self.family.getters, strict=True):
            if some := [part for each in features if (part := of_kind(each)) is not None]:
                joined = joined_embeddings(some)
                is_image = argument == "pixel_values"
                arguments |= dict.fromkeys(self.family.pixels if is_image else (argument,), joined)
                is_stacked = self.family.stacks_videos and not is_image
                outputs.setdefault(getter, []).append(joined_output(joined, some, is_stacked))
        for getter, found in outputs.items():
            setattr(inner, getter, returning(found))
        try:
            with self.family.own_errors():
                yield arguments
        finally:
            for getter in outputs:
                delattr(inner, getter)

    def idle(self, num_calls: int) -> Tensor:
        """Run the tower `num_calls` times and return 0. Idle runs let all ranks run it equally often."""
        if num_calls <= 0:
            return torch.zeros((), device=self.model.device)
        assert self.idle_prompt is not None, "runs with ZeRO or FSDP2 have a prompt for idle runs"
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            runs = [self.run([self.idle_prompt])[self.idle_prompt] for _ in range(num_calls)]
        return 0.0 * torch.stack([part.sum() for run in runs for part in (run.embeddings, *run.deepstack)]).sum()

    def placeholders(self, rendered: Sequence[Rendered]) -> list[int]:
        """Count the placeholder tokens of each prompt or observation, of images and videos."""
        return [len(self.family.is_video(self.model.config, each)) for each in rendered]


class LinearPatches(nn.Conv3d):
    """A patch embedding as a matrix product, one patch per row: 3 to 5 times faster than the convolution.

    Weights and names are the same. Results differ by rounding (order of summation). Convolutions over whole images
    would not gain and are not replaced.
    """

    def forward(self, patches: Float[Tensor, "patches channels time height width"]) -> Tensor:
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def use_linear_patches(model: PreTrainedModel) -> None:
    """Compute 3-D patch embeddings as matrix products."""
    for module in model.modules():
        if type(module) is nn.Conv3d and module.stride == module.kernel_size and module.padding == (0, 0, 0):
            module.__class__ = LinearPatches


def idle_sample() -> Sample:
    """Make a sample with a small grey image, for `VisionEncoder.idle_prompt`."""
    from PIL import Image

    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "."}]}]
    return Sample("idle", messages, [Image.new("RGB", (64, 64), "gray")], {}, messages)


def returning(outputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that returns the outputs in turn, whatever its arguments."""
    in_turn = cycle(outputs)
    return lambda *args, **kwargs: next(in_turn)


def tower_inputs(some: Sequence[Rendered], device: torch.device) -> dict[str, Tensor]:
    """Return the inputs of one run of the tower on the images and videos of prompts and observations.

    The images of each come before its videos, whose frames or temporal patches are images for the tower.
    """
    names = {name for each in some if has_video(each) for name in each.mm_inputs}
    join = next((join for name, join in JOINED.items() if name in names), None)
    if join is None:
        return concatenate_images(some, device)
    return {name: to_device(value, device) for name, value in join(some).items()}


def of_both_kinds(some: Sequence[Rendered], *names: str) -> list[list[Tensor]]:
    """Return the values of each pair of inputs: for every prompt or observation its images, and then its videos.

    The names alternate: an input of images, and the same input of videos.
    """
    pairs = list(zip(names[::2], names[1::2], strict=True))
    return [[each.mm_inputs[name] for each in some for name in pair if name in each.mm_inputs] for pair in pairs]


def joined_grids(some: Sequence[Rendered]) -> dict[str, Tensor]:
    """Join patches in grids. One tower attends across the frames of a grid (Kimi). The others do not attend across
    temporal patches, and GLM-V's takes no grid with several.
    """
    pixels, grids = of_both_kinds(some, "pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
    joined = torch.cat(grids)
    if not has_clips(pixels[0]):
        joined = torch.repeat_interleave(joined, joined[:, 0], dim=0)
        joined[:, 0] = 1
    return {"pixel_values": torch.cat(pixels), "image_grid_thw": joined}


def has_clips(patches: Tensor) -> bool:
    """Return whether grids are clips, whose frames the tower joins (Kimi). Their patches are small images."""
    return patches.ndim == 4


def joined_strips(some: Sequence[Rendered]) -> dict[str, Tensor]:
    """Join strips of patches (MiniCPM-V)."""
    pixels, sizes = of_both_kinds(some, "pixel_values", "pixel_values_videos", "target_sizes", "target_sizes_videos")
    return {"pixel_values": torch.cat(pixels, dim=-1), "target_sizes": torch.cat(sizes)}


def joined_padded(some: Sequence[Rendered]) -> dict[str, Tensor]:
    """Join rows of patches with their places (Gemma 4), and pad all of them to the longest."""
    pixels, places = of_both_kinds(
        some, "pixel_values", "pixel_values_videos", "image_position_ids", "video_position_ids"
    )
    longest = max(map(row_length, some))

    def padded(rows: Sequence[Tensor], value: int) -> Tensor:
        return torch.cat([F.pad(row, (0, 0, 0, longest - row.shape[1]), value=value) for row in rows])

    return {"pixel_values": padded(pixels, 0), "image_position_ids": padded(places, -1)}


def input_shapes(rendered: Rendered) -> tuple[tuple[str, torch.Size], ...]:
    """Return the names and shapes of the inputs of images and videos, without dimension 0."""
    return tuple(sorted((name, values.shape[1:]) for name, values in rendered.mm_inputs.items()))


def row_length(rendered: Rendered) -> int:
    """Return the patches in the longest row of an input in rows of patches (Gemma 4), or 0 for other inputs."""
    if not {"image_position_ids", "video_position_ids"} & rendered.mm_inputs.keys():
        return 0
    return max(rendered.mm_inputs[name].shape[1] for name, _ in KINDS if name in rendered.mm_inputs)


JOINED: dict[str, Callable[[Sequence[Rendered]], dict[str, Tensor]]] = {
    "video_grid_thw": joined_grids,
    "target_sizes_videos": joined_strips,
    "video_position_ids": joined_padded,
}
"""Functions that join inputs of images and videos for the tower, by an input that only some families have. Without such
an input, the family's `image_features` takes both kinds."""


def vision_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the tower's config, or the model's if the tower has none (Fuyu) or another name for it (Emu3)."""
    return getattr(config, "vision_config", config)


def num_patches(config: PreTrainedConfig, rendered: Rendered) -> int:
    """Return the number of patches that the vision tower computes for images and videos, padding included."""
    patch_size = getattr(vision_config(config), "patch_size", DEFAULT_PATCH_SIZE)
    side = patch_size if isinstance(patch_size, int) else patch_size[0]
    return num_pixels(config, rendered) // side**2


def num_pixels(config: PreTrainedConfig, rendered: Rendered) -> int:
    """Return the number of pixels in the vision tower's input for images and videos, padding included.

    Frames of one temporal patch count once, as the tower computes them together.
    """
    values_per_pixel = 3 * getattr(vision_config(config), "temporal_patch_size", 1)
    found = [values for name, values in rendered.mm_inputs.items() if "pixel_values" in name]
    if longest := row_length(rendered):
        return sum(len(rows) * longest * rows.shape[2] for rows in found) // values_per_pixel
    return sum(rows.numel() for rows in found) // values_per_pixel


def patch_cost(config: PreTrainedConfig) -> float:
    """Return the cost of a patch's kept activations in language tokens.

    It is (depth x width) of the tower / (depth x width) of the language model, or 1 if the config does not give the
    tower's depth and width.
    """
    vision, text = vision_config(config), config.get_text_config()
    depth = getattr(vision, "depth", None) or getattr(vision, "num_hidden_layers", None)
    width = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", None)
    return depth * width / (text.num_hidden_layers * text.hidden_size) if depth and width else 1.0


def split_features(
    output: Any, rendered: Sequence[Rendered], placeholders: Sequence[int], of_videos: Sequence[int] = ()
) -> list[ImageFeatures]:
    """Split the model's output for the images and videos of several prompts and observations.

    `of_videos` says how many of the placeholder tokens of each are of videos, by default none. Raises ModelError,
    naming both counts, if one does not have a feature per placeholder token.
    """
    of_videos = of_videos or [0] * len(rendered)
    pooled, deeper, targets = _features_by_layer(output)
    layers = [_joined(layer) for layer in deeper]
    embeddings = _joined(pooled)
    check_counts(pooled, rendered, placeholders, of_videos)
    if embeddings.ndim == 3 and len(embeddings) == 1 < len(rendered):  # no tiles, but all images in one row (Hunyuan)
        embeddings = embeddings[0]
    tile = embeddings.shape[1] if embeddings.ndim == 3 else 1
    for each, num in zip(rendered, placeholders, strict=True):
        if num % tile:
            raise ModelError(
                f"The tokens of {each.name} have {num} image placeholders, which is "
                f"no multiple of the {tile} features per tile."
            )
    parts = embeddings.split([num // tile for num in placeholders])
    deepstack = (
        zip(*(layer.split(list(placeholders)) for layer in layers), strict=True) if layers else [()] * len(parts)
    )
    lists = not isinstance(pooled, Tensor), bool(layers) and not isinstance(deeper[0], Tensor)
    indicators = getattr(output, "visual_indicator_features", None)
    of_images = [
        (num - videos) // tile if videos else None for num, videos in zip(placeholders, of_videos, strict=True)
    ]
    return [
        ImageFeatures(part, tuple(deep), indicators, lists, targets, num)
        for part, deep, num in zip(parts, deepstack, of_images, strict=True)
    ]


def _features_by_layer(output: Any) -> tuple[Any, Sequence[Any], tuple[int, ...]]:
    """Return features for embeddings, features for deeper layers, and the layers of both, if the model names them."""
    deepstack = list(getattr(output, "deepstack_features", None) or ())
    if not deepstack or isinstance(deepstack[0], Tensor) or isinstance(deepstack[0][0], Tensor):
        pooled = output.pooler_output
        return output.last_hidden_state if pooled is None else pooled, deepstack, ()  # Llama 4's forward projects them
    targets, features = zip(*deepstack, strict=True)
    return features[0], features[1:], targets


def check_counts(
    embeddings: Tensor | Sequence[Tensor],
    rendered: Sequence[Rendered],
    placeholders: Sequence[int],
    of_videos: Sequence[int],
) -> None:
    """Raise ModelError if features and placeholders differ in number, for each owner if features are per image."""
    owners = [each.name for each in rendered]
    if not isinstance(embeddings, Tensor) and (len(rendered) > 1 or any(of_videos)):
        items = iter(embeddings)
        counts = []
        for each, num, num_video in zip(rendered, placeholders, of_videos, strict=True):
            for kind, expected, number in zip(
                ("image", "video"), (num - num_video, num_video), num_items(each), strict=True
            ):
                counts.append((each.name, kind, expected, sum(map(_num_rows, islice(items, number)))))
    else:
        owner = owners[0] if len(rendered) == 1 else "all prompts"
        counts = [(owner, "image", sum(placeholders), sum(_num_rows(e) for e in embeddings))]
    for owner, kind, num, num_features in counts:
        if num != num_features:
            raise ModelError(
                f"The tokens of {owner} have {num} {kind} placeholders, but the {kind}s became {num_features} "
                "features. Pairing them anyway would show the model other pixels than the row's."
            )


def num_items(rendered: Rendered) -> tuple[int, int]:
    """Return the numbers of items in the tower's output, for images and for videos: images, crops of images, or
    frames."""
    inputs = rendered.mm_inputs
    if "target_sizes_videos" in inputs:
        return len(inputs.get("target_sizes", ())), len(inputs["target_sizes_videos"])
    if "video_position_ids" in inputs:
        return rendered.num_images, len(inputs["video_position_ids"])
    grids = inputs.get("video_grid_thw")
    if grids is None:
        return rendered.num_images, len(inputs.get("pixel_values_videos", ()))
    return rendered.num_images, len(grids) if has_clips(inputs["pixel_values_videos"]) else int(grids[:, 0].sum())


def _joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(list(parts))


def _num_rows(tensor: Tensor) -> int:
    return tensor.numel() // tensor.shape[-1] if tensor.ndim > 1 else 1


def joined_embeddings(features: Sequence[ImageFeatures]) -> Float[Tensor, "*tiles tokens hidden"]:
    """Concatenate the embeddings of several prompts, by tiles if all have tiles of equally many tokens."""
    parts = [f.embeddings for f in features]
    return torch.cat(parts if len({part.shape[1:] for part in parts}) == 1 else [part.flatten(0, -2) for part in parts])


def joined_output(embeddings: Tensor, features: Sequence[ImageFeatures], is_stacked: bool = False) -> Any:
    """Join the features of several prompts into the form of the model's own output.

    With `is_stacked`, the output is a batch of one in place of a list.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    embeddings_list, deepstack_list = features[0].lists
    deepstack = [torch.cat(layers) for layers in zip(*(f.deepstack for f in features), strict=True)]
    output: Any = BaseModelOutputWithPooling()
    output.pooler_output = embeddings[None] if is_stacked else [embeddings] if embeddings_list else embeddings
    output.last_hidden_state = embeddings
    output.deepstack_features = [[layer] for layer in deepstack] if deepstack_list else deepstack
    output.visual_indicator_features = features[0].indicators
    if features[0].layers:
        output.deepstack_features = list(zip(features[0].layers, (embeddings, *deepstack), strict=True))
    return output


def cross_attention_features(model: PreTrainedModel, inputs: dict[str, Tensor]) -> ImageFeatures:
    """Compute the input of layers that cross-attend to images: (tiles, patches per tile, hidden)."""
    inner: Any = model.base_model
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    hidden = inner.vision_model(**{name: inputs[name] for name in names}).last_hidden_state
    states = inner.multi_modal_projector(hidden)
    return ImageFeatures(states.reshape(-1, *states.shape[-2:]), (), None, (False, False))
