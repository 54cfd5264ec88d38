from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from zlib import crc32

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rl_vlm.errors import ModelError
from rl_vlm.model.family import Family
from rl_vlm.model.features import ImageFeatures, KeptFeatures
from rl_vlm.model.vision import (
    LinearPatches,
    VisionEncoder,
    joined_embeddings,
    joined_output,
    num_items,
    num_patches,
    num_pixels,
    patch_cost,
    split_features,
    tower_inputs,
    use_linear_patches,
)
from rl_vlm.types import Completion, Group, MicroBatch, Prompt, Sample, ScoredGroup, SubGroup

IMAGE = 9


def make_prompt(name: str, tokens_by_image: list[int]) -> Prompt:
    """A prompt with a placeholder per image token; each image's pixels are its number of tokens, and the name's id."""
    token_ids = torch.tensor([1] + [IMAGE] * sum(tokens_by_image) + [2])
    pixels = torch.tensor(tokens_by_image).float()[:, None]
    ids = torch.full((len(tokens_by_image),), crc32(name.encode()))
    mm_inputs = {"pixel_values": pixels, "image_ids": ids} if tokens_by_image else {}
    return Prompt(Sample(name, [], cast(Any, [None] * len(tokens_by_image)), {}, ""), token_ids, {}, mm_inputs)


class Layer(GradientCheckpointingLayer):
    """A weight, in a layer that can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels @ self.weight


class Tower(nn.Module):
    """A model that makes as many features of an image as its pixel says, each of that value times a weight."""

    def __init__(self, as_list: bool, extra: int = 0) -> None:
        super().__init__()
        self.visual = Layer()
        self.as_list, self.extra, self.calls = as_list, extra, 0
        self.config = SimpleNamespace(image_token_id=IMAGE, vision_config=SimpleNamespace(patch_size=1))
        self.device = torch.device("cpu")

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_image_features(self, pixel_values: torch.Tensor, image_ids: torch.Tensor, return_dict: bool) -> Any:
        self.calls += 1
        images = [self.visual(pixels.expand(int(pixels) + self.extra, 1)) for pixels in pixel_values]
        return SimpleNamespace(pooler_output=images if self.as_list else torch.cat(images))


def make_encoder(as_list: bool = True, joins_images: bool = True, frozen: bool = False, extra: int = 0) -> Any:
    tower = Tower(as_list, extra).requires_grad_(not frozen)
    return VisionEncoder(cast(Any, tower), Family("tower", ("visual",), joins_images=joins_images))


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("joins_images", [True, False])
def test_each_prompt_gets_the_features_of_its_own_images(as_list, joins_images):
    encoder = make_encoder(as_list, joins_images)
    one, text, two = make_prompt("one", [3]), make_prompt("text", []), make_prompt("two", [2, 4])
    features = encoder.encode([one, text, two, one])
    weight = encoder.model.visual.weight.item()
    assert features.keys() == {one, two}
    assert features[one].embeddings.flatten().tolist() == pytest.approx([3 * weight] * 3)
    assert features[two].embeddings.flatten().tolist() == pytest.approx([2 * weight] * 2 + [4 * weight] * 4)
    assert encoder.model.calls == encoder.counters["vision_forwards"] == (1 if joins_images else 2)


def test_inputs_of_the_same_shapes_share_a_run_once_a_proof_says_so():
    one, two, wide = make_prompt("one", [3]), make_prompt("two", [2, 4]), make_prompt("wide", [2])
    wide = replace(wide, mm_inputs=wide.mm_inputs | {"pixel_values": torch.ones(1, 2)})
    encoder = VisionEncoder(cast(Any, Tower(as_list=False)), Family("tower", ("visual",), is_derived=True))
    assert encoder.calls([one, two, wide]) == [[one], [two], [wide]]
    encoder.join_images(True)
    assert encoder.calls([one, wide, two]) == [[one, two], [wide]]
    encoder.join_images(False)
    assert encoder.calls([one, two, wide]) == [[one], [two], [wide]]


@pytest.mark.parametrize("as_lists", [True, False])
def test_each_language_layer_gets_the_deepstack_features_of_its_number(as_lists):
    one, two = make_prompt("one", [1]), make_prompt("two", [2])
    layers = [torch.tensor([10.0, 11, 12])[:, None] + 10 * i for i in range(3)]  # the first row is that of `one`
    images = [layer.split([1, 2]) if as_lists else layer for layer in layers]
    output = SimpleNamespace(pooler_output=torch.tensor([[0.0], [1], [2]]), deepstack_features=images)
    features = dict(zip((one, two), split_features(output, [one, two], [1, 2]), strict=True))
    values = {p.sample.sample_id: [layer.flatten().tolist() for layer in f.deepstack] for p, f in features.items()}
    assert values == {"one": [[10], [20], [30]], "two": [[11, 12], [21, 22], [31, 32]]}

    doubled = features[two].map(lambda tensor: 2 * tensor)
    joined = joined_output(torch.zeros(3, 1), [doubled, features[one]]).deepstack_features
    found = [torch.cat(list(layer)) if as_lists else layer for layer in joined]
    assert [layer.flatten().tolist() for layer in found] == [[22, 24, 10], [42, 44, 20], [62, 64, 30]]


def test_a_model_can_name_the_layers_of_all_features():
    one, two = make_prompt("one", [1]), make_prompt("two", [2])
    layers = [torch.tensor([10.0, 11, 12])[:, None] + 10 * i for i in range(3)]  # the first row is that of `one`
    output = SimpleNamespace(deepstack_features=[(5 + i, layer.split([1, 2])) for i, layer in enumerate(layers)])
    features = split_features(output, [one, two], [1, 2])
    assert [f.embeddings.flatten().tolist() for f in features] == [[10], [11, 12]]
    joined = joined_output(joined_embeddings(features[::-1]), features[::-1]).deepstack_features
    values = [(layer, torch.cat(list(some)).flatten().tolist()) for layer, some in joined]
    assert values == [(5, [11, 12, 10]), (6, [21, 22, 20]), (7, [31, 32, 30])]


def test_all_images_can_be_in_one_row_of_a_batch():
    one, two = make_prompt("one", [1]), make_prompt("two", [2])
    output = SimpleNamespace(pooler_output=torch.tensor([[[10.0], [11], [12]]]))
    first, second = split_features(output, [one, two], [1, 2])
    (alone,) = split_features(SimpleNamespace(pooler_output=torch.tensor([[[20.0], [21]]])), [two], [2])
    assert joined_embeddings([second, alone, first]).flatten().tolist() == [11, 12, 20, 21, 10]


def test_a_frozen_tower_sees_an_image_once_and_a_trained_one_every_time():
    prompts = [make_prompt("a", [2]), make_prompt("b", [3])]
    for frozen, calls, requires_grad in ((True, 1, False), (False, 2, True)):
        encoder = make_encoder(frozen=frozen)
        for _ in range(2):
            features = encoder.encode(prompts)
        assert encoder.model.calls == calls
        assert features[prompts[0]].embeddings.requires_grad == requires_grad


@pytest.mark.parametrize(("frozen", "checkpointing", "count"), [(False, True, 1), (False, False, 0), (True, True, 0)])
def test_what_checkpointing_computes_again_is_counted_apart(frozen, checkpointing, count):
    encoder = make_encoder(frozen=frozen)
    encoder.model.visual.eval().gradient_checkpointing = checkpointing  # counted without computing it again
    encoder.encode([make_prompt("a", [2])])
    with torch.no_grad():
        encoder.encode([make_prompt("b", [2])])
    assert encoder.counters["vision_recomputations"] == count
    assert encoder.counters["vision_forwards"] == 2


def test_features_go_with_their_prompt():
    encoder = make_encoder(frozen=True)
    prompt = make_prompt("a", [2])
    encoder.encode([prompt])
    assert len(encoder.features) == 1
    del prompt
    assert len(encoder.features) == 0


@pytest.mark.parametrize("frozen", [True, False])
def test_equal_images_run_once_and_their_gradients_add_up(frozen):
    encoder = make_encoder(frozen=frozen)
    once, again, other = make_prompt("a", [2]), make_prompt("a", [2]), make_prompt("b", [2])
    features = encoder.encode([once, again, other])
    assert features[once] is features[again] is not features[other]
    assert encoder.model.calls == 1 and encoder.counters["vision_patches"] == 0
    assert [[each.sample.sample_id for each in call] for call in make_encoder().calls([again, other, once])] == [
        ["a", "b"]
    ]
    if not frozen:
        torch.cat([features[each].embeddings for each in (once, again)]).sum().backward()
        assert encoder.model.visual.weight.grad.item() == 2 * 2 * 2  # two uses of two features of value 2 · weight


def test_cached_features_stay_until_the_last_prompt_of_equal_images_goes():
    encoder = make_encoder(frozen=True)
    first, later = make_prompt("a", [2]), make_prompt("a", [2])
    encoder.encode([first])
    encoder.encode([later])
    assert (encoder.model.calls, len(encoder.features)) == (1, 1)
    del first
    encoder.encode([later])
    assert (encoder.model.calls, len(encoder.features)) == (1, 1)
    del later
    assert len(encoder.features) == 0


def test_kept_features_serve_all_prompts_of_equal_images():
    encoder, once, again = make_encoder(), make_prompt("a", [2]), make_prompt("a", [2])
    batch = make_batch([once, again], [once, again])
    encoder.keep(batch, num_runs=1)
    features = encoder.encode([once, again])
    (features[once].embeddings.sum() + 10 * features[again].embeddings.sum()).backward()
    encoder.kept_loss(again).backward()
    assert encoder.model.visual.weight.grad.item() == (1 + 10) * 2 * 2
    assert (encoder.model.calls, encoder.kept) == (2, {})


def make_batch(prompts: Sequence[Prompt], apart: Sequence[Prompt] = ()) -> MicroBatch:
    """A micro-batch with one completion of each prompt."""
    zeros, completion = torch.zeros(1), Completion(torch.tensor([1]), torch.zeros(1), "stop", "")
    scored = [
        ScoredGroup(Group("", p, [completion], 0), zeros[:, None], zeros, zeros, torch.tensor([True]), True)
        for p in prompts
    ]
    return MicroBatch([SubGroup(s, [0], s.group.prompt in apart) for s in scored], shared=True)


def test_kept_features_have_the_gradient_of_all_their_uses():
    encoder, prompt = make_encoder(), make_prompt("a", [2])
    encoder.idle_prompt = make_prompt("idle", [3])
    batch = make_batch([prompt], [prompt])
    encoder.keep(batch, num_runs=2)  # one of them idle
    for factor in (1.0, 10.0):
        encoder.keep(batch, num_runs=0)
        (factor * encoder.encode([prompt])[prompt].embeddings.sum()).backward()
    assert (encoder.model.calls, encoder.model.visual.weight.grad) == (2, None)
    for owner in (prompt, encoder.idle_prompt):
        encoder.kept_loss(owner).backward()
    assert encoder.model.visual.weight.grad.item() == (1 + 10) * 2 * 2  # two features of value 2 · weight
    assert (encoder.model.calls, encoder.kept) == (4, {})


def test_a_new_step_drops_kept_features():
    encoder, prompt = make_encoder(), make_prompt("a", [2])
    batch = make_batch([prompt], [prompt])
    encoder.keep(batch, num_runs=1)
    encoder.clear()
    assert encoder.kept == {}


def test_gradients_of_kept_features_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    kept = KeptFeatures(ImageFeatures(torch.ones(1, 1, dtype=torch.bfloat16), (), None, (False, False)))
    for factor in (256.0, 1.0, 1.0):
        used = kept.features().embeddings
        assert used.dtype == torch.bfloat16
        (factor * used).sum().backward()
    assert kept.leaves.embeddings.grad is not None
    assert kept.leaves.embeddings.grad.item() == 258


@pytest.mark.parametrize(("as_list", "owner"), [(True, "sample b"), (False, "all prompts")])
def test_more_features_than_placeholders_are_an_error_that_names_both_counts(as_list, owner):
    encoder = make_encoder(as_list)
    right, wrong = make_prompt("a", [2]), make_prompt("b", [3])
    wrong.mm_inputs["pixel_values"] += 1
    expected, found = ("3", "4") if as_list else ("5", "6")
    with pytest.raises(ModelError, match=f"tokens of {owner} have {expected} image placeholders.*became {found} feat"):
        encoder.encode([right, wrong])


def test_images_that_were_swapped_between_prompts_are_an_error():
    a, b = make_prompt("a", [2]), make_prompt("b", [3])
    a.mm_inputs["pixel_values"], b.mm_inputs["pixel_values"] = b.mm_inputs["pixel_values"], a.mm_inputs["pixel_values"]
    with pytest.raises(ModelError, match="tokens of sample a have 2 image placeholders, but the images became 3"):
        make_encoder().encode([a, b])


def test_idle_calls_change_nothing_and_have_a_gradient():
    encoder = make_encoder()
    encoder.idle_prompt = make_prompt("idle", [2])
    zero = encoder.idle(3)
    zero.backward()
    assert encoder.model.calls == 3
    assert zero.item() == 0
    assert encoder.model.visual.weight.grad.item() == 0


def test_a_patch_costs_its_share_of_depth_and_width():
    text = SimpleNamespace(num_hidden_layers=36, hidden_size=2048)
    vision = SimpleNamespace(depth=32, hidden_size=1280)
    config = SimpleNamespace(vision_config=vision, get_text_config=lambda: text)
    assert patch_cost(cast(Any, config)) == 32 * 1280 / (36 * 2048)
    assert patch_cost(cast(Any, SimpleNamespace(vision_config=SimpleNamespace(), get_text_config=lambda: text))) == 1


def test_patches_as_a_matrix_product_are_the_convolution():
    convolution = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    patches, images = torch.randn(5, 3, 2, 4, 4), torch.randn(2, 3, 4, 8, 8)
    expected, expected_images = convolution(patches), convolution(images)
    use_linear_patches(cast(Any, nn.Sequential(convolution)))
    assert type(convolution) is LinearPatches
    torch.testing.assert_close(convolution(patches), expected, rtol=1e-6, atol=1e-6)
    assert convolution(images).equal(expected_images)
    overlapping = nn.Conv3d(3, 8, kernel_size=4, stride=2)
    use_linear_patches(cast(Any, nn.Sequential(overlapping)))
    assert type(overlapping) is nn.Conv3d


def with_inputs(num_images: int = 1, **inputs: list) -> Prompt:
    sample = Sample("s", [], cast(Any, [None] * num_images), {}, "")
    return Prompt(sample, torch.zeros(1).long(), {}, {name: torch.tensor(value) for name, value in inputs.items()})


def joined(*prompts: Prompt) -> dict[str, list]:
    return {name: value.tolist() for name, value in tower_inputs(prompts, torch.device("cpu")).items()}


def test_each_temporal_patch_of_a_video_is_an_image_for_the_tower():
    both = with_inputs(
        pixel_values=[[1.0], [2]], image_grid_thw=[[1, 1, 2]],
        pixel_values_videos=[[3.0], [4], [5], [6]], video_grid_thw=[[2, 1, 1], [1, 2, 1]],
    )  # fmt: skip
    image = with_inputs(pixel_values=[[7.0]], image_grid_thw=[[1, 1, 1]])
    assert joined(both) == {
        "pixel_values": [[1], [2], [3], [4], [5], [6]],
        "image_grid_thw": [[1, 1, 2], [1, 1, 1], [1, 1, 1], [1, 2, 1]],
    }
    assert joined(image, both) == {
        "pixel_values": [[7], [1], [2], [3], [4], [5], [6]],
        "image_grid_thw": [[1, 1, 1], [1, 1, 2], [1, 1, 1], [1, 1, 1], [1, 2, 1]],
    }
    assert joined(image) == {"pixel_values": [[7]], "image_grid_thw": [[1, 1, 1]]}
    assert num_items(both) == (1, 3)


def test_a_clip_whose_frames_the_tower_joins_keeps_its_grid():
    """Patches of Kimi are small images, here of one pixel."""
    both = with_inputs(
        pixel_values=[[[[1.0]]]], image_grid_thw=[[1, 1, 1]],
        pixel_values_videos=[[[[2.0]]], [[[3]]], [[[4]]]], video_grid_thw=[[2, 1, 1], [1, 1, 1]],
    )  # fmt: skip
    assert joined(both) == {
        "pixel_values": [[[[1]]], [[[2]]], [[[3]]], [[[4]]]],
        "image_grid_thw": [[1, 1, 1], [2, 1, 1], [1, 1, 1]],
    }
    assert num_items(both) == (1, 2)


def test_inputs_that_cannot_be_joined_stay_apart():
    """The family's `image_features` takes both."""
    both = with_inputs(pixel_values=[[[1.0]]], pixel_values_videos=[[[2.0], [3]], [[4], [5]]])
    assert joined(both) == {"pixel_values": [[[1]]], "pixel_values_videos": [[[2], [3]], [[4], [5]]]}
    assert num_items(both) == (1, 2)


def test_a_strip_of_frames_follows_that_of_images():
    both = with_inputs(
        pixel_values=[[[1.0]]], target_sizes=[[1, 1]],
        pixel_values_videos=[[[2.0, 3, 4]]], target_sizes_videos=[[1, 1], [1, 2]],
    )  # fmt: skip
    assert joined(both) == {"pixel_values": [[[1, 2, 3, 4]]], "target_sizes": [[1, 1], [1, 1], [1, 2]]}
    assert num_items(both) == (1, 2)


def test_frames_with_fewer_patches_than_an_image_are_padded():
    both = with_inputs(
        pixel_values=[[[1.0], [2], [3]]], image_position_ids=[[[0, 0], [1, 0], [2, 0]]],
        pixel_values_videos=[[[4.0]], [[5]]], video_position_ids=[[[0, 0]], [[0, 0]]],
    )  # fmt: skip
    assert joined(both) == {
        "pixel_values": [[[1], [2], [3]], [[4], [0], [0]], [[5], [0], [0]]],
        "image_position_ids": [[[0, 0], [1, 0], [2, 0]], *[[[0, 0], [-1, -1], [-1, -1]]] * 2],
    }
    assert num_items(both) == (1, 2)


def rows_of(images: int = 0, frames: int = 0) -> Prompt:
    """Images of 10 patches and frames of 4, of 3 values each (Gemma 4)."""
    found = {}
    if images:
        found |= {"pixel_values": torch.zeros(images, 10, 3), "image_position_ids": torch.zeros(images, 10, 2)}
    if frames:
        found |= {"pixel_values_videos": torch.zeros(frames, 4, 3), "video_position_ids": torch.zeros(frames, 4, 2)}
    return Prompt(Sample("s", [], [], {}, ""), torch.zeros(1, dtype=torch.int64), {}, found)


def test_rows_of_unlike_lengths_are_in_runs_of_their_own_and_padding_counts():
    config = cast(Any, SimpleNamespace(vision_config=SimpleNamespace()))
    image, clip, both, other = rows_of(images=1), rows_of(frames=3), rows_of(1, 2), rows_of(frames=1)
    for index, each in enumerate((image, clip, both, other)):
        each.mm_inputs["number"] = torch.tensor(index)  # other pixels
    assert [num_pixels(config, each) for each in (image, clip, both, other)] == [10, 12, 30, 4]
    assert make_encoder().calls([image, clip, both, other]) == [[image, both], [clip, other]]


def test_features_know_which_are_of_videos():
    features = ImageFeatures(torch.arange(5.0)[:, None], (torch.arange(5.0)[:, None] + 10,), None, (True, True), (), 2)
    images, videos = features.of_images, features.of_videos
    assert images is not None and videos is not None
    assert [t.flatten().tolist() for t in images.tensors()] == [[0, 1], [10, 11]]
    assert [t.flatten().tolist() for t in videos.tensors()] == [[2, 3, 4], [12, 13, 14]]
    placed = features.placed(torch.tensor([True, False, True, False, True]))
    assert [t.flatten().tolist() for t in placed.tensors()] == [[2, 0, 3, 1, 4], [12, 10, 13, 11, 14]]
    assert placed.of_images is placed and placed.of_videos is None
    assert replace(features, num_image_tokens=0).of_images is None


def test_tiles_of_images_come_before_those_of_videos():
    tiles = torch.arange(6.0).view(3, 2, 1)
    output = SimpleNamespace(pooler_output=tiles)
    (found,) = split_features(output, [with_inputs()], [6], [4])
    images, videos = found.of_images, found.of_videos
    assert images is not None and videos is not None
    assert (images.embeddings.flatten().tolist(), videos.embeddings.flatten().tolist()) == ([0, 1], [2, 3, 4, 5])


@pytest.mark.parametrize(
    ("num_images", "expected"), [(1, [[0], [1, 2]]), (0, [[0, 1, 2]] * 2), (None, [[0, 1, 2]] * 2)]
)
def test_one_function_can_give_features_of_images_and_then_of_videos(num_images, expected):
    encoder = make_encoder()
    encoder.family = replace(encoder.family, getters=("get_image_features", "get_image_features"))
    given = ImageFeatures(torch.arange(3.0)[:, None], (), None, (False, False), (), num_images)
    with encoder.given([given]) as arguments:
        assert [each.flatten().tolist() for each in arguments.values()] == expected[: len(arguments)]
        for _ in range(2):  # forwards
            calls = [encoder.model.get_image_features(pixels) for pixels in expected]
            assert [call.pooler_output.flatten().tolist() for call in calls] == expected
    assert encoder.model.get_image_features.__func__ is Tower.get_image_features


def test_features_are_counted_for_images_and_for_videos():
    both = with_inputs(image_grid_thw=[[1, 1, 2]], pixel_values_videos=[[0.0], [0]], video_grid_thw=[[2, 1, 1]])
    items = [torch.zeros(2, 1), torch.zeros(1, 1), torch.zeros(1, 1)]
    output = SimpleNamespace(pooler_output=items)
    (found,) = split_features(output, [both], [4], [2])
    assert found.num_image_tokens == 2
    with pytest.raises(ModelError, match="sample s have 3 image placeholders, but the images became 2 features"):
        split_features(output, [both], [4], [1])
    with pytest.raises(ModelError, match="sample s have 3 video placeholders, but the videos became 2 features"):
        split_features(output, [both], [5], [3])


def test_pixels_of_all_towers_count():
    """Two inputs of images are for two towers, or have another name. The numbers of patches are no pixels."""
    config = SimpleNamespace(vision_config=SimpleNamespace())
    names = {"high_res_pixel_values": torch.zeros(1, 3, 4, 4), "pixel_values_images": torch.zeros(1, 3, 2, 2)}
    prompt = replace(make_prompt("a", []), mm_inputs=names | {"num_local_patches": torch.tensor([7])})
    assert num_pixels(cast(Any, config), prompt) == 4 * 4 + 2 * 2


def test_patches_of_a_model_without_a_config_of_its_tower_count():
    """Fuyu's patches are in the model's own config."""
    prompt = replace(make_prompt("a", []), mm_inputs={"pixel_values": torch.zeros(1, 3, 8, 8)})
    assert num_patches(cast(Any, SimpleNamespace(patch_size=4)), prompt) == 4
