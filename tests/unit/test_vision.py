from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from rl_vlm.errors import ModelError
from rl_vlm.model.families import Family
from rl_vlm.model.vision import LinearPatches, VisionEncoder, patch_cost, use_linear_patches
from rl_vlm.types import Prompt, Sample

IMAGE = 9


def make_prompt(name: str, tokens_by_image: list[int]) -> Prompt:
    """A prompt with a placeholder per image token; each image's pixels are its number of tokens."""
    token_ids = torch.tensor([1] + [IMAGE] * sum(tokens_by_image) + [2])
    mm_inputs = {"pixel_values": torch.tensor(tokens_by_image).float()[:, None]} if tokens_by_image else {}
    return Prompt(Sample(name, [], cast(Any, [None] * len(tokens_by_image)), {}, ""), token_ids, {}, mm_inputs)


class Tower(nn.Module):
    """A model that makes as many features of an image as its pixel says, each of that value times a weight."""

    def __init__(self, as_list: bool, extra: int = 0) -> None:
        super().__init__()
        self.visual = nn.Linear(1, 1, bias=False)
        self.as_list, self.extra, self.calls = as_list, extra, 0
        self.config = SimpleNamespace(image_token_id=IMAGE, vision_config=SimpleNamespace(patch_size=1))
        self.device = torch.device("cpu")
        setattr(self.visual, "gradient_checkpointing", False)  # noqa: B010

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_image_features(self, pixel_values: torch.Tensor, return_dict: bool) -> Any:
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
    encoder.model.visual.gradient_checkpointing = checkpointing
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


def test_calls_of_micro_batches_are_known_before():
    a, b, text = make_prompt("a", [1]), make_prompt("b", [1]), make_prompt("text", [])
    batches = [[a, text], [a, b], [text]]
    assert make_encoder(frozen=True).count_calls(batches) == [1, 1, 0]
    assert make_encoder(frozen=False).count_calls(batches) == [1, 1, 0]
    assert make_encoder(frozen=True).count_calls([[a], [a]]) == [1, 0]
    assert make_encoder(joins_images=False).count_calls(batches) == [1, 2, 0]


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
    with pytest.raises(ModelError, match="tokens of sample a have 2 image placeholders and the images became 3"):
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
