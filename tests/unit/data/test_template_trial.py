"""The form and the role that are chosen for the chat templates of published models, and of tiny models."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoProcessor

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.template_trial import TRIED, TRIED_SCHEMA, TemplateTrial, stop_sequences
from rl_vlm.data.tool_calls import CLOSE, problem_of_call
from rl_vlm.data.turns import TurnFormat
from rl_vlm.errors import ConfigError
from rl_vlm.model.families import FAMILIES
from rl_vlm.tiny.family import chat_template
from rl_vlm.types import Sample, ToolCall, ToolResult
from tests.helpers.builders import noise_image, png
from tests.helpers.templates import END, FAMILY, STOPS, builder_of, message
from tests.helpers.tiers import families_in_tiers, in_tiers
from tests.helpers.videos import noise_video
from tests.tiny.build import TINY_FAMILIES, build_tiny

SCHEMAS = [TRIED_SCHEMA | {"function": TRIED_SCHEMA["function"] | {"name": "crop", "description": "Crop it."}}]
TEXT = "tools: calls as JSON in <tool_call> tags, results as user messages: the chat template leaves out tools"
XML = "tools: calls as <function=…> in <tool_call> tags, results as tool messages: "
LFM = "tools: calls as Python between <|tool_call_start|> and <|tool_call_end|>, results as tool messages: "
ATEM = (
    """' to=tried_tool<|message|><atem:function_calls>\\n<atem:invoke name="tried_tool">\\n"""
    """<atem:parameter name="text">tried tex…"""
)
GEMMA = "tools: calls as call:… between <|tool_call> and <tool_call|>, results as "
STAY = "earlier thoughts stay in the context as they were sampled, although this chat template would drop them"
PRESERVE = "preserve_thinking: true in chat_template_kwargs"
COUNTS = "the processor counts images, and begins again with each observation"
CHOSEN = {
    "qwen2_5_vl": TEXT,
    "gemma3": TEXT,
    "smolvlm": TEXT,
    "idefics3": TEXT,
    "llava_next": TEXT,
    "qwen3_vl": "tools: calls as JSON in <tool_call> tags, results as tool messages",
    **dict.fromkeys(("lfm2_2_5_vl", "lfm2_2_5", "lfm2_2_5_v2"), f"{LFM}{PRESERVE}"),
    "muse_glimmer": f"{TEXT.rpartition(': ')[0]}: calls as the chat template writes them cannot be read ({ATEM})",
    "qwen3_5_nothink": f"{XML}{STAY}",
    "qwen3_5_think": f"{XML}{STAY}",
    "qwen3_6": f"{XML}{PRESERVE}",
    "qwen3_8": f"{XML}{PRESERVE}",
    "gemma4": f"{GEMMA}user messages: the chat template leaves out images in tool messages; {STAY}",
    "gemma4_v2": f"{GEMMA}tool messages: {STAY}",
    "gemma4_v3": f"{GEMMA}user messages: the chat template leaves out images in tool messages; {STAY}",
    "gemma4_v4": f"{GEMMA}tool messages: {STAY}",
    **dict.fromkeys(("gemma4_v5", "diffusion_gemma"), f"{GEMMA}tool messages: {PRESERVE}; {STAY}"),
}
FAST = {"qwen2_5_vl", "qwen3_vl", "qwen3_6", "gemma4_v3"}

MISTRAL = """
{%- set last = namespace(at=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor -%}
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and loop.index0 == last.at %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{% for b in m.content %}{{ b.text if b.type == 'text' else '[IMG]' }}{% endfor %}[/INST]
{%- elif m.role == 'system' -%}
[SYSTEM_PROMPT]{{ m.content[0].text }}[/SYSTEM_PROMPT]
{%- elif m.role == 'assistant' -%}
{%- if m.tool_calls -%}
[TOOL_CALLS][
{%- for c in m.tool_calls -%}
{%- if c.id | length < 9 %}{{ raise_exception('short id') }}{% endif -%}
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}
{{- ', ' if not loop.last -}}
{%- endfor -%}
]
{%- else %}{{ m.content[0].text }}{% endif %}{{ eos_token }}
{%- elif m.role == 'tool' -%}
[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- endif %}{% endfor -%}"""
"""Mistral's messages: tools before the last message of the user, and the content of a tool's message as in Python."""


def choose(builder: PromptBuilder, stops: list[str], **settings: Any) -> TurnFormat:
    settings = {"schemas": SCHEMAS, "tool_format": "auto", "observation_role": "auto", "takes_images": True} | settings
    return TurnFormat.choose(builder, builder.processor.tokenizer.convert_tokens_to_ids(stops), **settings)


def tiny_builder(family: str, directory: Path, template: str | None = None) -> PromptBuilder:
    processor = AutoProcessor.from_pretrained(build_tiny(family, directory))
    processor.chat_template = template or processor.chat_template
    return PromptBuilder(processor, DataConfig())


@pytest.mark.parametrize("template", in_tiers(FAMILY, FAST))
def test_each_template_has_its_form_and_role(template: str, tmp_path: Path):
    assert choose(builder_of(template, tmp_path), STOPS[template]).description == CHOSEN[template]


@pytest.mark.parametrize("template", in_tiers(["gemma4", "gemma4_v3"], {"gemma4_v3"}))
def test_results_without_images_are_messages_of_tools(template: str, tmp_path: Path):
    turns = choose(builder_of(template, tmp_path), STOPS[template], takes_images=False)
    assert turns.choice.role == "tool"


def test_mistral_has_tools_in_text(tmp_path: Path):
    builder = tiny_builder("mistral3", tmp_path, MISTRAL)
    stop = builder.processor.tokenizer.eos_token
    turns = choose(builder, [stop])
    assert (turns.choice.form.kind, turns.choice.role) == ("text", "user")
    with pytest.raises(ConfigError, match=r"rollout.tool_format: template: .* cannot be read .*TOOL_CALLS"):
        choose(builder, [stop], tool_format="template")


def test_a_form_without_a_role_for_results_is_not_chosen(tmp_path: Path):
    """The template of Mistral, with calls that can be read."""
    template = MISTRAL.replace("[TOOL_CALLS][", "").replace("{%- endfor -%}\n]", "{%- endfor -%}")
    template = template.replace(', "id": "{{ c.id }}"}', "}</tool_call>").replace('{"name"', '<tool_call>{"name"')
    builder = tiny_builder("mistral3", tmp_path, template)
    for takes_images in (True, False):
        turns = choose(builder, [builder.processor.tokenizer.eos_token], takes_images=takes_images)
        assert (turns.choice.form.kind, turns.choice.role) == ("text", "user")
        assert turns.description.endswith(
            "results as user messages: the chat template writes results as Python lists in tool messages; the chat "
            "template writes the tools again in user messages"
        )


def test_a_template_that_changes_the_text_of_results_is_not_chosen(tmp_path: Path):
    """JSON would show the model backslashes that the tool did not write."""
    template = builder_of("qwen3_vl", tmp_path / "published").processor.chat_template
    before, role, after = template.partition('message.role == "tool"')
    written = "{{- content.text }}"
    assert role and written in after
    builder = tiny_builder("qwen3_vl", tmp_path, before + role + after.replace(written, "{{- content.text | tojson }}"))
    turns = choose(builder, ["<|im_end|>"])
    assert "the chat template changes the text of results in tool messages" in turns.description
    assert turns.choice.role == "user"


@pytest.mark.parametrize(
    ("template", "settings", "problem"),
    [
        ("qwen2_5_vl", {"tool_format": "template"}, "rollout.tool_format: template: .* leaves out tools. Use auto"),
        ("gemma3", {"tool_format": "template"}, "rollout.tool_format: template: .* leaves out tools. Use auto"),
        (
            "gemma4_v3",
            {"observation_role": "tool"},
            "rollout.observation_role: tool: .* leaves out images in tool messages; .* Use auto",
        ),
        (
            "gemma3",
            {"tool_format": "text", "observation_role": "tool"},
            "rollout.tool_format: text with rollout.observation_role: tool: .* must alternate .* in tool messages. Use",
        ),
    ],
)
def test_a_setting_that_does_not_work_is_refused(template: str, settings: dict[str, str], problem: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=problem):
        choose(builder_of(template, tmp_path), STOPS[template], **settings)


@pytest.mark.parametrize(
    ("settings", "kind", "role"),
    [
        ({"tool_format": "text"}, "text", "user"),
        ({"observation_role": "user"}, "template", "user"),
        ({"tool_format": "template", "observation_role": "tool"}, "template", "tool"),
    ],
)
def test_a_setting_that_works_is_used(settings: dict[str, str], kind: str, role: str, tmp_path: Path):
    choice = choose(builder_of("qwen3_vl", tmp_path), STOPS["qwen3_vl"], **settings).choice
    assert (choice.form.kind, choice.role) == (kind, role)


def test_without_a_chat_template_there_are_no_turns(tmp_path: Path):
    with pytest.raises(
        ConfigError, match="the checkpoint has no chat template, so turns after the first cannot be wri"
    ):
        choose(tiny_builder("paligemma", tmp_path), ["<eos>"])


def test_a_template_that_shows_no_image_after_the_prompt_is_refused(tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    image = "{% if content['type'] == 'image'"
    builder.processor.chat_template = builder.processor.chat_template.replace(
        image, "{% if content['type'] == 'image' and not loop.first %}{% elif content['type'] == 'image'"
    )
    with pytest.raises(
        ConfigError, match=r"turns cannot be written .* leaves out images in user messages. Choose another"
    ):
        choose(builder, [END])


def test_a_template_that_shows_one_of_two_images_is_refused(tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    builder.processor.chat_template = builder.processor.chat_template.replace(
        "{% set image_count.value = image_count.value + 1 %}",
        "{% set image_count.value = image_count.value + 1 %}{% if image_count.value == 2 %}{% continue %}{% endif %}",
    )
    with pytest.raises(
        ConfigError, match=r"turns cannot be written .* leaves out images .* in user messages. Choose another"
    ):
        choose(builder, [END])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("for content in message['content'] %}", "for content in message['content'] | reverse %}"),
        ("{{ content['text'] }}", "{{ content['text'] }} {{ content['text'] }}"),
    ],
)
def test_a_template_that_writes_results_twice_or_backwards_is_refused(old: str, new: str, tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    assert old in builder.processor.chat_template
    builder.processor.chat_template = builder.processor.chat_template.replace(old, new)
    with pytest.raises(ConfigError, match="changes the order of results in user messages"):
        choose(builder, [END])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{{- tool_call.arguments | tojson }}", "{{- {} | tojson }}", "leaves out calls"),
        ("{{- tool_call.name }}", "x", "leaves out calls"),
        ('<tool_call>\\n{"name": "\' }}', '<call>\\n{"name": "\' }}', "cannot be read"),
        ("{{- tool | tojson }}", "{{- tool.function.name }}", "leaves out tools"),
    ],
)
def test_a_template_that_leaves_out_a_part_has_tools_in_text(old: str, new: str, problem: str, tmp_path: Path):
    builder = builder_of("qwen3_vl", tmp_path)
    assert old in builder.processor.chat_template
    builder.processor.chat_template = builder.processor.chat_template.replace(old, new)
    turns = choose(builder, [END])
    assert turns.choice.form.kind == "text" and problem in turns.description


@pytest.mark.parametrize(
    ("written", "start", "result", "note"),
    [
        ("<|video_pad|>", "video", "video", ""),
        (
            "{%- if message == messages[1] -%}<|video_pad|>{%- endif -%}", "video", "frames",
            "; the chat template leaves out videos of results, so their frames are images",
        ),
        ("", "frames", "frames", "; the chat template leaves out videos, so their frames are images"),
    ],
)  # fmt: skip
def test_videos_that_a_template_leaves_out_are_frames(written: str, start: str, result: str, note: str, tmp_path: Path):
    """Messages are the tools, the prompt, a turn and its result."""
    builder = tiny_builder("qwen2_5_vl", tmp_path, chat_template("<|image_pad|>", written))
    turns = choose(builder, [END], takes_videos=True)
    assert turns.description == TEXT + note
    decode = builder.processor.tokenizer.decode
    film = noise_video(2, seed=0, size=(8, 8))
    content = [{"type": "text", "text": "See: "}, {"type": "video"}]
    asked = [message("user", "Where?")]
    row = Sample("s", asked, [], {}, asked)
    prompt = turns.builder.build(turns.reset_sample(row, content, [film], [film.encoded()]))
    call = builder.processor.tokenizer('<tool_call>\n{"name": "crop", "arguments": {}}\n</tool_call>')["input_ids"]
    shown = ToolResult(content, (film.encoded(),))
    seen = turns.observe("turn 1", call, [ToolCall("crop", {})], [shown], [[film]])
    expected = {
        "video": "See: <|video_pad|>",  # both frames are a patch of 2 x 2, and a token
        "frames": "See: 0.0 s: <|image_pad|>0.5 s: <|image_pad|>",
    }
    assert expected[start] in decode(prompt.token_ids) and expected[result] in decode(seen.token_ids)
    shapes = [[*found.mm_inputs] for found in (prompt, seen)]
    names = {"video": "pixel_values_videos", "frames": "pixel_values"}
    assert [names[kind] in found for kind, found in zip((start, result), shapes, strict=True)] == [True, True]
    assert turns.prompt_rule.processor is (None if start == "frames" else builder.video_processor)
    assert turns.result_rule.processor is (None if result == "frames" else builder.video_processor)


def test_the_tokenizers_response_template_reads_its_calls(tmp_path: Path):
    builder = builder_of("qwen3_vl", tmp_path)
    builder.processor.tokenizer.response_template = {
        "defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
            "tool_calls": {
                "open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
        },
    }  # fmt: skip
    turns, tokenizer = choose(builder, [END]), builder.processor.tokenizer
    assert "calls as the tokenizer's response template has them" in turns.description
    text = '<think>hm</think>\nLook.\n<tool_call>\n{"name": "crop", "arguments": {"text": "a"}}\n</tool_call><|im_end|>'
    parsed = turns.parse(tokenizer(text)["input_ids"])
    assert (parsed.content, parsed.calls) == ("Look.", (ToolCall("crop", {"text": "a"}),))
    parsed = turns.parse(tokenizer('<tool_call>\n{"name": "crop", <|im_end|>')["input_ids"])
    assert parsed.problem is not None and parsed.problem.startswith(
        "a call cannot be read: json parser could not parse"
    )


def test_a_setting_of_the_user_for_thoughts_stays(tmp_path: Path):
    processor = builder_of("qwen3_6", tmp_path).processor
    builder = PromptBuilder(processor, DataConfig(chat_template_kwargs={"preserve_thinking": False}))
    turns = choose(builder, [END])
    assert turns.builder.template_kwargs["preserve_thinking"] is False
    assert turns.description == f"{XML}{STAY}"


def test_without_tools_only_observations_are_tried(tmp_path: Path):
    turns = choose(builder_of("qwen3_vl", tmp_path), [END], schemas=[])
    assert turns.description == "tools: none, observations as user messages"
    sample = Sample("s", [message("user", "Go.")], [], {}, "")
    assert turns.builder.text(sample) == "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    observed = turns.observe("o", [], [], [ToolResult(message("user", "Left.")["content"])], [[]])
    decode = turns.builder.processor.tokenizer.decode
    assert decode(observed.token_ids) == "<|im_end|>\n<|im_start|>user\nLeft.<|im_end|>\n<|im_start|>assistant\n"


def test_tools_that_a_template_cannot_write_are_written_in_text(tmp_path: Path):
    schema = {"type": "function", "function": {"name": "odd", "description": "Odd.", "parameters": {"x": object()}}}
    builder = builder_of("qwen3_vl", tmp_path)
    trial = TemplateTrial(builder, builder.processor.tokenizer.convert_tokens_to_ids([END]), [schema], True)
    with pytest.raises(ConfigError, match=r"rollout.tool_format: template: .*not JSON serializable"):
        trial.choose("template", "auto")


class Merging:
    """A tokenizer that merges a closing brace with the start of a tag, and its end with a line break."""

    pieces = ("}</", "</", "tool_call", ">\n", ">", "}", "\n", '"', "]", "{", " ")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        ids = []
        while text:
            ids.append(next(i for i, piece in enumerate(self.pieces) if text.startswith(piece)))
            text = text.removeprefix(self.pieces[ids[-1]])
        return {"input_ids": ids}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.pieces[i] for i in ids)


def test_a_tag_ends_turns_in_each_way_that_it_is_tokenized():
    assert stop_sequences(Merging(), CLOSE) == ((0, 2, 4), (1, 2, 4))


@pytest.mark.parametrize("family", families_in_tiers(TINY_FAMILIES))
def test_each_family_has_a_form_or_is_refused(family: str, tmp_path: Path):
    builder = tiny_builder(family, tmp_path)
    tokenizer, config = builder.processor.tokenizer, AutoConfig.from_pretrained(tmp_path)
    takes_images = FAMILIES[config.model_type].first_images_only is None
    if family in {"paligemma", "paligemma2", "got_ocr2"}:
        with pytest.raises(ConfigError, match="no chat template"):
            choose(builder, [tokenizer.eos_token], takes_images=takes_images)
        return
    turns = choose(builder, [tokenizer.eos_token], takes_images=takes_images)
    counts_images = family in {"minicpmv4_6", "minicpmv4_7"}
    assert turns.description == (f"{TEXT}; {COUNTS}" if counts_images else TEXT)
    picture = noise_image(48, 32, seed=1)
    text = '<tool_call>{"name": "crop", "arguments": {"text": "a"}}</tool_call>'
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    parsed = turns.parse(ids)
    assert parsed.calls == (ToolCall("crop", {"text": "a"}),) and parsed.content == ""
    pictures = [picture] * takes_images
    content = message("tool", "Here", *["image"] * takes_images)["content"]
    found = turns.observe("o", ids, parsed.calls, [ToolResult(content, (png(picture),) * takes_images)], [pictures])
    assert found.num_images == takes_images and bool(found.mm_inputs) == takes_images
    assert (len(found.token_ids) > len(found.unexpanded_ids) > 0) or not takes_images
    question = message("user", "image", "Which digit?")
    prompt = turns.builder.build(Sample("s", [question], [noise_image(32, 24, seed=2)], {}, ""))
    seen = message("user", "<tool_response>\nHere", *["image"] * takes_images, "\n</tool_response>")
    conversation, shown = [question, message("assistant", text), seen], [*prompt.sample.images, *pictures]
    whole = turns.builder.templated(conversation, shown, tokenize=False)
    expected = turns.builder.part(whole, shown)[0].tolist()
    trajectory = [*prompt.token_ids.tolist(), *ids, *found.token_ids.tolist()]
    if counts_images:  # the trajectory has the number of the first image twice
        assert trajectory != expected
        whole, text = tokenizer.decode(expected), tokenizer.decode(trajectory)
        assert text == whole.replace("<image_id>1</image_id>", "<image_id>0</image_id>")
    else:
        assert trajectory == expected


def test_the_call_that_is_tried_fits_its_schema():
    assert problem_of_call(TRIED, [TRIED_SCHEMA]) is None
