from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, SiglipImageProcessor

from rl_vlm.config.schema import DataConfig, DataSource, ModelConfig
from rl_vlm.data.prompts import LongPromptError, PromptBuilder, build_prompt, check_limits, load_processor
from rl_vlm.data.samples import Part, Rows
from rl_vlm.data.tables import ListRows
from rl_vlm.errors import ConfigError, DataError, ModelError
from rl_vlm.types import Sample
from tests.tiny.build import build_tiny

IMAGE = {"type": "image"}


def text(content: str) -> dict:
    return {"type": "text", "text": content}


def picture(width: int, height: int, color: int = 0) -> Image.Image:
    return Image.new("RGB", (width, height), (color, 0, 0))


def make_sample(*images: Image.Image, content: list[dict] | None = None, sample_id: str = "s") -> Sample:
    content = [IMAGE] * len(images) + [text("Which digit?")] if content is None else content
    messages = [{"role": "user", "content": content}]
    return Sample(sample_id, messages, list(images), columns={}, prompt=messages)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def processor(checkpoint: str) -> Any:
    return load_processor(checkpoint, ModelConfig(model_name_or_path=checkpoint), DataConfig())


@pytest.fixture
def builder(processor: Any) -> PromptBuilder:
    return PromptBuilder(processor, DataConfig())


def num_image_tokens(builder: PromptBuilder, token_ids: torch.Tensor) -> int:
    return int((token_ids == builder.processor.image_token_id).sum())


def test_a_prompt_with_one_image(builder: PromptBuilder):
    sample = make_sample(picture(16, 8))
    prompt = builder.build(sample)
    assert prompt.sample is sample
    assert builder.processor.tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>Which digit?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.mm_inputs["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert prompt.mm_inputs["pixel_values"].shape == (8, 96)
    assert set(prompt.mm_inputs) == {"image_grid_thw", "pixel_values"}
    is_image = prompt.token_ids == builder.processor.image_token_id
    assert {name: value.tolist() for name, value in prompt.token_inputs.items()} == {
        "mm_token_type_ids": is_image.int().tolist()
    }


def test_a_text_prompt_has_no_image_inputs(builder: PromptBuilder):
    prompt = builder.build(make_sample())
    assert prompt.mm_inputs == {}
    assert prompt.token_inputs["mm_token_type_ids"].tolist() == [0] * len(prompt.token_ids)


def test_each_image_is_resized_on_its_own(builder: PromptBuilder):
    small, large = picture(8, 8, color=50), picture(48, 32, color=200)
    both = builder.build(make_sample(small, large))
    alone = [builder.build(make_sample(image)) for image in (small, large)]
    assert both.mm_inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 8, 12]]
    assert both.image_sizes == [(8, 8), (48, 32)]  # width and height, in patches of 4 × 4 pixels
    pixels = [prompt.mm_inputs["pixel_values"] for prompt in alone]
    assert torch.equal(both.mm_inputs["pixel_values"], torch.cat(pixels))


def test_images_stay_where_their_blocks_are(builder: PromptBuilder):
    content = [text("First "), IMAGE, text(" then "), IMAGE]
    prompt = builder.build(make_sample(picture(8, 8), picture(16, 8), content=content))
    assert builder.processor.tokenizer.decode(prompt.token_ids).startswith(
        "<|im_start|>user\nFirst <|vision_start|><|image_pad|><|vision_end|>"
        " then <|vision_start|><|image_pad|><|image_pad|><|vision_end|><|im_end|>"
    )


def test_the_sample_is_left_as_it_was(builder: PromptBuilder):
    sample = make_sample(picture(8, 8))
    builder.build(sample)
    assert sample.messages == [{"role": "user", "content": [{"type": "image"}, text("Which digit?")]}]


def test_a_final_assistant_turn_is_continued(builder: PromptBuilder):
    sample = make_sample()
    sample.messages.append({"role": "assistant", "content": [text("It is")]})
    decoded = builder.processor.tokenizer.decode(builder.build(sample).token_ids)
    assert decoded.endswith("<|im_end|>\n<|im_start|>assistant\nIt is")


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>"])
@pytest.mark.parametrize("images", [[], [picture(8, 8)]])
def test_placeholder_tokens_in_the_text_are_refused(builder: PromptBuilder, token: str, images: list):
    content = [IMAGE] * len(images) + [text(f"What is {token}?")]
    with pytest.raises(DataError, match=r"Sample s: the text holds <.[a-z]+_pad"):
        builder.build(make_sample(*images, content=content))


def test_an_image_that_the_processor_refuses_names_the_sample(builder: PromptBuilder):
    with pytest.raises(DataError, match=r"Sample thin: .*aspect ratio"):
        builder.build(make_sample(picture(2010, 10), sample_id="thin"))


def with_template(checkpoint: str, template: str | None, **settings: Any) -> PromptBuilder:
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.chat_template = template
    return PromptBuilder(processor, DataConfig(**settings))


def test_a_template_that_leaves_images_out_is_refused(checkpoint: str):
    builder = with_template(checkpoint, "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}")
    with pytest.raises(DataError, match="1 images became 0 image tokens"):
        builder.build(make_sample(picture(8, 8)))


def test_a_template_that_refuses_a_message_names_the_sample(checkpoint: str):
    builder = with_template(checkpoint, "{{ raise_exception('no system message, please') }}")
    with pytest.raises(DataError, match=r"Sample s: .*no system message, please"):
        builder.build(make_sample())


def test_without_a_template_the_prompt_is_the_plain_text(checkpoint: str):
    builder = with_template(checkpoint, None)
    sample = make_sample(picture(16, 8))
    sample.messages.insert(0, {"role": "system", "content": [text("Be brief.")]})
    prompt = builder.build(sample)
    assert builder.processor.tokenizer.decode(prompt.token_ids) == "Be brief.\n<|image_pad|><|image_pad|>Which digit?"
    assert prompt.mm_inputs["image_grid_thw"].tolist() == [[1, 2, 4]]


def test_chat_template_arguments_reach_the_template_or_are_refused(checkpoint: str):
    template = "{{ messages[0].content[0].text }}{% if enable_thinking %}<think>{% endif %}"
    builder = with_template(checkpoint, template, chat_template_kwargs={"enable_thinking": True})
    assert builder.processor.tokenizer.decode(builder.build(make_sample()).token_ids) == "Which digit?<think>"
    with pytest.raises(ConfigError, match="enable_thinkin"):
        with_template(checkpoint, "{{ messages }}", chat_template_kwargs={"enable_thinkin": True})


def image_tokens_of(checkpoint: str, image: Image.Image, **limits: Any) -> int:
    processor = load_processor(checkpoint, ModelConfig(model_name_or_path=checkpoint), DataConfig(**limits))
    builder = PromptBuilder(processor, DataConfig())
    return num_image_tokens(builder, builder.build(make_sample(image)).token_ids)


def test_pixel_limits_set_the_number_of_image_tokens(checkpoint: str):
    assert image_tokens_of(checkpoint, picture(64, 64)) == 64
    assert image_tokens_of(checkpoint, picture(64, 64), max_pixels=32 * 32) == 16
    assert image_tokens_of(checkpoint, picture(8, 8), min_pixels=32 * 32) == 16


def test_pixel_limits_that_cross_are_refused(checkpoint: str):
    with pytest.raises(ConfigError, match="min_pixels = 8192 is more than max_pixels = 4096"):
        image_tokens_of(checkpoint, picture(8, 8), min_pixels=8192)


def test_pixel_limits_are_refused_where_they_have_no_effect():
    with pytest.raises(ConfigError, match=r"data.max_pixels has no effect on .* SiglipImageProcessor"):
        check_limits(SiglipImageProcessor(), {"max_pixels": 4096})


def test_pixel_limits_are_saved_with_the_processor_and_not_with_the_tokenizer(checkpoint: str, tmp_path: Path):
    limited = load_processor(checkpoint, ModelConfig(model_name_or_path=checkpoint), DataConfig(max_pixels=32 * 32))
    limited.save_pretrained(tmp_path)
    assert image_tokens_of(str(tmp_path), picture(64, 64)) == 16
    assert "pixels" not in (tmp_path / "tokenizer_config.json").read_text()


def test_a_checkpoint_without_an_image_processor_is_refused(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ModelError, match="No processor can be loaded"):
        load_processor(str(tmp_path), ModelConfig(model_name_or_path="x"), DataConfig())
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *args, **kwargs: tokenizer)
    with pytest.raises(ModelError, match="no image processor, only a Qwen2Tokenizer"):
        load_processor(checkpoint, ModelConfig(model_name_or_path="x"), DataConfig())


def rows_of(row: dict[str, Any]) -> Rows:
    table = ListRows([row])
    return Rows("rows", table, ["seven"], [Part(DataSource(name="rows"), table, Path())], DataConfig())


def test_a_prompt_that_is_too_long_for_the_model_is_refused_with_its_row(processor: Any):
    num_tokens = len(PromptBuilder(processor, DataConfig()).build(make_sample(picture(16, 8))).token_ids)
    row = {"prompt": "Which digit?", "image": picture(16, 8), "id": "seven"}
    rows = rows_of(row)
    fitting = PromptBuilder(processor, DataConfig(), max_tokens=num_tokens)
    assert len(build_prompt(rows, 0, fitting).token_ids) == num_tokens
    short = PromptBuilder(processor, DataConfig(), max_tokens=num_tokens - 1)
    with pytest.raises(
        LongPromptError, match=rf"rows, row 0: Sample seven: its prompt has {num_tokens} tokens"
    ) as error:
        build_prompt(rows, 0, short)
    assert error.value.num_tokens == num_tokens
    with pytest.raises(DataError, match=r"rows, row 0: Sample seven: the text holds <.image_pad.>"):
        build_prompt(rows_of(row | {"prompt": "<|image_pad|>"}), 0, short)
