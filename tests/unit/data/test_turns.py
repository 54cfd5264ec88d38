"""Turns with calls and results, against renderings of whole conversations by the chat templates of published models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.tool_calls import schema_of
from rl_vlm.data.turns import ParsedTurn, TurnFormat
from rl_vlm.errors import DataError
from rl_vlm.types import Sample, ToolCall, ToolResult
from tests.helpers.builders import noise_image
from tests.helpers.templates import BEGINS, END, FAMILY, GEMMA_4, LFM, STOPS, builder_of, message, turn
from tests.helpers.tiers import in_tiers

FIRST, SECOND = noise_image(32, 24, seed=1), noise_image(48, 32, seed=2)


def crop(x: int, mode: str = "fast") -> str:
    """Crop the image.

    Args:
        x: Left edge.
        mode: How to crop.
    """
    return f"{x} {mode}"


def look() -> str:
    """Look again."""
    return ""


SCHEMAS = [schema_of(crop), schema_of(look)]
CALL, LOOK = ToolCall("crop", {"x": 3, "mode": "exact"}), ToolCall("look", {})
AS_JSON = '<tool_call>\n{"name": "crop", "arguments": {"x": 3, "mode": "exact"}}\n</tool_call>'
AS_XML = (
    "<tool_call>\n<function=crop>\n<parameter=x>\n3\n</parameter>\n<parameter=mode>\nexact\n</parameter>\n</function>\n"
    "</tool_call>"
)
AS_GEMMA = '<|tool_call>call:crop{mode:<|"|>exact<|"|>,x:3}<tool_call|>'
AS_LFM = "<|tool_call_start|>[crop(x=3, mode='exact')]<|tool_call_end|>"
"""The call as templates write it."""
SAMPLED = {
    "qwen3_vl": f"Look.\n{AS_JSON}",
    **dict.fromkeys(LFM, f"Look.{AS_LFM}"),
    "qwen3_5_nothink": f"Look.\n\n{AS_XML}",
    **dict.fromkeys(("qwen3_5_think", "qwen3_6", "qwen3_8"), f"hm\n</think>\n\nLook.\n\n{AS_XML}"),
    **dict.fromkeys(GEMMA_4, AS_GEMMA),
}
"""The text of a turn with a call, for each template that writes calls."""
SAYS = {template: "" if template in GEMMA_4 else "Look." for template in SAMPLED}
CALL_STOPS = {
    **{template: "<|tool_response>" if template in GEMMA_4 else END for template in SAMPLED}, "gemma4_v2": "<turn|>"
}  # fmt: skip
"""The token after a call."""
IN_TEXT = {"qwen2_5_vl", "gemma3", "smolvlm", "idefics3", "llava_next", "muse_glimmer"}
"""Templates that write no calls, or whose calls only the checkpoint's own response template reads."""
USER_RESULTS = {"gemma4", "gemma4_v3"}
"""Templates that write calls, and no images in messages of tools."""
FAST = {"qwen3_vl", "qwen2_5_vl"}


def format_of(template: str, builder: PromptBuilder, **settings: Any) -> TurnFormat:
    stops = builder.processor.tokenizer.convert_tokens_to_ids(STOPS[template])
    settings = {"tool_format": "auto", "observation_role": "auto", "takes_images": True} | settings
    return TurnFormat.choose(builder, stops, SCHEMAS, **settings)


def result(*content: str) -> ToolResult:
    """A result whose `image` is an image block."""
    return ToolResult(message("tool", *content)["content"], (b"png",) * content.count("image"))


def asked(role: str, says: str, call: ToolCall, result: dict[str, Any], thought: str) -> list[dict[str, Any]]:
    """A turn with a call, and the result of the call in a message of a role."""
    made = {"id": "call00000", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    turn = message("assistant", *filter(None, [says])) | {"tool_calls": [made]}
    turn |= {"reasoning_content": thought} if thought else {}
    named = {"name": call.name, "tool_call_id": "call00000"} if role == "tool" else {}
    return [turn, result | {"role": role} | named]


@pytest.mark.parametrize("template", in_tiers(SAMPLED, FAST))
def test_a_trajectory_with_a_call_is_one_rendering(template: str, tmp_path: Path):
    builder = builder_of(template, tmp_path)
    turns, sampled = format_of(template, builder), SAMPLED[template]
    ids = turn(builder, sampled, CALL_STOPS[template])
    parsed = turns.parse(ids)
    assert (parsed.calls, parsed.problem) == ((CALL,), None)
    assert (
        parsed.content
        == sampled.removesuffix(AS_XML).removesuffix(AS_JSON).removesuffix(AS_GEMMA).removesuffix(AS_LFM).strip()
    )
    question, role = message("user", "image", "Which digit?"), "user" if template in USER_RESULTS else "tool"
    prompt = turns.builder.build(Sample("s", [question], [FIRST], {}, ""))
    observed = turns.observe("o", ids, parsed.calls, [result("Here", "image")], [[SECOND]])
    seen = message(role, "Here", "image") if role == "tool" else USER_MESSAGE
    thought = "hm" if "</think>" in sampled else ""
    conversation = [question, *asked(role, SAYS[template], CALL, seen, thought)]
    whole = turns.builder.templated(conversation, [FIRST, SECOND], tokenize=False)
    expected = builder.part(whole, [FIRST, SECOND])[0].tolist()
    found = [*prompt.token_ids.tolist(), *ids, *observed.token_ids.tolist()]
    decode = builder.processor.tokenizer.decode
    assert decode(found) == decode(expected) and found == expected
    assert observed.images == (b"png",)


USER_MESSAGE = message("user", "<tool_response>\nHere", "image", "\n</tool_response>")


@pytest.mark.parametrize("template", in_tiers(sorted(IN_TEXT), FAST))
def test_a_trajectory_with_a_call_as_text_is_one_rendering(template: str, tmp_path: Path):
    builder = builder_of(template, tmp_path)
    turns = format_of(template, builder)
    says = f"{BEGINS.get(template, '')}Look."
    ids = turn(builder, f"{says}\n{AS_JSON}", STOPS[template][0])
    parsed, read = turns.parse(ids), says.replace("<|message|>", "")
    assert parsed == ParsedTurn(f"{read}\n{AS_JSON}", read.strip(), (CALL,), None)
    question = message("user", "image", "Which digit?")
    prompt = turns.builder.build(Sample("s", [question], [FIRST], {}, ""))
    observed = turns.observe("o", ids, parsed.calls, [result("Here", "image")], [[SECOND]])
    conversation = [question, message("assistant", f"Look.\n{AS_JSON}"), USER_MESSAGE]
    whole = turns.builder.templated(conversation, [FIRST, SECOND], tokenize=False)
    expected = builder.part(whole, [FIRST, SECOND])[0].tolist()
    found = [*prompt.token_ids.tolist(), *ids, *observed.token_ids.tolist()]
    decode = builder.processor.tokenizer.decode
    assert decode(found) == decode(expected) and found == expected


def test_the_model_is_told_of_tools_wherever_prompts_are_built(tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    turns, decode = format_of("qwen2_5_vl", builder), builder.processor.tokenizer.decode
    plain = Sample("s", [message("user", "image", "Which digit?")], [FIRST], {}, "")
    system = Sample("s", [message("system", "Be brief."), *plain.messages], [FIRST], {}, "")
    start = "<|im_start|>system\n# Tools\n\nYou may call one or more functions"
    for text in (decode(turns.builder.build(plain).token_ids), decode(turns.builder.unexpanded_ids(plain))):
        assert text.startswith(start) and '{"name": "crop", "description": "Crop the image."' in text
    told = turns.builder.text(system)
    assert told.startswith(start) and "XML tags.\n\nBe brief.<|im_end|>\n<|im_start|>user\n" in told


def test_a_template_without_system_messages_tells_the_user(tmp_path: Path):
    builder = builder_of("llava_next", tmp_path)
    builder.processor.chat_template = builder.processor.chat_template.replace(
        "{% if message['role'] == 'system' %}{{", "{% if message['role'] == 'system' %}{{ raise_exception('no') }}{{"
    )
    turns = format_of("llava_next", builder)
    text = turns.builder.text(Sample("s", [message("user", "image", "Which digit?")], [FIRST], {}, ""))
    assert text.startswith("[INST] <image>\n# Tools\n\nYou may") and text.endswith("XML tags.\n\nWhich digit? [/INST]")
    assert "; the first user message describes the tools" in turns.description


def test_results_of_two_calls_are_one_message_of_a_user(tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    turns = format_of("qwen2_5_vl", builder)
    results = [result("a", "image"), result("b", "image", "c")]
    found = turns.observe("o", turn(builder, "7", END), [CALL, LOOK], results, [[FIRST], [SECOND]])
    assert builder.processor.tokenizer.decode(found.unexpanded_ids) == (
        "\n<|im_start|>user\n<tool_response>\na<|vision_start|><|image_pad|><|vision_end|>\n</tool_response>\n"
        "<tool_response>\nb<|vision_start|><|image_pad|><|vision_end|>c\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert found.images == (b"png", b"png")
    grids = [builder.part("<|image_pad|>", [image])[2]["image_grid_thw"] for image in (FIRST, SECOND)]
    assert found.mm_inputs["image_grid_thw"].equal(torch.cat(grids))


def test_results_of_two_calls_are_in_order_in_messages_of_tools(tmp_path: Path):
    builder = builder_of("gemma4_v5", tmp_path)
    turns = format_of("gemma4_v5", builder)
    found = turns.observe(
        "o", turn(builder, "7", "<|tool_response>"), [LOOK, CALL], [result("a"), result("b")], [[], []]
    )
    assert builder.processor.tokenizer.decode(found.token_ids) == (
        'response:look{value:<|"|>a<|"|>}<tool_response|><|tool_response>response:crop{value:<|"|>b<|"|>}<tool_response|>'
    )
    assert found.unexpanded_ids == ()


@pytest.mark.parametrize("template", in_tiers(FAMILY, {"qwen3_vl"}))
def test_the_tokens_of_an_engine_have_one_placeholder_for_an_image(template: str, tmp_path: Path):
    builder = builder_of(template, tmp_path)
    turns, tokenizer = format_of(template, builder), builder.processor.tokenizer
    ids = turn(builder, "7", STOPS[template][-1])
    found = turns.observe("o", ids, [CALL], [result("a", "image")], [[SECOND]])
    text = tokenizer.decode(found.unexpanded_ids)
    placeholder = builder.processor.image_token if template != "gemma3" else "<start_of_image>"
    assert text.count(placeholder) == 1
    expanded = builder.part(tokenizer.decode(ids[-1:]) + text, [SECOND])[0].tolist()
    assert expanded[len(expanded) - len(found.token_ids) :] == found.token_ids.tolist()


@pytest.mark.parametrize("template", ["qwen2_5_vl", "qwen3_vl"])
def test_a_problem_is_told_by_the_user(template: str, tmp_path: Path):
    builder = builder_of(template, tmp_path)
    turns = format_of(template, builder)
    ids = turn(builder, '<tool_call>\n{"name": "crop"\n</tool_call>', END)
    parsed = turns.parse(ids)
    assert parsed.calls == () and parsed.content == parsed.text == '<tool_call>\n{"name": "crop"\n</tool_call>'
    assert parsed.problem and parsed.problem.endswith("JSON: Expecting ',' delimiter: line 3 column 1 (char 17)")
    found = turns.observe("o", ids, [], [result(f"{parsed.problem}.")], [[]])
    assert builder.processor.tokenizer.decode(found.token_ids) == (
        f"\n<|im_start|>user\n<tool_response>\n{parsed.problem}.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_that_ends_at_its_call_gets_the_stop_token_of_the_template(tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    turns, tokenizer = format_of("qwen2_5_vl", builder), builder.processor.tokenizer
    ids = builder.part(AS_JSON, ())[0].tolist()
    assert turns.stop_sequences == (tuple(tokenizer("</tool_call>")["input_ids"]),)
    assert tuple(ids[-len(turns.stop_sequences[0]) :]) in turns.stop_sequences
    found = turns.observe("o", ids, [CALL], [result("a")], [[]])
    assert tokenizer.decode(found.token_ids).startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\na\n")


def test_turns_in_the_templates_form_end_with_stop_tokens_only(tmp_path: Path):
    assert format_of("qwen3_vl", builder_of("qwen3_vl", tmp_path)).stop_sequences == ()


def test_observed_special_tokens_are_broken_and_counted(tmp_path: Path):
    builder = builder_of("qwen3_vl", tmp_path)
    turns, tokenizer = format_of("qwen3_vl", builder), builder.processor.tokenizer
    bad = result("<|im_end|> <|image_pad|>")
    found = turns.observe("o", turn(builder, "7", END), [CALL], [bad], [[]])
    plain = turns.observe("o", turn(builder, "7", END), [CALL], [result("a")], [[]])
    assert turns.counters == {"tools/broken_special_tokens": 2}
    special = torch.tensor(tokenizer.all_special_ids)
    assert torch.isin(found.token_ids, special).sum() == torch.isin(plain.token_ids, special).sum()
    turns.observe("o", turn(builder, "7", END), [ToolCall("<|im_end|>", {})], [result("a")], [[]])
    turns.reset_sample(Sample("s", [message("user", "?")], [], {}, "?"), bad.content, [], [])
    assert turns.counters == {"tools/broken_special_tokens": 5}


def test_tags_of_results_are_no_observed_text(tmp_path: Path):
    """Qwen3's template has the tags, and its vocabulary lists them."""
    builder = builder_of("qwen3_vl", tmp_path)
    builder.processor.tokenizer.add_tokens(["<tool_response>", "</tool_response>"])
    turns = format_of("qwen3_vl", builder, observation_role="user")
    found = turns.observe("o", turn(builder, "7", END), [CALL], [result("</tool_response>")], [[]])
    text = builder.processor.tokenizer.decode(found.token_ids)
    assert (text.count("<tool_response>"), text.count("</tool_response>")) == (1, 1)


def test_images_after_the_prompt_are_refused_if_the_model_does_not_take_them(tmp_path: Path):
    builder = builder_of("qwen2_5_vl", tmp_path)
    turns = format_of("qwen2_5_vl", builder, takes_images=False)
    with pytest.raises(
        DataError, match="row 3, turn 1: an observation has an image, and this model takes images in the f"
    ):
        turns.observe("row 3, turn 1", turn(builder, "7", END), [CALL], [result("image")], [[FIRST]])
    assert turns.observe("o", turn(builder, "7", END), [CALL], [result("a")], [[]]).mm_inputs == {}


@pytest.mark.parametrize("empty", [result(), result("")])
@pytest.mark.parametrize("template", in_tiers(["qwen2_5_vl", "qwen3_vl", "gemma4_v5", "lfm2_2_5_vl"], FAST))
def test_a_result_may_be_empty(template: str, empty: ToolResult, tmp_path: Path):
    builder = builder_of(template, tmp_path)
    turns = format_of(template, builder)
    found = turns.observe("o", turn(builder, "7", STOPS[template][-1]), [LOOK], [empty], [[]])
    assert len(found.token_ids) > 5


def test_reset_adds_to_the_last_message(tmp_path: Path):
    builder = builder_of("qwen3_vl", tmp_path)
    turns = format_of("qwen3_vl", builder)
    row = [message("system", "Be brief."), message("user", "image", "Which digit?")]
    sample = Sample("s", row, [FIRST], {"a": 1}, row, {0: b"own"}, ["first.png"])
    content = message("user", " Go.", "image", "Now.")["content"]
    found = turns.reset_sample(sample, content, [SECOND], [b"png"])
    assert found.messages == [row[0], message("user", "image", "Which digit? Go.", "image", "Now.")]
    assert found.prompt == found.messages
    assert (found.images, found.encoded_images) == ([FIRST, SECOND], {0: b"own", 1: b"png"})
    assert found.image_files == ["first.png", None]
    assert (found.sample_id, found.columns) == ("s", {"a": 1})
    assert row[1] == message("user", "image", "Which digit?")
    prompt = turns.builder.build(found)
    assert prompt.mm_inputs["image_grid_thw"].shape == (2, 3)


@pytest.mark.parametrize(
    ("content", "prompt"),
    [
        (["!"], "Which digit?!"),
        ([], "Which digit?"),
        (["!", "image"], [message("user", "Which digit?!", "image")]),
    ],
)
def test_the_prompt_of_a_plain_text_row_stays_text_without_images(content: list[str], prompt: Any, tmp_path: Path):
    turns = format_of("qwen3_vl", builder_of("qwen3_vl", tmp_path))
    sample = Sample("s", [message("user", "Which digit?")], [], {}, "Which digit?")
    images = [FIRST] * content.count("image")
    found = turns.reset_sample(sample, message("user", *content)["content"], images, [b""] * len(images))
    assert found.prompt == prompt
    assert found.messages == [message("user", "Which digit?" + "".join(content[:1]), *content[1:])]
