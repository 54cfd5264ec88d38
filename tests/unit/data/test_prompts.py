import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, SiglipImageProcessor

from rl_vlm.config.schema import DataConfig, DataSource, ModelConfig
from rl_vlm.data.prompts import LongPromptError, PromptBuilder, build_prompt, check_limits, load_processor
from rl_vlm.data.samples import Part, Rows
from rl_vlm.data.tables import ListRows
from rl_vlm.errors import ConfigError, DataError, ModelError
from rl_vlm.tiny.family import chat_template
from rl_vlm.types import Sample, Video, VideoFormat
from tests.helpers.videos import noise_video
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


def test_any_error_of_a_processor_names_the_sample_but_one_about_memory(
    builder: PromptBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tiles = PromptBuilder(AutoProcessor.from_pretrained(build_tiny("lfm2_vl", tmp_path)), DataConfig())
    with pytest.raises(DataError, match=r"Sample thin: the model's processor refuses it: stack expects each tensor"):
        tiles.build(make_sample(picture(1540, 1), sample_id="thin"))

    def fail(sample: Sample) -> None:
        raise error

    monkeypatch.setattr(builder, "_features", fail)
    for error in (IndexError("no tile"), ZeroDivisionError("no height")):
        with pytest.raises(DataError, match=f"Sample s: .*{error}"):
            builder.build(make_sample())
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
    with pytest.raises(RuntimeError, match="can't allocate"):
        builder.build(make_sample())


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
        with_template(checkpoint, template, chat_template_kwargs={"enable_thinkin": True})


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


def clip(num_frames: int, fps: float = 2.0) -> Video:
    """A clip of a file with twelve times as many frames."""
    frames = np.full((num_frames, 8, 16, 3), 100, dtype=np.uint8)
    return Video(frames, tuple(range(0, 12 * num_frames, 12)), 12 * fps, 12 * num_frames, num_frames / fps)


def noise_clip(num_frames: int) -> Video:
    frames = np.random.default_rng(0).integers(0, 255, (num_frames, 8, 16, 3), dtype=np.uint8)
    return replace(clip(num_frames), frames=frames)


VIDEO = {"type": "video"}


def clip_sample(*videos: Video, content: list[dict], images: list[Image.Image] | None = None) -> Sample:
    messages = [{"role": "user", "content": content}]
    return Sample("s", messages, images or [], {}, messages, videos=list(videos))


@pytest.fixture(scope="module")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny("qwen3_vl", tmp_path_factory.mktemp("tiny")))


def test_the_frames_of_a_video_are_not_sampled_again(builder: PromptBuilder):
    prompt = builder.build(clip_sample(clip(5), clip(2, fps=0.5), content=[VIDEO, text("and"), VIDEO]))
    assert builder.processor.tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>user\n<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>and<|vision_start|>"
        "<|video_pad|><|video_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.mm_inputs["video_grid_thw"].tolist() == [[3, 2, 4], [1, 2, 4]]  # the fifth frame is repeated
    assert prompt.mm_inputs["second_per_grid_ts"].tolist() == [1.0, 4.0]
    assert prompt.mm_inputs["pixel_values_videos"].shape == (32, 96)
    assert prompt.image_sizes == []


def test_frames_that_have_their_size_are_not_resized_again(builder: PromptBuilder):
    """The limits of the checkpoint's processor are 8² to 64² pixels. Those of the settings may be others."""
    large = Video(np.zeros((2, 64, 128, 3), np.uint8), (0, 15), 30.0, 300, 10.0)
    prompt = builder.build(clip_sample(large, content=[VIDEO, IMAGE], images=[Image.new("RGB", (128, 64))]))
    assert prompt.mm_inputs["video_grid_thw"].tolist() == [[1, 16, 32]]
    (image,) = prompt.image_sizes or []
    assert image[0] * image[1] <= 64**2  # images are resized


def test_the_text_of_a_video_has_its_times_in_the_file(qwen3_checkpoint: str):
    video = clip(3)
    found = with_template(qwen3_checkpoint, AutoProcessor.from_pretrained(qwen3_checkpoint).chat_template)
    prompt = found.build(clip_sample(video, content=[VIDEO, text("Where?")]))
    assert found.processor.tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>user\n<|vision_start|>"
        "<0.2 seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
        "<1.0 seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
        "<|vision_end|>Where?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert video.indices == (0, 12, 24)


def test_engines_that_expand_placeholders_get_one_per_video(builder: PromptBuilder):
    sample = clip_sample(clip(4), content=[IMAGE, VIDEO], images=[picture(16, 8)])
    decoded = builder.processor.tokenizer.decode(builder.unexpanded_ids(sample))
    assert decoded.count("<|video_pad|>") == decoded.count("<|image_pad|>") == 1


@pytest.mark.parametrize(("left_out", "message"), [
    ("video", r"Sample s: 2 videos became 0 tokens <.video_pad.>.* leaves videos out"),
    ("image", r"Sample s: 1 images became 0 tokens <.image_pad.>.* leaves images out"),
])  # fmt: skip
def test_a_template_that_leaves_one_kind_out_is_refused(checkpoint: str, left_out: str, message: str):
    template = str(AutoProcessor.from_pretrained(checkpoint).chat_template).replace(f"<|{left_out}_pad|>", "")
    sample = clip_sample(clip(4), clip(4), content=[VIDEO, IMAGE, VIDEO], images=[picture(16, 8)])
    with pytest.raises(DataError, match=message):
        with_template(checkpoint, template).build(sample)


def test_frames_can_be_images_of_the_prompt(processor: Any):
    builder = PromptBuilder(processor, DataConfig(), video_format="frames").adapted({})
    sample = clip_sample(clip(2), content=[VIDEO, text("Which?")])
    prompt = builder.build(sample)
    frame = "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>"
    shown = f"<|im_start|>user\n0.0 s: {frame}0.5 s: {frame}Which?<|im_end|>\n<|im_start|>assistant\n"
    assert processor.tokenizer.decode(prompt.token_ids) == shown
    assert set(prompt.mm_inputs) == {"pixel_values", "image_grid_thw"}
    assert (prompt.num_images, prompt.sample.videos) == (2, [])
    assert processor.tokenizer.decode(builder.unexpanded_ids(sample)).count("<|image_pad|>") == 2


@pytest.mark.parametrize(
    ("form", "pixels", "images", "values"),
    # 32 frames of 56 x 56 pixels of 3 bytes. Pillow has 4 bytes for a pixel. Values are float32, and the processor
    # repeats each image for the two frames that the tower joins.
    [("native", 301_056, 0, 1_204_224), ("frames", 301_056, 401_408, 2_408_448)],
)
def test_a_prompt_holds_a_video_as_pixels_and_as_values_alone(
    processor: Any, form: VideoFormat, pixels: int, images: int, values: int
):
    video = noise_video(32, seed=0, size=(56, 56))
    prompt = PromptBuilder(processor, DataConfig(), video_format=form).build(clip_sample(video, content=[VIDEO]))
    (held,) = prompt.sample.all_videos
    assert held.frames.nbytes == pixels and held.frames is video.frames
    assert sum(4 * image.width * image.height for image in prompt.sample.images) == images
    tensors = [value for name, value in prompt.mm_inputs.items() if name.startswith("pixel_values")]
    assert [value.nbytes for value in tensors] == [value.untyped_storage().nbytes() for value in tensors] == [values]


def test_videos_of_unequal_lengths_that_a_processor_refuses_are_named(tmp_path: Path):
    checkpoint = build_tiny("internvl", tmp_path)
    builder = PromptBuilder(AutoProcessor.from_pretrained(checkpoint), DataConfig())
    with pytest.raises(DataError, match=r"Sample s: its videos have 4, 6 frames, .*data.num_frames, or data.video_fo"):
        builder.build(clip_sample(clip(4), clip(6), content=[VIDEO, VIDEO]))


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoProcessor.from_pretrained(build_tiny("smolvlm", tmp_path_factory.mktemp("tiny")))


def own_inputs(processor: Any, prompt: str, **media: Any) -> dict[str, torch.Tensor]:
    """What one call of the processor makes of a text and media, without sampling frames again."""
    if videos := media.get("videos"):
        media = media | {"videos": [[v.frames for v in videos]], "video_metadata": [v.metadata for v in videos]}
        media["do_sample_frames"] = False
    return dict(processor(text=[prompt], return_tensors="pt", **media))


def test_a_processor_with_one_input_is_called_for_each_image_and_video(smolvlm: Any):
    """SmolVLM's own call with an image and a video has the right tokens, and the pixels of the video alone."""
    video, image = noise_clip(4), picture(24, 16)
    builder = PromptBuilder(smolvlm, DataConfig())
    found = {
        kind: builder.build(clip_sample(*[video] * content.count(VIDEO), content=content, images=images))
        for kind, content, images in (
            ("video", [text("Look: "), VIDEO], []),
            ("both", [VIDEO, text("and"), IMAGE], [image]),
        )
    }
    start, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    alone = own_inputs(smolvlm, f"{start}Look: <video>{end}", videos=[video])
    both = own_inputs(smolvlm, f"{start}<video>and<image>{end}", videos=[video], images=[[image]])
    pixels = own_inputs(smolvlm, "<image>", images=[[image]])["pixel_values"]
    assert found["video"].token_ids.equal(alone["input_ids"][0])
    assert found["both"].token_ids.equal(both["input_ids"][0])
    assert found["video"].mm_inputs["pixel_values"].equal(alone["pixel_values"])
    assert found["both"].mm_inputs["pixel_values"].equal(torch.cat([alone["pixel_values"], pixels], dim=1))
    masks = [found["both"].mm_inputs["pixel_attention_mask"].shape, found["both"].mm_inputs["pixel_values"].shape]
    assert masks[0][:2] == masks[1][:2]


def test_videos_in_one_input_may_differ_in_length(smolvlm: Any):
    """One call for both would pad the shorter one, and count the padding in its text."""
    prompt = PromptBuilder(smolvlm, DataConfig()).build(clip_sample(clip(4), clip(6), content=[VIDEO, VIDEO]))
    decoded = smolvlm.tokenizer.decode(prompt.token_ids)
    assert re.findall(r"series of (\w+) frames", decoded) == ["four", "six"]
    assert prompt.mm_inputs["pixel_values"].shape[:2] == (1, 10)


PUBLISHED = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM2's template leaves videos out. Its processor has another, which differs by that alone."""


@pytest.mark.parametrize(("template", "shown"), [
    (PUBLISHED, "<|im_start|>User: You are provided the following series of two frames"),
    (chat_template("<image>", "[<video>]"), "<|im_start|>user\n[You are provided the following series of two frames"),
])  # fmt: skip
def test_the_processors_own_template_is_used_if_the_checkpoints_leaves_videos_out(
    smolvlm: Any, template: str, shown: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(smolvlm, "chat_template", template)
    prompt = PromptBuilder(smolvlm, DataConfig()).build(clip_sample(clip(2), content=[VIDEO, text("Where?")]))
    assert smolvlm.tokenizer.decode(prompt.token_ids).startswith(shown)


def test_a_processors_own_template_with_other_text_is_refused(smolvlm: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smolvlm, "chat_template", chat_template("<image>"))
    with pytest.raises(DataError, match=r"leaves videos out, and its processor would replace .*Let .* write <video>"):
        PromptBuilder(smolvlm, DataConfig()).build(clip_sample(clip(2), content=[VIDEO, text("Where?")]))


def test_a_template_may_join_the_token_of_a_video_from_parts(checkpoint: str):
    builder = with_template(checkpoint, chat_template("<|image_pad|>", "{{ '<|video' ~ '_pad|>' }}"))
    prompt = builder.build(clip_sample(clip(2), content=[VIDEO, text("Where?")]))
    assert builder.processor.tokenizer.decode(prompt.token_ids).startswith(
        "<|im_start|>user\n<|video_pad|><|video_pad|>W"
    )


def test_without_a_template_a_video_has_its_token(checkpoint: str):
    builder = with_template(checkpoint, None)
    prompt = builder.build(clip_sample(clip(2), content=[text("Look: "), VIDEO]))
    assert builder.processor.tokenizer.decode(prompt.token_ids) == "Look: <|video_pad|><|video_pad|>"
    assert prompt.mm_inputs["video_grid_thw"].tolist() == [[1, 2, 4]]
