"""Features of images and videos with one call of tower and projector, for models that call them more often.

Ranks that shard weights must call them equally often, and have different numbers of images. Some models call the tower
once for images and once for videos. Others call the projector, or a part of it, once per image. These projectors join
blocks of neighbouring patches. So the blocks of all images can stand in one column, which is one image:

    [a b]  [e f]          [a]
    [c d]  [g h]    ─►    [b]  …  [h]        each letter a block
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def lfm2_features(model: Any, pixel_values: Tensor, spatial_shapes: Tensor, pixel_attention_mask: Tensor) -> Any:
    """Return the output of LFM2-VL's `get_image_features`."""
    hidden = model.vision_tower(
        pixel_values=pixel_values, spatial_shapes=spatial_shapes, pixel_attention_mask=pixel_attention_mask
    ).last_hidden_state
    projector, sizes = model.multi_modal_projector, spatial_shapes.tolist()
    block = (projector.factor, projector.factor)
    images = [image[: height * width] for image, (height, width) in zip(hidden, sizes, strict=True)]
    features = projector(column_of_blocks(images, sizes, block)[None])
    return with_parts(hidden, features.flatten(0, 2), sizes, block)


def minicpm_features(model: Any, pixel_values: Tensor, target_sizes: Tensor) -> Any:
    """Return the output of MiniCPM-V's `get_image_features`."""
    tower, merger, halves = model.vision_tower, model.merger, model.config.downsample_mode != "4x"
    hidden = tower(pixel_values.to(tower.dtype), target_sizes=target_sizes, use_vit_merger=halves).last_hidden_state
    sizes = (target_sizes // 2 if halves else target_sizes).tolist()
    height, width = (side**merger.merger_times for side in merger.merge_kernel_size)
    column = column_of_blocks(hidden[0].split([h * w for h, w in sizes]), sizes, (height, width))
    (features,) = merger(column.flatten(0, 1)[None], target_sizes.new_tensor([[len(column), width]]))
    return with_parts(hidden, features, sizes, (height, width))


def paddleocr_features(model: Any, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
    """Return the output of PaddleOCR-VL's `get_image_features`."""
    patches = pixel_values.to(model.visual.dtype)[None]
    hidden = model.visual(pixel_values=patches, grid_thw=image_grid_thw).last_hidden_state
    block, sizes = model.projector.merge_kernel_size, [(t * h, w) for t, h, w in image_grid_thw.tolist()]
    column = column_of_blocks(hidden.split([h * w for h, w in sizes]), sizes, block)
    features = model.projector(column.flatten(0, 1), image_grid_thw.new_tensor([[1, *column.shape[:2]]]))
    return with_parts(hidden, features, sizes, block)


def kimi_features(model: Any, pixel_values: Tensor, image_grid_thw: Tensor) -> Any:
    """Return the output of Kimi's `get_image_features`, for grids of one frame and of several, which become one.

    Its own needs as many frames in all grids, and one.
    """
    tower, grids = model.vision_tower, image_grid_thw.tolist()
    no_pooling = image_grid_thw.new_zeros(1, 1)
    hidden = tower(pixel_values, grid_thw=image_grid_thw, temporal_merge_index=no_pooling).last_hidden_state
    clips = hidden.split([frames * height * width for frames, height, width in grids])
    pooled = [clip.unflatten(0, (grid[0], -1)).mean(0) for clip, grid in zip(clips, grids, strict=True)]
    sizes, block = [grid[1:] for grid in grids], tuple(tower.merge_kernel_size)
    column = column_of_blocks(pooled, sizes, block)
    features = model.mm_projector(column.unflatten(0, (-1, block[0])).flatten(1, 2))[:, 0]
    return with_parts(hidden, features, sizes, block)


def perception_features(
    model: Any, pixel_values: Tensor | None = None, pixel_values_videos: Tensor | None = None
) -> Any:
    """Return the output of PerceptionLM's `get_image_features` for tiles of images and frames of videos."""
    found = [each.flatten(0, 1) for each in (pixel_values, pixel_values_videos) if each is not None]
    return model.get_image_features(torch.cat(found)[None], return_dict=True)


def onevision_features(
    model: Any,
    pixel_values: Tensor | None = None,
    image_sizes: Tensor | None = None,
    batch_num_images: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
) -> Any:
    """Return the outputs of LLaVA-OneVision's `get_image_features` and `get_video_features`, one after the other.

    A prompt's only image has tiles.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling
    from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

    config, images, videos = model.config, [], list(() if pixel_values_videos is None else pixel_values_videos)
    if pixel_values is not None and image_sizes is not None and batch_num_images is not None:
        grids, side = config.image_grid_pinpoints, config.vision_config.image_size
        is_alone = [number == 1 for number in batch_num_images.tolist() for _ in range(number)]
        pairs = zip(image_sizes.tolist(), is_alone, strict=True)
        counts = [image_size_to_num_patches(size, grids, side) if alone else 1 for size, alone in pairs]
        images = [tiles[:count] for tiles, count in zip(pixel_values, counts, strict=True)]
    hidden = model.vision_tower(torch.cat([*images, *videos]), output_hidden_states=True).hidden_states
    layers = config.vision_feature_layer
    hidden = hidden[layers] if isinstance(layers, int) else torch.cat([hidden[layer] for layer in layers], dim=-1)
    hidden = hidden[:, 1:] if config.vision_feature_select_strategy == "default" else hidden
    features = model.multi_modal_projector(hidden).split([len(each) for each in (*images, *videos)])
    newline, packed = model.image_newline, []
    if images:
        packed, _ = model.pack_image_features(
            features[: len(images)], image_sizes, newline, vision_aspect_ratio=config.vision_aspect_ratio
        )
    pooled = [torch.cat([model.apply_pooling(each).flatten(0, 1), newline[None]]) for each in features[len(images) :]]
    output: Any = BaseModelOutputWithPooling()
    output.last_hidden_state, output.pooler_output = hidden, [*packed, *pooled]
    return output


def column_of_blocks(
    images: Sequence[Float[Tensor, "_ channels"]], sizes: Sequence[Sequence[int]], block: tuple[int, int]
) -> Float[Tensor, "rows block_width channels"]:
    """Put the blocks of all images below each other. `sizes` has the height and width of each image in patches."""
    height, width = block
    blocks = [
        image.view(rows // height, height, columns // width, width, -1).transpose(1, 2).flatten(0, 2)
        for image, (rows, columns) in zip(images, sizes, strict=True)
    ]
    return torch.cat(blocks)


def with_parts(
    hidden: Tensor, features: Float[Tensor, "blocks channels"], sizes: Sequence[Sequence[int]], block: tuple[int, int]
) -> Any:
    """Return the output of the tower and a tensor of features for each image."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    counts = [rows * columns // (block[0] * block[1]) for rows, columns in sizes]
    output: Any = BaseModelOutputWithPooling()
    output.last_hidden_state, output.pooler_output = hidden, list(features.split(counts))
    return output
